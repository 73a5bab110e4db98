"""Mixtures of experts: routers, the way of tokens to experts and back, and the module that has both."""

from zerojax.experts.exchange import apply_experts
from zerojax.experts.mixture import mix_experts
from zerojax.experts.mlp import Activation, ExpertWeights
from zerojax.experts.module import Experts
from zerojax.experts.router import RouterConfig, RouterStats, Routing, balance_loss, route, z_loss

__all__ = [
    "Activation",
    "ExpertWeights",
    "Experts",
    "RouterConfig",
    "RouterStats",
    "Routing",
    "apply_experts",
    "balance_loss",
    "mix_experts",
    "route",
    "z_loss",
]
