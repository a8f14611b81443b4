"""Checkpoints of models on a GPU: staged in page-locked memory, loaded on either device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard_optimizer, load_checkpoint, save_checkpoint
from tests.support.checkpoint_models import sharded_model, train, whole_state

pytestmark = pytest.mark.gpu(1)
Join = Callable[[str], None]


@pytest.fixture
def join() -> Iterator[Join]:
    """Make this process the only rank of a backend."""

    def initialize(backend: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.cuda.set_device(0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield initialize
    dist.destroy_process_group()


def make(strategy: str, seed: int, *, fused: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded_model(strategy, seed=seed)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.02, fused=fused, foreach=not fused))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_gpu_goes_on_from_what_it_saved_and_a_cpu_loads_it(tmp_path: Path, join: Join, async_save: bool) -> None:
    join("nccl")
    model, optimizer = make("optim_grads_params", 0, fused=True)
    assert next(model.parameters()).device.type == "cuda"
    train(model, optimizer, 2)
    state = whole_state(model, optimizer)
    save = save_checkpoint(model, optimizer, tmp_path / "a", extra_state={"x": torch.ones(1)}, async_save=async_save)
    losses = train(model, optimizer, 2, first=2)
    if save is not None:
        save.wait()
    other, other_optimizer = make("optim", 1, fused=True)
    assert load_checkpoint(other, other_optimizer, tmp_path / "a")["x"].device.type == "cpu"
    assert whole_state(other, other_optimizer) == state
    assert train(other, other_optimizer, 2, first=2) == losses

    join("gloo")
    host, host_optimizer = make("no_shard", 1, fused=False)
    load_checkpoint(host, host_optimizer, tmp_path / "a")
    assert whole_state(host, host_optimizer) == state
    assert all(state["step"].device.type == "cpu" for state in host_optimizer.state.values())
    train(host, host_optimizer, 1)
