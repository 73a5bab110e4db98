#!/usr/bin/env python3
"""Compile training steps for an absent cluster of H100s, and compare them with the planner's predictions.

    scripts/acceptance/plan.py gpt-350m gpt-1.3b --presets zero3 delta --remat full none --accumulate 1 4
    scripts/acceptance/plan.py gpt-18b --nodes 64 --local 8

For each case: the memory of a device, the bytes it sends within its node and to others, and the fraction of
the latter that overlaps with compute in the compiled schedule. Needs the compiler of
scripts/install_cuda_compiler.sh, but no GPU. A case takes about 10 to 60 seconds on one core.
"""

import argparse
import dataclasses
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax import aot
from zerojax.analysis.gpus import GPUS
from zerojax.analysis.plan import Plan, plan_state, predict_memory
from zerojax.analysis.plan.outlook import COMPARED
from zerojax.analysis.plan.work import decoder_work, flash_attention
from zerojax.models import GPT, lm_loss
from zerojax.run.config import RunConfig, find_config, load_config, with_settings
from zerojax.run.optimizers import make_optimizer
from zerojax.zero_config.config import PRESETS
from zerojax.zero_config.options import Remat

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
import hlo

ALLOWED = 0.15
_WORKSPACE = re.compile(r's8\[(\d+)\]\S*\) custom-call\([^)]*\), custom_call_target="__cublas')
LAYERS_OF_A_BODY = 2
"""XLA unrolls two layers into one loop body, so that two buffers can alternate."""


@dataclass(frozen=True)
class Case:
    """A step to compile: a config's model under a preset, and the batch of one device."""

    config: str
    preset: str
    remat: Remat
    accumulate: int
    order: str
    sequences: int
    nodes: int
    local: int
    matmuls: str = "compute"


@dataclass(frozen=True)
class Check:
    """A case according to the planner and the compiler; bytes on one device and per step.

    Attributes:
        memory: planned, compiled.
        local_bytes: planned, compiled.
        node_bytes: planned, compiled.
        hidden: the fraction of a layer's matmuls between the start and the end of a hop in the compiled
            program, averaged over ``node_bytes``.
        kinds: planned memory by kind.
    """

    case: Case
    memory: tuple[int, int]
    local_bytes: tuple[int, int]
    node_bytes: tuple[int, int]
    hidden: float
    kinds: dict[str, int]

    @property
    def error(self) -> float:
        """Relative error of the planned memory."""
        return self.memory[0] / self.memory[1] - 1


def check(case: Case) -> Check:
    """Plan a case, compile it, compare."""
    config = load_config(find_config(case.config))
    state = _state(case, config)
    zero, length = state.spec.zero, config.train.sequence_length
    work = decoder_work(
        config.model, remat=case.remat, dtype=str(zero.compute_dtype), sequences=case.sequences, length=length
    )
    plan: Plan = plan_state(state)
    rows = case.nodes * case.local * case.accumulate * case.sequences
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), np.int32)}
    with aot.cudnn_assumed():
        compiled = zerojax.lower_train_step(state, batch).compile(dict(aot.COMPILER_OPTIONS))
    text = compiled.as_text() or ""
    memory = predict_memory(state.spec, work, workspace=_workspace(text))
    sent = hlo.collectives(text)
    local, node = (round(sum(c.sent(case.local)[axis] for c in sent)) for axis in (0, 1))
    beside = sum(min(1, LAYERS_OF_A_BODY * c.covers) * c.sent(case.local)[1] for c in sent)
    return Check(
        case,
        memory=(memory.total, hlo.memory(compiled).peak),
        local_bytes=(plan.local_bytes, local),
        node_bytes=(plan.node_bytes, node),
        hidden=beside / node if node else 0.0,
        kinds=memory.kinds,
    )


def _workspace(text: str) -> int:
    """Bytes of cuBLAS in a compiled program: on absent GPUs JAX 0.12 grants it 4 MiB, JAX 0.11 the GPU's."""
    found = max(map(int, _WORKSPACE.findall(text)), default=0)
    assert found <= GPUS["h100"].workspace, f"the planner expects less than {found} bytes"
    return found


def _state(case: Case, config: RunConfig) -> zerojax.TrainState:
    flash = flash_attention(config.model, str(config.zero.compute_dtype))
    model = dataclasses.replace(config.model, attention="cudnn" if flash else "xla")
    changes = {"preset": case.preset, "remat": case.remat, "matmul_dtype": case.matmuls}
    zero = with_settings(config, {"zero": changes}).zero
    return zerojax.TrainState.abstract(
        lambda rngs: GPT(model, rngs=rngs),
        make_optimizer(config.optimizer, config.train.steps),
        lm_loss,
        mesh=zerojax.make_mesh(
            case.nodes, case.local, devices=aot.topology(case.nodes, case.local, gpu="h100")
        ),
        zero=zero.replace(accumulate=case.accumulate, accumulate_order=case.order),
    )


def main() -> None:
    """Parse the command line, check the cases, print a table; exit 1 if memory is off by over 15%."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(COMPARED))
    parser.add_argument("--remat", nargs="+", choices=("full", "attention", "none"), default=["full"])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1])
    parser.add_argument("--order", choices=("depth", "breadth"), default="depth", help="of micro-batches")
    parser.add_argument("--matmuls", choices=("compute", "fp8"), default="compute")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch on one device")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=4)
    parser.add_argument("--json", type=Path, help="add a line for each case to this file")
    options = parser.parse_args()
    print("| config | preset | remat | micro-batches | memory planned, GB | compiled | error | "
          "in the node planned, GB | compiled | between nodes planned, GB | compiled | hidden |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for config, preset, remat, accumulate in itertools.product(
        options.configs, options.presets, options.remat, options.accumulate
    ):
        more = options.order, options.sequences, options.nodes, options.local, options.matmuls
        case = Case(config, preset, remat, accumulate, *more)
        result = check(case)
        worst = max(worst, abs(result.error))
        print(line(result), flush=True)
        if options.json:
            with options.json.open("a") as file:
                print(json.dumps(dataclasses.asdict(result)), file=file)
    sys.exit(worst > ALLOWED)


def line(result: Check) -> str:
    """A row of the table."""
    case = result.case
    cells = [case.config, case.preset, case.remat, str(case.accumulate)]
    cells += [f"{b / 1e9:.3g}" for b in result.memory] + [f"{result.error:+.1%}"]
    cells += [f"{b / 1e9:.4g}" for b in (*result.local_bytes, *result.node_bytes)]
    return "| " + " | ".join([*cells, f"{result.hidden:.0%}"]) + " |"


if __name__ == "__main__":
    main()
