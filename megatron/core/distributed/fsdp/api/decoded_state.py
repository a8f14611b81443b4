"""Optimizers whose state is kept in few bits, or scaled: checkpoints hold its values."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.api.bitsandbytes_optimizers import BitsandbytesOnRows
from megatron.core.distributed.fsdp.api.fused_adam import FusedAdamState, state_of_fused_adam


def state_decoder_of(optimizer: torch.optim.Optimizer) -> FusedAdamState | BitsandbytesOnRows | None:
    """Return what reads and writes the state of such an optimizer; None of others, whose state is saved as it is."""
    return optimizer if isinstance(optimizer, BitsandbytesOnRows) else state_of_fused_adam(optimizer)
