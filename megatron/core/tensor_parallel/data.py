"""Batches that the first tensor-parallel rank reads for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import DEFAULT_GROUP, group_or_default, group_rank, group_size


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    datatype: torch.dtype,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> dict[str, torch.Tensor]:
    """Return the tensors of these names that the first rank of the group has.

    Args:
        data: tensors by name, on the first rank; others may pass None.
        datatype: dtype of all.

    Raises:
        ValueError: a tensor has another dtype.

    Ranks: all of the group; blocks the host.
    """
    group = group_or_default(tp_group, "tp")
    is_first = group_rank(group) == 0
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    shapes: list[dict[str, tuple[int, ...]] | None] = [None]
    if is_first:
        assert data is not None
        wrong = {key: data[key].dtype for key in keys if data[key].dtype != datatype}
        if wrong:
            raise ValueError(f"tensors must be of dtype {datatype} to be broadcast together, got {wrong}")
        shapes = [{key: tuple(data[key].shape) for key in keys}]
    if group_size(group) == 1:
        assert data is not None
        return {key: data[key].to(device) for key in keys}
    assert group is not None
    first = dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(shapes, src=first, group=group)
    found = {}
    assert shapes[0] is not None
    for key, shape in shapes[0].items():
        value = (
            data[key].to(device).contiguous()
            if is_first and data
            else torch.empty(shape, dtype=datatype, device=device)
        )
        dist.broadcast(value, src=first, group=group)
        found[key] = value
    return found


_PACKED = ("cu_seqlens", "max_seqlen")


def get_batch_on_this_tp_rank(
    batch: Mapping[str, torch.Tensor | None],
    has_cu_seqlens: bool,
    is_hybrid_cp: bool,
    create_attention_mask_in_dataloader: bool,
    broadcast_src_rank: int,
    broadcast_group: ProcessGroup,
    cp_size: int,
    tp_rank: int,
    micro_batch_size: int,
    seq_length: int,
    mtp_on_this_rank: bool,
    pipeline_model_parallel_size: int = 1,
    is_pipeline_first_stage: bool = False,
    is_pipeline_last_stage: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Return the batch that the first tensor-parallel rank has read, with what this pipeline stage needs of it; else None.

    Args:
        batch: tokens, labels, loss_mask, position_ids and more by name; only the first rank's is looked at.
        has_cu_seqlens: several documents are packed into each sample.
        is_hybrid_cp: must be False.
        broadcast_src_rank: global rank of the first of ``broadcast_group``.
        micro_batch_size, seq_length: the shape [b, s] that tokens and labels must have.
        mtp_on_this_rank: this stage predicts several tokens ahead, so it needs all.

    Raises:
        NotImplementedError: ``is_hybrid_cp``.
        ValueError: tokens or labels have another shape; on all ranks.

    Ranks: all of the group; blocks the host.
    """
    if is_hybrid_cp:
        raise NotImplementedError("is_hybrid_cp must be False, got True: all sequences are split over all ranks")
    is_whole = pipeline_model_parallel_size == 1 or mtp_on_this_rank
    names = ["tokens", "position_ids"] if is_whole or is_pipeline_first_stage else []
    names += ["labels", "loss_mask"] if is_whole or is_pipeline_last_stage else []
    names += ["attention_mask"] if create_attention_mask_in_dataloader and names else []
    names += [*_PACKED, *(["cu_seqlens_padded"] if cp_size > 1 else [])] if has_cu_seqlens else []
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, torch.Tensor | None] = {name: None for name in (*_TENSORS, "local_cp_size", "hybrid_cp_group")}
    kinds: list[Any] = [None]
    if tp_rank == 0:
        found |= {name: value.to(device).contiguous() for name in names if (value := batch.get(name)) is not None}
        kinds = [{name: (tuple(value.shape), value.dtype) for name, value in found.items() if value is not None}]
    dist.broadcast_object_list(kinds, src=broadcast_src_rank, group=broadcast_group)
    shapes = {name: shape for name, (shape, _) in kinds[0].items() if name in ("tokens", "labels")}
    if wrong := {name: shape for name, shape in shapes.items() if shape != (micro_batch_size, seq_length)}:
        raise ValueError(
            f"tokens and labels must have the shape [micro_batch_size, seq_length] = [{micro_batch_size}, {seq_length}], got {wrong}"
        )
    for name, (shape, dtype) in kinds[0].items():
        value = found[name]
        if value is None:
            value = found[name] = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, src=broadcast_src_rank, group=broadcast_group)
    return found


_TENSORS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)
