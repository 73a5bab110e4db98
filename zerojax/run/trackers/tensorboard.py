"""The TensorBoard tracker: event files in ``RUN/tensorboard``, written by tensorboardX.

It uses only the record writer. The thread and queue of ``SummaryWriter`` depend on the wall clock, and hang
forever if the clock is set back by weeks.
"""

import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]  # generated at import
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]  # generated at import

from zerojax.run.run_dir import RunFolder

_FLUSH_SECONDS = 10.0


class TensorBoard:
    """Event files; a resumed run adds one, which hides the steps that it repeats."""

    identity = "tensorboard"  # their folder, relative to the run's

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Open a new event file; arguments as for ``Tracker``."""
        del project, settings, known
        path = folder.path / self.identity
        path.mkdir(exist_ok=True)
        # File names have a resolution of one second: the suffix keeps a quick restart from overwriting a
        # file.
        self._writer = EventsWriter(str(path / "events"), filename_suffix=f".from-{start}")
        self._add(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=scalars)))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._flush()

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        del failed
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()
