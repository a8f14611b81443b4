"""Small functions of training loops, under Megatron-LM's names."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core import parallel_state
from megatron.core._rank_utils import safe_get_rank
from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.model_wrappers import chunks_of, unwrap_model
from megatron.core.optimizer.clip_grads import get_params_norm

__all__ = [
    "average_losses_across_data_parallel_group",
    "calc_params_l2_norm",
    "get_blend_and_blend_per_split",
    "get_device_arch_version",
    "get_local_rank_preinit",
    "get_ltor_masks_and_position_ids",
    "is_first_or_last_pipeline_stage",
    "is_hybrid_model",
    "is_last_rank",
    "is_rank0",
    "logical_and_across_model_parallel_group",
    "print_rank_0",
    "print_rank_last",
    "reduce_max_stat_across_model_parallel_group",
    "report_memory",
    "unwrap_model",
    "warn_rank_0",
]


def is_last_rank() -> bool:
    """Return whether this is the last rank of the run."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print on rank 0, before process groups exist too; ``rank`` None: this process's."""
    if (safe_get_rank() if rank is None else rank) == 0:
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the last rank."""
    if is_last_rank():
        print(message, flush=True)


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Return whether this rank's stage has the embedding or the output layer."""
    if not parallel_state.is_initialized():
        return True
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return is_first or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def is_hybrid_model(args: Namespace) -> bool:
    """Return whether the model has state-space layers: never."""
    return False


def average_losses_across_data_parallel_group(
    losses: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the means [n] of losses over a group; None: the data-parallel ranks. Ranks: all of the group."""
    averaged = torch.stack([loss.detach().view([]) for loss in losses])
    group = parallel_state.get_data_parallel_group() if group is None else group
    dist.all_reduce(averaged, group=group)
    return averaged / group.size()


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Any, Any]:
    """Return (the blend of ``--data-path``, those of the three splits), as the datasets take them; None where not given."""
    per_split = [getattr(args, f"{name}_data_path", None) for name in ("train", "valid", "test")]
    blends = [get_blend_from_list(path) for path in per_split] if any(per_split) else None
    return get_blend_from_list(args.data_path), blends


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    pad_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    pad_mask_loss: bool,
    create_attention_mask: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the attention mask [b or 1, 1, s, s], True where a key is hidden, the loss mask and the positions, both [b, s].

    Args:
        data: [b, s] tokens.
        reset_position_ids, reset_attention_mask: positions and attention begin anew after an end of document.
        eod_mask_loss, pad_mask_loss: leave what follows these tokens out of the loss.
        create_attention_mask: False returns None in place of the mask.

    Raises:
        ValueError: attention is to begin anew, and no mask is to be made.
    """
    if reset_attention_mask and not create_attention_mask:
        raise ValueError(
            "reset_attention_mask needs create_attention_mask=True: the mask says where attention begins anew"
        )
    rows, length = data.shape
    mask = torch.ones((1, length, length), dtype=torch.bool, device=data.device).triu(diagonal=1)
    loss_mask = torch.ones((rows, length), device=data.device)
    if eod_mask_loss:
        loss_mask[data == eod_token] = 0.0
    if pad_mask_loss:
        loss_mask[data == pad_token] = 0.0
    positions = torch.arange(length, device=data.device).expand(rows, length)
    # Documents are counted from the token behind an end of document on.
    ends = data == eod_token
    documents = ends.cumsum(dim=1) - ends.long()
    if reset_attention_mask:
        mask = mask | (documents[:, :, None] != documents[:, None, :])
    if reset_position_ids:
        begins = torch.zeros_like(data)
        begins[:, 1:] = torch.where(ends[:, :-1], positions[:, 1:], 0)
        positions = positions - begins.cummax(dim=1).values
    return mask[:, None] if create_attention_mask else None, loss_mask, positions.contiguous()


# ---- ranks ----------------------------------------------------------------------------------------------------------


def is_rank0() -> bool:
    """Return whether this is rank 0, before process groups exist too."""
    return safe_get_rank() == 0


def warn_rank_0(message: str, rank: int | None = None) -> None:
    """Warn on rank 0, before process groups exist too; ``rank`` None: this process's."""
    if (safe_get_rank() if rank is None else rank) == 0:
        warnings.warn(message, stacklevel=2)


def get_local_rank_preinit() -> int:
    """Return this process's index on its host, as the launcher (torchrun, Slurm) says; 0 with a warning where none does."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name):
            return int(os.environ[name])
    warnings.warn(
        "the rank on this host must be in LOCAL_RANK or SLURM_LOCALID, got neither: it is taken for 0", stacklevel=2
    )
    return 0


def get_device_arch_version() -> int:
    """Return the major compute capability of the CUDA device."""
    major: int = torch.cuda.get_device_capability()[0]
    return major


# ---- what a step says -----------------------------------------------------------------------------------------------


def _reduced(value: float, op: Any, group: ProcessGroup | None) -> float:
    """Reduce a number over a group; None: the model-parallel one. Ranks: all of it; blocks the host."""
    group = parallel_state.get_model_parallel_group() if group is None else group
    is_nccl = "nccl" in str(dist.get_backend_config(group))
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda" if is_nccl else "cpu")
    dist.all_reduce(tensor, op=op, group=group)
    return float(tensor.item())


def reduce_max_stat_across_model_parallel_group(
    stat: float | torch.Tensor | None, group: ProcessGroup | None = None
) -> float | None:
    """Return the largest of a number that is not negative; ranks that have none pass None.

    Returns:
        None where no rank has one.

    Ranks: all of the group, None: the model-parallel one; blocks the host.
    """
    largest = _reduced(-1.0 if stat is None else float(stat), dist.ReduceOp.MAX, group)
    return None if largest == -1.0 else largest


def logical_and_across_model_parallel_group(input: bool, group: ProcessGroup | None = None) -> bool:
    """Return whether it is True on all ranks. Ranks: as ``reduce_max_stat_across_model_parallel_group``."""
    return bool(_reduced(float(input is True), dist.ReduceOp.MIN, group))


def calc_params_l2_norm(model: Any, force_create_fp32_copy: bool = False) -> float:
    """Compute the norm of all main weights of a model or its chunks; each counts once, whatever ranks hold it.

    Args:
        force_create_fp32_copy: accepted; the norm is computed in fp32 in any case.

    Ranks: all that hold the model; blocks the host.
    """
    return float(get_params_norm([param for chunk in chunks_of(model) for param in chunk.parameters()]))


def report_memory(name: str, process_group: ProcessGroup | None = None) -> None:
    """Print the CUDA device's memory on the first data-parallel rank; without one nothing. ``process_group`` None: the default."""
    first = parallel_state.get_data_parallel_rank() if process_group is None else process_group.rank()
    if first != 0 or not torch.cuda.is_available():
        return
    sizes = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    text = " | ".join(f"{what}: {nbytes / 2**20:.2f}" for what, nbytes in sizes.items())
    print(f"[Rank {dist.get_rank()}] {name} memory (MB) | {text}", flush=True)
