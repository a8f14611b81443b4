"""Tensors without values: what operations on them cost the machine that plans."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat, reduce_scatter_flat
from megatron.core.distributed.fsdp.runtime import unit as unit_module
from megatron.training.planner import hollow
from megatron.training.planner.hollow import HollowMode, Operation, untouched
from megatron.training.planner.stand_ins import on_hollow_device


class _Below(TorchDispatchMode):
    """Counts what a mode above it hands down, by namespace of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.namespace] += 1
        return func(*args, **(kwargs or {}))


def test_collectives_of_many_ranks_cost_nothing() -> None:
    """A backend touches a piece of each rank: 16,384 of them took most of the time of a plan."""
    dist.init_process_group("fake", rank=0, world_size=16_384, store=FakeStore())
    world = dist.new_group(range(16_384))
    try:
        with _Below() as below, HollowMode() as mode:
            full, shard = torch.empty(2**24), torch.empty(2**10)
            mode.recording.is_on = True
            all_gather_flat(world, full, shard)
            reduce_scatter_flat(world, shard, full)
            dist.all_reduce(full)
            dist.broadcast(full, src=0)
            dist.all_to_all_single(full, full)
            counts = torch.ones(16_384, dtype=torch.int64)
            dist.all_reduce(counts)  # has values, which the backend may change
    finally:
        dist.destroy_process_group()
    assert below.calls["c10d"] == 2  # the first hollow one asks for a handle to wait on, which all others get, too
    sent = [entry for entry in mode.recording.entries if isinstance(entry, Operation) and entry.group_size]
    assert [operation.nbytes for operation in sent] == [2**26] * 5 + [2**17]
    assert {(operation.group_size, operation.group_span) for operation in sent} == {(16_384, 16_383)}


class _Map:
    def __init__(self) -> None:
        self.rows = torch.arange(1024)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.rows)


def test_memory_of_what_a_fused_function_is_given_ends_with_its_owner() -> None:
    """Places of tokens by expert stayed in a table of results: 27 MiB for each layer and step of DeepSeek-V3."""
    with HollowMode() as mode:
        x = torch.empty(2**20, 8)
        before = mode.ledger.live
        for _ in range(2):
            rows = _Map()
            taken = mode.fused("take", _Map.take, rows, x)
            assert mode.ledger.live == before + 1024 * 8 + 1024 * 8 * 4 and taken.shape == (1024, 8)
            del rows, taken
            assert mode.ledger.live == before


def test_what_an_operator_returns_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call was asked of the meta device again: a search took twice as long."""
    asked, on_meta = [], hollow._on_meta

    def count(func: Any, *arguments: Any) -> Any:
        asked.append(func)
        return on_meta(func, *arguments)

    monkeypatch.setattr(hollow, "_on_meta", count)
    monkeypatch.setattr(hollow, "_RESULTS", {})
    for _ in range(2):
        with HollowMode():
            for rows in (2**20, 2**20, 2**21):
                x = torch.empty(rows, 8)
                assert (x @ torch.empty(8, 4096)).shape == (rows, 4096)
                assert x.sum(0).shape == (8,)
    assert asked.count(torch.ops.aten.mm.default) == 2
    assert asked.count(torch.ops.aten.sum.dim_IntList) == 2


def test_memory_without_values_counts_as_filled() -> None:
    """What stood in it before may be NaN, the mark of parameters that nobody has filled: plans were refused now and then."""
    with on_hollow_device(HollowMode(), lambda: None):
        is_unfilled = vars(unit_module)["is_unfilled"]
        assert not is_unfilled(torch.full((2,), torch.nan))
        assert is_unfilled(torch.empty(2, device="meta"))
    assert vars(unit_module)["is_unfilled"](torch.full((2,), torch.nan))


def test_tensors_on_the_meta_device_take_no_memory() -> None:
    """A model that is built there was planned as if each rank had all of it at the start: 192 GiB of DeepSeek-V3, which needs 139."""
    with HollowMode() as mode, torch.device("meta"):
        assert torch.empty(2**24).is_meta and torch.zeros(3).is_meta and mode.ledger.live == 0


def test_page_locked_memory_is_the_hosts() -> None:
    """Offloaded activations counted as memory of the device."""
    with HollowMode() as mode:
        buffer = torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
        assert buffer.view(torch.float32).detach().numel() == 2**18
        assert (mode.ledger.live, mode.ledger.host) == (0, 2**20)
        del buffer
        assert mode.ledger.host == 0


def test_masks_that_nobody_reads_take_no_memory_of_the_machine() -> None:
    """Dropout's masks of GPT-3 175B took 10 GB of the machine that plans, and two thirds of its time."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    with HollowMode() as mode:
        before = resident()
        masks = [torch.rand(2**12, 2**13) >= 0.1 for _ in range(16)]
        taken, counted = resident() - before, mode.ledger.live
        assert not masks[0].any() and masks[0].logical_not().all()
    assert counted == 16 * 2**25 and taken < 2**26


def test_what_the_machine_cannot_plan_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space that the system refuses, and memory without a reserve that the engine gives back in part."""
    mode = HollowMode()
    with on_hollow_device(mode, lambda *_, **__: None):
        unreserved = untouched(2**20)
        with pytest.raises(MemoryError, match="got none for one of 0 GiB"):
            unreserved.resize_(0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="got none for one of 3 GiB"):
        untouched(3 * 2**30)


def test_a_tensor_may_be_larger_than_the_machines_memory() -> None:
    """Nobody touches it: arenas of Llama 3 405B on 1,024 ranks, 24 GiB, could not be planned on a machine of as much."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with HollowMode() as mode:
        arena = torch.empty(4 * memory, dtype=torch.uint8).zero_()
        assert arena[memory:].view(torch.bfloat16).shape == (3 * memory // 2,)
        assert mode.ledger.live == 4 * memory
        del arena
    assert mode.ledger.live == 0
