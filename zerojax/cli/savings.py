"""Finds single options that would reduce a run's communication or memory, by the formulas of the plan.

Each option is tried on the config as the command line would set it. Options that zerojax refuses are skipped.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerojax.analysis.comm_report import CommReport
from zerojax.analysis.links import expected_loss
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.hops import hops_of, usual_bytes
from zerojax.analysis.plan.memory import predict_memory
from zerojax.analysis.plan.work import sequences_of, work_of
from zerojax.cli.trained import abstract_run
from zerojax.errors import ConfigurationError
from zerojax.formatting import size
from zerojax.run.config import RunConfig, with_settings
from zerojax.train.spec import TrainSpec
from zerojax.zero_config import ZeroConfig

SAME = "in the same formats"
_WORTH_IT = 0.99
_SMALL_CHUNK = 512
_ROUNDING = (
    *("weight_formats", "weights_delta", "grad_formats"),
    *("block_size", "rounding", "rotation", "error_feedback"),
)
"""Settings that determine the rounding of the values that a step sends."""


@dataclass(frozen=True)
class Trial:
    """The effect of one option on the config.

    Attributes:
        option: as on the command line; empty for the unchanged config.
        sent: bytes between nodes, per node and step; with a single node, bytes that a device sends within it.
        held: a device's peak memory in bytes, with activations.
        price: its effect on precision or time.
    """

    option: str
    sent: int
    held: int
    price: str


class Savings:
    """The options of a config, tried one at a time.

    Args:
        config: the run's settings.
        spec: the spec of its training step, on its mesh.
        report: counted bytes, if known. Traffic that the formulas omit (sums of losses) is assumed to be the
            same under all options.
    """

    def __init__(self, config: RunConfig, spec: TrainSpec, report: CommReport | None = None) -> None:
        self._config, self._spec = config, spec
        self._nodes = spec.world.nodes
        self._besides = 0  # bytes that the formulas omit
        self.now = self._try("", config)
        if report is not None:
            counted = report.between_nodes if self._nodes > 1 else report.local_bytes
            self._besides = round(counted) - self.now.sent
            self.now = dataclasses.replace(self.now, sent=round(counted))

    def sent(self) -> list[Trial]:
        """Up to three ways to send less: the best option, the best that rounds as now, and local updates."""
        ways = self._better("sent", _SENDING)
        same = [trial for trial in ways if trial.price == SAME]
        if self._nodes == 1:
            return same[:1]  # within a node rounding gains nothing
        return list(dict.fromkeys([*ways[:1], *same[:1], *self._better("sent", [_LOCAL_UPDATES])]))

    def held(self) -> list[Trial]:
        """Up to three ways to hold less: the best option, the best without sending more, and host memory."""
        train, holding = self._config.train, [*_HOLDING]
        accumulate = 2 * train.accumulate
        groups = self._spec.world.size // self._config.zero.sequence_parallel
        while train.batch_size % (groups * accumulate) == 0:
            holding.append(("train.accumulate", accumulate))
            accumulate *= 2
        ways = self._better("held", holding)
        free = [trial for trial in ways if not self._more_sent(trial)]
        return list(dict.fromkeys([*ways[:1], *free[:1], *self._better("held", [_HOST])]))

    def _better(self, what: str, options: list[tuple[str, Any]]) -> list[Trial]:
        """The options with less of "sent" or "held" than now, the least first."""

        def costs(trial: Trial) -> tuple[int, int]:
            return (trial.sent, trial.held) if what == "sent" else (trial.held, trial.sent)

        limit = _WORTH_IT * costs(self.now)[0]
        return sorted((one for one in self._tried(options) if costs(one)[0] < limit), key=costs)

    def sent_line(self) -> str:
        """``sent`` as a line of text."""
        if not self.now.sent:
            return "To send less: nothing is sent."
        where, whose = ("between nodes", "node") if self._nodes > 1 else ("within the node", "device")
        now = f"To send less than {size(self.now.sent)} {where}, per {whose} and step"
        ways = [
            f"{trial.option} sends {size(trial.sent)} ({trial.price}{self._more_held(trial)})"
            for trial in self.sent()
        ]
        return f"{now}: {'; '.join(ways) or 'no option alone does it'}."

    def held_line(self) -> str:
        """``held`` as a line of text."""
        now = f"To hold less than {size(self.now.held)} a device, activations included"
        ways = [
            f"{trial.option} holds {size(trial.held)} ({trial.price}{self._more_sent(trial)})"
            for trial in self.held()
        ]
        return f"{now}: {'; '.join(ways) or 'no option alone does it'}."

    def to_dict(self) -> dict[str, Any]:
        """``sent`` and ``held`` as plain data, for JSON."""
        trials = {"sent": self.sent(), "held": self.held()}
        found = {name: [dataclasses.asdict(trial) for trial in own] for name, own in trials.items()}
        return {"now": dataclasses.asdict(self.now), **found}

    def _more_held(self, trial: Trial) -> str:
        more = trial.held - self.now.held
        return f"; a device holds {size(more)} more" if more > 0.01 * self.now.held else ""

    def _more_sent(self, trial: Trial) -> str:
        more = trial.sent - self.now.sent
        return f"; sends {size(more)} more" if more > 0.01 * self.now.sent else ""

    def _tried(self, options: list[tuple[str, Any]]) -> Iterator[Trial]:
        for name, value in options:
            section, field = name.split(".")
            words = " ".join(value) if isinstance(value, tuple) else str(value).lower()
            try:
                config = with_settings(self._config, {section: {field: value}})
                yield self._try(f"--{name.replace('_', '-')} {words}", config)
            except ConfigurationError:  # it conflicts with other settings
                continue

    def _try(self, option: str, config: RunConfig) -> Trial:
        train, world = config.train, self._spec.world
        zero = config.to_zero(self._spec.zero.units)
        streams = zero.updates_by_layers and self._spec.layerwise is None
        other_state = streams or zero.moments != self._spec.zero.moments
        there = on_world(abstract_run(config)[0].spec if other_state else self._spec, world, zero)
        sequences = sequences_of(train.batch_size, world.size, zero)
        work = work_of(there, config.model, sequences=sequences, length=train.sequence_length)
        local, node = usual_bytes(hops_of(there, work))
        sent = local + self._besides
        if self._nodes > 1:
            sent = node * world.local + (0 if zero.every else self._besides)  # only a fragment crosses
        held = predict_memory(there, work).total
        return Trial(option, sent, held, _price(self._spec.zero, zero, config.optimizer.name))


def _price(now: ZeroConfig, then: ZeroConfig, optimizer: str) -> str:
    """The effect of a change of options on precision or time."""
    if then.every and not now.every:
        return f"each node trains its own weights: {expected_loss(then.every, optimizer)}"
    if then.host != now.host:
        return "copied from and to host memory in each step"
    if then.moments != now.moments:
        return "rounded, without bias"
    if then.remat != now.remat:
        return "computed again in the backward pass"
    if all(getattr(then, name) == getattr(now, name) for name in (*_ROUNDING, "every")):
        return SAME
    weights = f"{'changes of ' * then.weights_delta}weights in {then.weight_formats.node}"
    return f"{weights}, gradients in {' and '.join(dict.fromkeys(reversed(then.grad_formats)))}"


_SENDING: list[tuple[str, Any]] = [
    ("zero.accumulate_order", "breadth"),
    ("zero.grad_sync", "step"),
    ("zero.hpz", True),
    ("zero.matrix_spread", "node"),
    ("zero.state_spread", "node"),
    ("zero.stage", 1),
    ("zero.stage", 2),
    ("zero.preset", "zero++"),
    ("zero.preset", "delta"),
    ("zero.weights", "int8"),
    ("zero.grads", ("int8", "int4")),
]
_LOCAL_UPDATES = ("zero.preset", "local")
_HOST = ("zero.host", ("optimizer",))
_HOLDING: list[tuple[str, Any]] = [
    ("zero.remat", "full"),
    ("zero.hpz", False),
    ("zero.matrix_spread", "world"),
    ("zero.state_spread", "world"),
    ("zero.moments", "bfloat16"),
    ("zero.moments", "float8"),
    ("zero.preset", "zero3"),
    ("zero.accumulate_order", "depth"),
    ("zero.error_feedback", False),
    ("zero.stage", 1),
    ("zero.stage", 2),
    ("zero.stage", 3),
    ("model.loss_chunk", _SMALL_CHUNK),
]
