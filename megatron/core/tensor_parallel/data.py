"""Batches that the first tensor-parallel rank reads for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
