"""Several processes that run a user's code at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.log import logger
from zerojax.posttrain.reward.process import Kind, LostReward, RefusedReward, RewardProcess
from zerojax.run.config import PosttrainSection

_STOP_SECONDS = 0.2  # the time to notice a signal

Response = dict[str, Any] | LostReward


class RewardPool:
    """Processes that run the calls of a user's code, each one call at a time.

    Args:
        settings: number of processes, their time limit and variables.
        named: as for ``RewardProcess``.
        kind: as for ``RewardProcess``.

    Raises:
        ConfigurationError: a name does not exist.
    """

    def __init__(self, settings: PosttrainSection, named: Sequence[str], kind: Kind) -> None:
        workers = settings.reward_workers
        self._processes = [
            RewardProcess(named, settings.reward_seconds, settings.reward_variables, kind)
            for _ in range(workers)
        ]
        self._processes[0].load()  # the others start in parallel on first use
        # Last in, first out: only as many processes start as are busy at the same time.
        self._idle = self._processes[::-1]
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def ask(
        self, questions: Sequence[Sequence[Any]], stopping: Callable[[], bool] = lambda: False
    ) -> list[Response]:
        """The response to each question, or the reason why it is lost.

        Args:
            questions: each has the arguments of ``RewardProcess.ask``.
            stopping: once it returns True, the pool closes and all responses are lost.
        """
        waiting = [self._threads.submit(self._call, question) for question in questions]
        while wait(waiting, _STOP_SECONDS).not_done:
            if stopping():
                self.close()
                return [LostReward("the run was asked to stop")] * len(questions)
        found = [one.result() for one in waiting]
        if lost := [response for response in found if isinstance(response, LostReward)]:
            logger.warning(f"{len(lost)} of {len(found)} rewards are lost, the last one: {lost[-1]}")
        return found

    def check(self, *question: Any) -> dict[str, Any] | None:
        """Ask a trial question, to find out whether the user's code can be called.

        Returns:
            The response. None, with a warning, if it is lost but others may not be.
        """
        response = self._call(question)
        if isinstance(response, RefusedReward):
            self.close()
            raise ConfigurationError(f"{self._processes[0].key}: {response}") from response
        if isinstance(response, LostReward):
            logger.warning(f"an empty completion has no reward: {response}")
            return None
        return response

    def close(self) -> None:
        """End all processes, including busy ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.close()

    def _call(self, question: Sequence[Any]) -> Response:
        process = self._idle.pop()
        try:
            return process.ask(*question)
        except LostReward as error:
            return error
        finally:
            self._idle.append(process)
