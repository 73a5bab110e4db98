"""Many ranks of a job in one process, each with its own connection and JAX client. Not a test itself.

python crowd.py PORT SIZE FIRST COUNT
"""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from jax._src.lib import _jax

from zerojax.multihost.peers import Place
from zerojax.multihost.peers.client import Client
from zerojax.multihost.peers.handshake import VARIABLE
from zerojax.multihost.peers.messages import Failure

SECONDS = 300


class One:
    """One rank, joined as by ``zerojax.multihost.distributed``, without devices."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, port: int, rank: int, size: int, folder: Path
    ) -> None:
        self._loop = loop
        self._rank = rank
        self._size = size
        self._place = Place(
            "127.0.0.1", port, None, rank, size, os.environ.get(VARIABLE, ""), folder / str(rank)
        )
        self._place.folder.mkdir()
        self._client = Client(self._place, SECONDS, SECONDS, self._end)
        self.failure: object = "it is not done"

    def _end(self, failure: Failure) -> None:
        print(f"rank {self._rank}: {failure.why}", flush=True)
        os._exit(1)

    def _do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def live(self) -> None:
        try:
            self._live()
            self.failure = None
        except Exception as error:
            self.failure = error

    def _live(self) -> None:
        if failure := self._do(self._client.join({})):
            raise RuntimeError(failure.why)
        self._do(self._client.serve_jax())
        client = _jax.get_distributed_runtime_client(
            f"unix:{self._place.client}", self._rank, init_timeout=SECONDS, shutdown_timeout=60,
            heartbeat_timeout=SECONDS, use_compression=True,
        )  # fmt: skip
        client.connect()
        client.key_value_set(f"test/{self._rank}", f"value {self._rank}")
        neighbour = 1 + self._rank % (self._size - 1)
        assert client.blocking_key_value_get(f"test/{neighbour}", SECONDS * 1000) == f"value {neighbour}"
        self._do(self._client.report_done())
        self._do(self._client.all_done.wait())
        client.shutdown()


def main(port: int, size: int, first: int, count: int) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    threading.stack_size(1 << 19)
    with tempfile.TemporaryDirectory() as folder:
        crowd = [One(loop, port, rank, size, Path(folder)) for rank in range(first, first + count)]
        threads = [threading.Thread(target=one.live, daemon=True) for one in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    failures = [one.failure for one in crowd if one.failure is not None]
    print(f"{len(failures)} of {count} failed: {failures[:1]}", flush=True)
    os._exit(bool(failures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
