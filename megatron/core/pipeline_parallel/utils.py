"""Where a rank is in its pipeline."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_rank, group_size


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether the first of this rank's stages has the embedding."""
    return group_rank(pp_group) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether the last of this rank's stages has the output layer."""
    return group_rank(pp_group) == group_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a block of layers is the first of its rank."""
    return _index(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a block of layers is the last of its rank."""
    return _index(vp_stage, vp_size) == (vp_size or 1) - 1


def _index(vp_stage: int | None, vp_size: int | None) -> int:
    if not 0 <= (vp_stage or 0) < (vp_size or 1):
        raise AssertionError(f"vp_stage must be from 0 to vp_size - 1, got {vp_stage} of {vp_size}")
    return vp_stage or 0
