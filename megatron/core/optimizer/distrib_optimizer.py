"""Megatron-Core's import path of the optimizer whose state is sharded."""

from megatron.core.optimizer.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
