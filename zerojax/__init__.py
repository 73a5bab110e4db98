"""ZeRO and ZeRO++ for JAX: sharded training of Flax models over slow networks.

Everything public is here: the names below, and the modules of ``_MODULES``, which are imported when they
are first used (``from zerojax import checkpoints``). The packages that they come from are private.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerojax.adapters.loss import own_tokens, world_sum
from zerojax.adapters.nnx_units import Stack
from zerojax.adapters.roles import ExpertParam
from zerojax.adapters.weight_sum import weight_sum
from zerojax.analysis.comm_report import CommReport, comm_report
from zerojax.compilation_cache import use_compilation_cache
from zerojax.errors import ZeroError
from zerojax.experts.linen import LinenExperts, linen_expert_param
from zerojax.experts.mixture import mix_experts
from zerojax.experts.mlp import ExpertWeights
from zerojax.experts.module import Experts
from zerojax.experts.router import RouterConfig, RouterStats, balance_loss, z_loss
from zerojax.generation.generate import Completions, generate
from zerojax.matmul.lora import LoRA
from zerojax.models.shared_rows import attention, whole_rows
from zerojax.optim.ema import average_weights
from zerojax.optim.muon import scale_by_muon
from zerojax.optim.shard_check import chain
from zerojax.schedule.tiles import tiled
from zerojax.sharding.mesh import make_mesh
from zerojax.train.batch import Replicated
from zerojax.train.fp8_report import fp8_report
from zerojax.train.gathering import averaged, gather_adapters, gather_model, gather_params, put_params
from zerojax.train.memory import reserve_host_memory
from zerojax.train.replica import with_replica
from zerojax.train.spikes import SpikeRule
from zerojax.train.state import TrainState
from zerojax.train.step import eval_step, last_metrics, lower_train_step, predict_step, train_step
from zerojax.zero_config import ZeroConfig

if TYPE_CHECKING:
    from zerojax import posttrain
    from zerojax.analysis import aot, plan, profile
    from zerojax.interop import deepspeed, huggingface
    from zerojax.multihost import distributed
    from zerojax.run import checkpoints, html_report, trackers
    from zerojax.run.trainer import Callback, Trainer
    from zerojax.testing import emulated_cluster as cluster

_MODULES = {
    "aot": "zerojax.analysis.aot",
    "checkpoints": "zerojax.run.checkpoints",
    "cluster": "zerojax.testing.emulated_cluster",
    "deepspeed": "zerojax.interop.deepspeed",
    "distributed": "zerojax.multihost.distributed",
    "html_report": "zerojax.run.html_report",
    "huggingface": "zerojax.interop.huggingface",
    "plan": "zerojax.analysis.plan",
    "posttrain": "zerojax.posttrain",
    "profile": "zerojax.analysis.profile",
    "trackers": "zerojax.run.trackers",
}

# Those that bring much with them.
_NAMES = {"Callback": "zerojax.run.trainer", "Trainer": "zerojax.run.trainer"}

__all__ = [
    "Callback",
    "CommReport",
    "Completions",
    "ExpertParam",
    "ExpertWeights",
    "Experts",
    "LinenExperts",
    "LoRA",
    "Replicated",
    "RouterConfig",
    "RouterStats",
    "SpikeRule",
    "Stack",
    "TrainState",
    "Trainer",
    "ZeroConfig",
    "ZeroError",
    "aot",
    "attention",
    "average_weights",
    "averaged",
    "balance_loss",
    "chain",
    "checkpoints",
    "cluster",
    "comm_report",
    "deepspeed",
    "distributed",
    "eval_step",
    "fp8_report",
    "gather_adapters",
    "gather_model",
    "gather_params",
    "generate",
    "html_report",
    "huggingface",
    "last_metrics",
    "linen_expert_param",
    "lower_train_step",
    "make_mesh",
    "mix_experts",
    "own_tokens",
    "plan",
    "posttrain",
    "predict_step",
    "profile",
    "put_params",
    "reserve_host_memory",
    "scale_by_muon",
    "tiled",
    "trackers",
    "train_step",
    "use_compilation_cache",
    "weight_sum",
    "whole_rows",
    "with_replica",
    "world_sum",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    """Import a public module or name when it is first asked for: checkpoints bring Orbax, reports Jinja."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'zerojax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_NAMES])
