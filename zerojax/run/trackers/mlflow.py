"""The MLflow tracker; ``MLFLOW_TRACKING_URI`` names the server or database."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

from flax import traverse_util
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from zerojax.run.run_dir import RunFolder


class MLflow:
    """One run in MLflow, continued by all processes of this run."""

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Begin or resume the run in the experiment ``project``; arguments as for ``Tracker``."""
        del start
        self._client = MlflowClient()
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self.identity = known
            return
        experiment = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=folder.path.absolute().name)
        self.identity = run.info.run_id
        flat = traverse_util.flatten_dict(dict(settings), sep=".")
        params = [Param(name, str(value)) for name, value in flat.items()]
        for some in itertools.batched(params, 100):  # the most per request
            self._client.log_batch(self.identity, params=list(some))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.identity, [Metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")
