"""Work that may hang, on threads that nothing has to wait for: neither a step nor the end of the process."""

import threading
from collections import deque
from collections.abc import Callable


class Worker(threading.Thread):
    """Does what it is given, one thing after another; a daemon, with a queue of bounded length.

    After an error it does nothing more.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        """Start.

        Args:
            name: of the thread.
            most: things that may be waiting or under way.
        """
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self._most = most
        self._todo: deque[Callable[[], object]] = deque()  # the first is under way
        self._closed = False
        self._changed = threading.Condition()
        self.start()

    @property
    def left(self) -> int:
        """How many things are waiting or under way."""
        return len(self._todo)

    def put(self, work: Callable[[], object]) -> bool:
        """Have something done; False, and it will not be, when as many things as may are left."""
        with self._changed:
            if self.left >= self._most:
                return False
            self._todo.append(work)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float, left: int = 0) -> bool:
        """Wait until no more than so many things are left; False when that takes longer.

        Of a time in which the whole process was stopped one second counts.
        """
        with self._changed:
            while not (done := self._changed.wait_for(lambda: self.left <= left, min(seconds, 1.0))):
                seconds -= 1.0
                if seconds <= 0:
                    break
        return done

    def close(self) -> None:
        """End the thread when it has nothing left to do; does not wait for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """The thread's own part."""
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
    """Do something on a thread of its own; False when it is not done in so many seconds.

    Raises:
        BaseException: as `work` did.
    """
    worker = Worker("attempt")
    worker.put(work)
    done = worker.wait(seconds)
    worker.close()
    if worker.error is not None:
        raise worker.error
    return done


def is_stuck() -> bool:
    """Whether a thread still has something to do: what it hangs in may hang the interpreter's exit, too."""
    return any(isinstance(thread, Worker) and thread.left > 0 for thread in threading.enumerate())
