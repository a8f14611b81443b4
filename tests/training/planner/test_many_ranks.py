"""A run starts on a rank of 16,384 as it does on one of 64: with as many groups, collectives and objects, and the same plan."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.distributed.fsdp.checkpoint.save import local_state
from megatron.training.arguments import Settings
from megatron.training.planner import rank as planner
from tests.training.planner.test_rank import _settings
from tests.training.planner.tiny_runs import EXPERTS, TINY

_FEW, _MANY = 64, 16_384
# Sizes of Llama 3 8B, of which nothing is allocated.
_LLAMA = f"{TINY} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --vocab-size 128000 --bf16"
_HYBRID = "--num-distributed-optimizer-instances 4 --outer-dp-sharding-strategy optim"
# Flags, and the number of data-parallel axes.
_LAYOUTS = {
    "all axes": (
        f"--data-parallel-sharding-strategy optim_grads_params {_HYBRID} {EXPERTS} --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        2,
    ),
    "full sharding": ("--data-parallel-sharding-strategy optim_grads_params", 1),
}
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "reduce_scatter_tensor",
)


@dataclass
class _Seen:
    """What a rank made and did."""

    groups: int
    collectives: Counter[str]
    """Until the first step."""
    units: int
    buffers: int
    """Of all units."""
    entries: int
    """Of the plan of a step."""
    names: list[str]
    pieces: int
    """Of tensors of a checkpoint, that this rank writes."""
    description_nbytes: int
    """What it tells the others of them."""
    num_objects: int
    host_nbytes: int


def _counted(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counting


def _llama(flags: str, world_size: int) -> Settings:
    return _settings(f"{_LLAMA} {flags} --global-batch-size {2 * world_size}", world_size)


def _run(settings: Settings) -> _Seen:
    counts: Counter[str] = Counter()
    found: dict[str, Any] = {}

    class Watched(planner._Rank):
        def __init__(self, *args: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                for name in _COLLECTIVES:
                    patch.setattr(dist, name, _counted(counts, name, getattr(dist, name)))
                make = distributed_c10d._new_process_group_helper
                patch.setattr(distributed_c10d, "_new_process_group_helper", _counted(counts, "groups", make))
                super().__init__(*args)

        def record(self) -> planner.RankRecord:
            record = super().record()
            units = [unit for context in self._contexts for unit in context.units]
            state = local_state(self.model, self.optimizer, {}, rank=self.rank)
            gc.collect()
            found.update(
                units=len(units),
                buffers=sum(len(unit.own_groups) for unit in units),
                names=[name for name, _ in self.model.named_parameters()],
                pieces=len(state.chunks),
                description_nbytes=len(pickle.dumps(state.description)),
                num_objects=len(gc.get_objects()),
                host_nbytes=tracemalloc.get_traced_memory()[0],
            )
            return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_Rank", Watched)
        tracemalloc.start()
        try:
            record = planner.record_rank(settings, rank=settings.grid.world_size - 1)
        finally:
            tracemalloc.stop()
    groups = counts.pop("groups", 0)
    return _Seen(groups=groups, collectives=counts, entries=len(record.entries), **found)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n == "all axes" else pytest.mark.slow) for n in _LAYOUTS]
)
def test_a_rank_of_many_makes_and_does_what_a_rank_of_few_does(layout: str) -> None:
    flags, num_axes = _LAYOUTS[layout]
    planner.record_rank(_llama(flags, _FEW))  # imports, and fills the caches of torch
    few, many = (_run(_llama(flags, world_size)) for world_size in (_FEW, _MANY))
    assert many.groups == few.groups and few.groups < 20
    assert many.names == few.names and many.units == few.units
    # Where a rank has less than a row, a unit may need more buffers to keep padding small, and each is compared and filled at start.
    more = many.buffers - few.buffers
    assert 0 <= more <= 3 * few.units
    assert many.collectives == few.collectives + Counter(all_reduce=more * num_axes, broadcast=more * num_axes)
    assert many.entries * few.buffers <= few.entries * many.buffers and few.entries > 100
    # Cuts of a buffer are as many as its ranks, whichever tensors they meet.
    assert few.pieces > 0 and many.pieces * few.buffers <= few.pieces * many.buffers
    assert many.description_nbytes <= 1.01 * few.description_nbytes
    assert many.num_objects <= few.num_objects + 1000 * (1 + more)
    # torch keeps tables of a group's ranks: some hundred bytes for each rank of the world.
    assert many.host_nbytes <= few.host_nbytes + 600 * _MANY
