"""Balance of experts by a bias on the scores that choose them, without an auxiliary loss.

[Note: expert bias] Each router has a bias for each of its experts, an fp32 buffer that starts at zero. A token goes to the experts
with the best score + bias, and their outputs are weighed by the scores alone, so the bias has no gradient. Routers count the
assignments of their experts in each microbatch. Once in a step, when all microbatches have run, the counts of a stage's layers are
summed over its ranks at once. The bias of an expert with fewer assignments than the mean then grows by the update rate, and
that of one with more shrinks by it. All ranks compute the same update from the same integers, so their biases stay equal.

Source: arXiv:2408.15664, DeepSeek-V3 (arXiv:2412.19437); Megatron-Core's get_updated_expert_bias.

Shapes: e experts, l layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import group_of
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection


def routers_with_bias(model: torch.nn.Module) -> list[TopKRouter]:
    """Return the routers of a model that have an expert bias, in the order of its layers; it visits all modules."""
    return [module for module in model.modules() if isinstance(module, TopKRouter) and module.expert_bias is not None]


@torch.no_grad()
def update_expert_biases(
    routers: Sequence[TopKRouter], rate: float, pg_collection: ProcessGroupCollection | None
) -> None:
    """Move the biases towards balanced experts by the assignments counted since the last call, and forget these.

    Routers in evaluation, and those with ``frozen_expert_bias``, keep their biases.

    Args:
        rate: what a bias changes by.
        pg_collection: ``tp_dp_cp``, or else ``dp_cp`` (or ``dp``) and ``tp``, are the ranks whose tokens count.

    Ranks: all of these groups; one collective for all layers (two where only ``dp_cp`` and ``tp`` are known). Does not block the host.
    """
    counted = [router for router in routers if router.training and not router.frozen_expert_bias]
    if not counted:
        return
    counts = torch.stack([router.local_tokens_per_expert for router in counted])  # [l, e]
    for group in _groups_of_tokens(pg_collection):
        dist.all_reduce(counts, group=group)
    # In integers: the sign of (mean - count), without rounding.
    signs = torch.sign(counts.sum(dim=1, keepdim=True) - counts * counts.shape[1])
    biases = [router.expert_bias for router in counted if router.expert_bias is not None]
    torch._foreach_add_(biases, (signs * rate).float().unbind())
    torch._foreach_zero_([router.local_tokens_per_expert for router in counted])


def _groups_of_tokens(pg_collection: ProcessGroupCollection | None) -> list[ProcessGroup]:
    """Return groups that together sum over all ranks of a pipeline stage."""
    stage = group_of(pg_collection, "tp_dp_cp")
    data = group_of(pg_collection, "dp_cp") or group_of(pg_collection, "dp")
    groups = (data, group_of(pg_collection, "tp")) if stage is None else (stage,)
    return [group for group in groups if group is not None and group.size() > 1]
