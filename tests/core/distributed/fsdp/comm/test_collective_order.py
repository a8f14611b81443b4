"""Collectives are issued in one order on all ranks, whatever their hash seeds and whichever parameters get gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import microbatch
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from tests.core.distributed.fsdp.buffers.test_parameters import OptionalStack
from tests.support.agreement import inputs, seeded, shard
from tests.support.models import STRATEGY_NAMES

ROOT = Path(__file__).parents[5]
UNITS = ("blocks.0", "blocks.1", "blocks.2")


def _record_calls(calls: list[str]) -> None:
    """Write down each collective of the engine, in order."""
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        call: Callable[..., None] = getattr(RankOrderTransport, name)

        def recorded(self: Any, *tensors: torch.Tensor, name: str = name, call: Any = call, **options: Any) -> None:
            calls.append(f"{name} {[list(tensor.shape) for tensor in tensors]} {tensors[-1].dtype} {options}")
            call(self, *tensors, **options)

        setattr(RankOrderTransport, name, recorded)


def train_and_record() -> list[str]:
    """The collectives of training with each strategy, in which ranks use different parameters. Ranks: all."""
    calls: list[str] = []
    _record_calls(calls)
    for strategy in STRATEGY_NAMES:
        calls.append(strategy)
        _train(strategy)
    return calls


def _train(strategy: str) -> None:
    """Three steps of two microbatches, then an evaluation."""
    model = shard(seeded(OptionalStack), UNITS, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choices = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        for index in range(2):
            used = [bool(use) for use in torch.randint(2, (4,), generator=choices)]
            with microbatch(model, is_first=index == 0, is_last=index == 1):
                out = model(inputs(dist.get_rank(), 2 * step + index, 3, 5), used)
                out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(inputs(0, 0, 3, 5), [True] * 4)


_PROGRAM = """
import json, os, sys, warnings
import torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30))
from tests.core.distributed.fsdp.comm.test_collective_order import train_and_record
with open(f"{out}/{rank}", "w") as file:
    json.dump([hash("a string"), train_and_record()], file)
dist.barrier()
# Without the interpreter's end: gloo's threads may still let go of tensors, which aborts a rank that is finalizing.
os._exit(0)
"""


def test_ranks_with_different_hash_seeds_and_gradients_agree(tmp_path: Path) -> None:
    """Iteration over a set, or a decision by one rank's gradients, would pair up different collectives."""
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), "2", str(store), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    (first_hash, first), (second_hash, second) = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert first_hash != second_hash
    assert first == second
    kinds = {call.split()[0] for call in first}
    assert {"broadcast", "all_gather", "reduce_scatter", "all_reduce"} <= kinds
