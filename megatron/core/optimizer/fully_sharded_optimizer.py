"""Megatron-Core's import path of the optimizer over Megatron-FSDP's version 2."""

from megatron.core.elsewhere import elsewhere

FullyShardedOptimizer = elsewhere(
    __name__,
    "FullyShardedOptimizer",
    "get_megatron_optimizer returns an optimizer over sharded parameters of either version",
)

__all__ = ["FullyShardedOptimizer"]
