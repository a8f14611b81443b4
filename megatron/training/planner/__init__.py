"""Plan a run without devices: memory, traffic and time, from the run's own code. Start with ``plan_run``."""

from megatron.training.planner.plan import RunPlan, plan_run
from megatron.training.planner.rates import DeviceRates, rates_of
from megatron.training.planner.report import describe
from megatron.training.planner.search import Found, Split, Wish, search, table

__all__ = ["DeviceRates", "Found", "RunPlan", "Split", "Wish", "describe", "plan_run", "rates_of", "search", "table"]
