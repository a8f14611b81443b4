"""Checkpoints of split models, saved under one layout and loaded under another, have the same full tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.module_names import whole_names
from tests.support.launch import run_ranks
from tests.support.models import STRATEGY_NAMES, local_of
from tests.support.split_models import Layout, backward, named, specs, wrap
from tests.support.whole_tensors import whole_tensors

DEGREES = [
    {},
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "expt_tp": 1},
    {"tp": 4},
    {"ep": 2},
    {"ep": 4},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "ep": 2},
    {"instances": 2},
    {"instances": 2, "outer": "optim"},
    {"tp": 2, "instances": 2, "outer": "optim"},
]


def pairs(number: int) -> list[tuple[Layout, Layout]]:
    """Return random pairs of layouts, the same in each run."""
    draw = random.Random(7)

    def layout() -> Layout:
        strategies = [name for name in STRATEGY_NAMES if name != "no_shard"]
        return Layout(**draw.choice(DEGREES), strategy=draw.choice(strategies))  # type: ignore[arg-type]

    return [(layout(), layout()) for _ in range(number)]


def _optimizer(model: Any, lr: float) -> FlatAdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return FlatAdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=lr)


def _trained(layout: Layout) -> tuple[Any, FlatAdamW]:
    model = wrap(layout)
    optimizer = _optimizer(model, 0.1)
    for index in range(2):
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _assert_holds(model: Any, optimizer: FlatAdamW, layout: Layout, whole: dict[str, torch.Tensor], what: str) -> None:
    """Check that this rank holds its parts of the whole tensors, bit for bit."""
    for spec, parameter in named(model, layout):
        assert whole[spec.name].shape == parameter.shape, f"{what}: {spec.name}"
        assert torch.equal(local_of(parameter), local_rows(parameter, whole[spec.name])), f"{what}: {spec.name}"
        for key in ("exp_avg", "exp_avg_sq"):
            saved = whole[f"optimizer.state.{spec.name}.{key}"]
            state = optimizer.state[parameter][key]
            assert torch.equal(local_of(state), local_rows(parameter, saved)), f"{what}: {key} of {spec.name}"
        assert float(optimizer.state[parameter]["step"]) == 2.0


def full_tensors_survive(folder: str, number: int) -> None:
    for index, (first, second) in enumerate(pairs(number)):
        what, path = f"{first} -> {second}", Path(folder) / str(index)
        model, optimizer = _trained(first)
        per_rank = {"per_rank": dist.get_rank(), "iteration": 2}
        save_checkpoint(model, optimizer, path, extra_state=per_rank)
        whole = whole_tensors(path)
        assert {name for name in whole if not name.startswith("optimizer.")} >= {spec.name for spec in specs(first)}
        _assert_holds(model, optimizer, first, whole, what)
        other: Any = wrap(second)
        with torch.no_grad():
            for held in other.parameters():
                held.mul_(-2.0)
            for buffer in other.buffers():
                buffer.zero_()
        fresh = _optimizer(other, 0.5)
        assert load_checkpoint(other, fresh, path) == per_rank
        _assert_holds(other, fresh, second, whole, what)
        name_of = whole_names(other.module)
        for name, buffer in other.module.named_buffers():
            assert torch.equal(buffer, whole[name_of(name)]), f"{what}: {name}"
        assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [(0.1, 0.0), (0.1, 0.01)]


def test_full_tensors_survive(tmp_path: Path) -> None:
    run_ranks(4, full_tensors_survive, str(tmp_path), 3)


@pytest.mark.slow
def test_full_tensors_survive_ten_pairs_of_layouts(tmp_path: Path) -> None:
    run_ranks(4, full_tensors_survive, str(tmp_path), 10, timeout_s=280)


def what_does_not_match_is_named(folder: str) -> None:
    layout = Layout(pp=2, ep=2)
    model: Any = wrap(layout)
    path = Path(folder) / "model"
    save_checkpoint(model, None, path)
    # Another stage's or expert's parameter is not extra; one that nobody has is.
    lacking: Any = wrap(layout)
    if lacking.module.place.stage == 0:
        del lacking.module.layers[0]._parameters["norm"]
    with pytest.raises(ValueError, match=r"in the checkpoint, but not in the model: layers\.0\.norm \(1\)"):
        load_checkpoint(lacking, None, path)
    more: Any = wrap(layout)
    if more.module.place.stage == 1:
        more.module.layers[0].register_parameter("added", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"missing in the checkpoint: layers\.1\.added"):
        load_checkpoint(more, None, path)
    clashing: Any = wrap(layout)
    clashing.module.register_buffer("shared", torch.zeros(2 + clashing.module.place.stage))
    with pytest.raises(ValueError, match="shared must be the same tensor on all ranks"):
        save_checkpoint(clashing, None, Path(folder) / "clashing")
    assert not (Path(folder) / "clashing").exists()


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    """Ranks hold different names, so missing and extra ones are determined over all ranks."""
    run_ranks(4, what_does_not_match_is_named, str(tmp_path))


def an_asynchronous_save_holds_all_parts(folder: str) -> None:
    layout = Layout(pp=2, tp=2)
    model, optimizer = _trained(layout)
    path = Path(folder) / "async"
    handle = save_checkpoint(model, optimizer, path, async_save=True)
    assert handle is not None
    handle.wait()
    _assert_holds(model, optimizer, layout, whole_tensors(path), "async")


def test_an_asynchronous_save_holds_all_parts(tmp_path: Path) -> None:
    run_ranks(4, an_asynchronous_save_holds_all_parts, str(tmp_path))
