"""Files in an object store (``s3://``, ``gs://``), or in a folder (``file://``), by TensorStore's drivers.

Every file is an object, except that a file of more than ``PIECE`` bytes is cut into several. An object
appears as a whole or not at all.
"""

import os
import re
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import tensorstore as ts

from zerojax.errors import RunError

PIECE = 64 << 20
_AT_ONCE = 8
"""Pieces on their way, each in memory."""
_QUICK = {"max_retries": 3, "initial_delay": "200ms", "max_delay": "1s"}
_PATIENT = {"max_retries": 12, "initial_delay": "1s", "max_delay": "10s"}  # 95 s
_QUICK_SECONDS, _PATIENT_SECONDS = 20.0, 600.0


class StoreError(RunError):
    """An object store did not do as it was asked; the message has its URL and the reason.

    ``may_pass`` says whether the same request may succeed later.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class ObjectStore:
    """The files below a URL. Their names are relative to it, with slashes.

    Args:
        url: such as ``s3://bucket/runs/a``. The environment has keys and region as for Amazon's tools, and
            ``AWS_ENDPOINT_URL`` names another server.
        patient: repeat requests that fail for 95 seconds, otherwise for one.

    All methods raise a StoreError if the store cannot be reached, refuses, or does not respond.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        self.url = url
        retries = _PATIENT if patient else _QUICK
        self._seconds = _PATIENT_SECONDS if patient else _QUICK_SECONDS
        context = ts.Context({"s3_request_retries": retries, "gcs_request_retries": retries})
        with self._errors():
            self._store = ts.KvStore.open(_spec(url), context=context).result(self._seconds)

    def names(self, prefix: str) -> list[str]:
        """The names of all objects that begin with a prefix."""
        with self._errors():
            found = (self._store + prefix).list().result(self._seconds)
        return sorted(prefix + name.decode() for name in found)

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none of that name."""
        with self._errors():
            found = self._store.read(name).result(self._seconds)
        return None if found.state == "missing" else found.value

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        with self._errors():
            self._store.write(name, content).result(self._seconds)

    def delete(self, prefix: str) -> None:
        """Delete all objects that begin with a prefix."""
        with self._errors():
            (self._store + prefix).delete_range(ts.KvStore.KeyRange()).result(self._seconds)

    def upload(self, folder: Path, sizes: Mapping[str, int], prefix: str) -> None:
        """Write files of a folder below a prefix.

        Args:
            folder: the files' folder.
            sizes: bytes by name; a file may have grown since.
            prefix: comes before each name.

        Raises:
            OSError: a file cannot be read.
        """

        def send(piece: tuple[str, str, int, int]) -> None:
            name, key, start, size = piece
            with (folder / name).open("rb") as file:
                file.seek(start)
                self.write(prefix + key, file.read(size))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(send, _pieces(sizes)))

    def download(self, folder: Path, sizes: Mapping[str, int], prefix: str) -> None:
        """Write objects below a prefix to files of a folder; arguments are as for ``upload``.

        Raises:
            OSError: a file cannot be written.
        """
        for name in sizes:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise StoreError(f"{self.url}/{prefix}{name} would be written outside of {folder}")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")

        def get(piece: tuple[str, str, int, int]) -> None:
            name, key, start, _ = piece
            if (content := self.read(prefix + key)) is None:
                raise StoreError(f"{self.url}/{prefix}{key} is missing")
            with (folder / name).open("r+b") as file:
                file.seek(start)
                file.write(content)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(get, _pieces(sizes)))

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:  # all that TensorStore raises
            may_pass = isinstance(error, TimeoutError) or str(error).startswith(("ABORTED", "UNAVAILABLE"))
            raise StoreError(f"{self.url}: {_reason(error)}", may_pass=may_pass) from error


def _pieces(sizes: Mapping[str, int]) -> list[tuple[str, str, int, int]]:
    """The pieces of files: a file's name, the object's name, where the piece begins, and its bytes."""
    return [
        (name, f"{name}.piece-{start // PIECE}" if start else name, start, min(PIECE, size - start))
        for name, size in sizes.items()
        for start in range(0, max(1, size), PIECE)
    ]


def _spec(url: str) -> dict[str, Any]:
    spec = dict(ts.KvStore.Spec(url.rstrip("/") + "/").to_json())
    if spec["driver"] != "s3":
        return spec
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        spec |= {"endpoint": endpoint, "aws_region": "us-east-1"}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise Amazon's library looks for files, and complains
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _reason(error: Exception) -> str:
    """An error of TensorStore without its status code, and without the details of the HTTP request."""
    if isinstance(error, TimeoutError):
        return "it does not respond"
    text, *_ = str(error).partition(" [")
    status, _, reason = text.partition(": ")
    reason = re.sub("^All [0-9]+ retry attempts failed: (CURL error )?", "", reason)
    if reason not in ("", "Unknown"):
        return reason
    code = re.search(r"http_response_code='(\d+)'", str(error))
    return status.lower().replace("_", " ") + (f" (HTTP {code[1]})" if code else "")
