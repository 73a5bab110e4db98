"""What a run will hold, send and take, from formulas: of a state at hand, or on a cluster that is not."""

from zerojax.plan.cluster import Cluster
from zerojax.plan.hops import HopPlan
from zerojax.plan.memory import Memory, predict_memory
from zerojax.plan.outlook import Forecast, Outlook, foresee
from zerojax.plan.step import Plan, describe, plan_state
from zerojax.plan.units import LeafPlan, UnitPlan

__all__ = [
    "Cluster",
    "Forecast",
    "HopPlan",
    "LeafPlan",
    "Memory",
    "Outlook",
    "Plan",
    "UnitPlan",
    "describe",
    "foresee",
    "plan_state",
    "predict_memory",
]
