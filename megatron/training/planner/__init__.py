"""Plan a run without devices: memory, traffic and time, from the run's own code. Start with ``plan_run``."""

from megatron.training.planner.plan import RunPlan, plan_run
from megatron.training.planner.rates import DeviceRates, rates_of
from megatron.training.planner.report import describe

__all__ = ["DeviceRates", "RunPlan", "describe", "plan_run", "rates_of"]
