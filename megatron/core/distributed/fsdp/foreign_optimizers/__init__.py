"""Optimizers of other libraries that need help with sharded parameters; importing this makes ``fully_shard_optimizer`` help them."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.api.optimizer import register_preparation
from megatron.core.distributed.fsdp.foreign_optimizers.bitsandbytes import BitsandbytesOnRows, prepare_bitsandbytes
from megatron.core.distributed.fsdp.foreign_optimizers.fused_adam import (
    FusedAdamState,
    prepare_fused_adam,
    state_of_fused_adam,
)
from megatron.core.distributed.fsdp.foreign_optimizers.sharded_muon import prepare_muon

for _prepare in (prepare_fused_adam, prepare_bitsandbytes, prepare_muon):
    register_preparation(_prepare)


def state_decoder_of(optimizer: torch.optim.Optimizer) -> FusedAdamState | BitsandbytesOnRows | None:
    """Return what reads and writes the state of an optimizer that keeps it in few bits or scaled; None for other optimizers.

    The state of other optimizers is saved as it is.
    """
    return optimizer if isinstance(optimizer, BitsandbytesOnRows) else state_of_fused_adam(optimizer)
