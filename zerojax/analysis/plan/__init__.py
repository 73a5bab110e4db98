"""Plans: formulas for the memory, communication and time of a run, on this mesh or on another cluster."""

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.hops import HopPlan
from zerojax.analysis.plan.memory import PredictedMemory, predict_memory
from zerojax.analysis.plan.outlook import Forecast, Outlook, foresee
from zerojax.analysis.plan.step import Plan, describe_plan, plan_state
from zerojax.analysis.plan.units import LeafPlan, UnitPlan

__all__ = [
    "Cluster",
    "Forecast",
    "HopPlan",
    "LeafPlan",
    "Outlook",
    "Plan",
    "PredictedMemory",
    "UnitPlan",
    "describe_plan",
    "foresee",
    "plan_state",
    "predict_memory",
]
