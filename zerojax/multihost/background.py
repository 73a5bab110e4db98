"""Worker threads for operations that may hang, so that neither a step nor process exit waits for them."""

import threading
from collections import deque
from collections.abc import Callable


class Worker(threading.Thread):
    """A daemon thread that runs jobs in order. It skips all jobs after one that raised an error.

    At most ``most`` jobs are queued or running.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self._most = most
        self._todo: deque[Callable[[], object]] = deque()  # the first is running
        self._closed = False
        self._changed = threading.Condition()
        self.start()

    @property
    def left(self) -> int:
        """The number of queued or running jobs."""
        return len(self._todo)

    def put(self, work: Callable[[], object]) -> bool:
        """Queue a job. Return False, without queueing it, if the queue is full."""
        with self._changed:
            if self.left >= self._most:
                return False
            self._todo.append(work)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float, left: int = 0) -> bool:
        """Wait until at most ``left`` jobs are left. Return False on timeout.

        While the whole process is stopped, only one second counts towards the timeout.
        """
        with self._changed:
            while not (done := self._changed.wait_for(lambda: self.left <= left, min(seconds, 1.0))):
                seconds -= 1.0
                if seconds <= 0:
                    break
        return done

    def close(self) -> None:
        """End the thread once its queue is empty, without waiting for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """The thread's main loop."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
                if not self._todo:
                    return
                work = self._todo[0]
            if self.error is None:
                try:
                    work()
                except BaseException as error:
                    self.error = error
            with self._changed:
                self._todo.popleft()
                self._changed.notify_all()


def attempt(work: Callable[[], object], seconds: float) -> bool:
    """Run a job on a separate thread. Return False if it is not done within ``seconds``.

    Raises:
        BaseException: ``work`` raised it.
    """
    worker = Worker("attempt")
    worker.put(work)
    done = worker.wait(seconds)
    worker.close()
    if worker.error is not None:
        raise worker.error
    return done


def is_stuck() -> bool:
    """Whether a worker has jobs left, which may block the interpreter's exit, too."""
    return any(isinstance(thread, Worker) and thread.left > 0 for thread in threading.enumerate())
