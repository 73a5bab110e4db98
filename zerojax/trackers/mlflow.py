"""MLflow, where it is installed; `MLFLOW_TRACKING_URI` says which server or database."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flax import traverse_util
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from zerojax.run_folder import RunFolder


class MLflow:
    """One run there, the same in all processes of this run; its metrics are sent by a thread of its own."""

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Begin the run in the experiment `project`, or go on with it; arguments as `Tracker`."""
        del start
        self._client = MlflowClient()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._pending: deque[Future[object]] = deque()
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
            return
        experiment = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=folder.path.absolute().name)
        self._run_id = run.info.run_id
        flat = traverse_util.flatten_dict(dict(settings), sep=".")
        params = [Param(name, str(value)) for name, value in flat.items()]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run_id, params=params[first : first + 100])

    @property
    def identity(self) -> str:
        """The run's id."""
        return self._run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of a step.

        Raises:
            MlflowException: an earlier step could not be sent.
        """
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._pending.append(self._sender.submit(self._client.log_batch, self._run_id, metrics))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent, and end the run.

        Raises:
            MlflowException: a step could not be sent.
        """
        with self._sender:
            while self._pending:
                self._pending.popleft().result()
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
