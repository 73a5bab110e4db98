"""The place of a process in its job."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """This process's place in a job.

    Attributes:
        host: address of rank 0 for all processes.
        port: the port of rank 0.
        listen: the interface on which rank 0 listens; None for all.
        rank: of this process.
        size: number of processes of the job.
        token: the job's secret; empty if there is none.
        folder: for this process's Unix sockets. Only the user can open it.
    """

    host: str
    port: int
    listen: str | None
    rank: int
    size: int
    token: str
    folder: Path

    @property
    def service(self) -> str:
        """Path of the Unix socket of JAX's coordination service, in rank 0."""
        return str(self.folder / "service")

    @property
    def client(self) -> str:
        """Path of the Unix socket at which JAX's client in this process reaches the service."""
        return self.service if self.rank == 0 else str(self.folder / "client")
