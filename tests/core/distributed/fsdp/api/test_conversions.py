"""``.to()``, ``.float()``, ``to_empty`` and ``_apply`` on a unit, or on a module inside of one: right, or refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from tests.support.agreement import assert_same_parameters, assert_trains_alike, inputs, seeded, shard
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class Block(nn.Module):
    """A unit whose parameters belong to modules inside of it, one of them recurrent, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.recurrent = nn.LSTM(5, 5, batch_first=True)
        self.norm = nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recurrent.flatten_parameters()
        return self.norm(self.body(x) + self.recurrent(x[:, None])[0][:, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


UNITS = ("blocks.0", "blocks.1")
PARTS = ("", "blocks", "blocks.0", "blocks.0.body", "blocks.0.body.0", "blocks.1.recurrent", "blocks.1.norm")


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 3, 5)).square().mean()


@CHECKS.on(2)
def conversions_to_what_there_is_already_change_nothing() -> None:
    harmless: tuple[Callable[[nn.Module], nn.Module], ...] = (
        nn.Module.float,
        nn.Module.cpu,
        lambda m: m.to(torch.float32),
        lambda m: m._apply(lambda t: t.clone()),
    )

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        for part in PARTS:
            for convert in harmless:
                convert(model.get_submodule(part))
        model.blocks[0].recurrent.flatten_parameters()
        return _loss(model.train(step != 1), rank, step)

    # The loss is the same on both ranks: the batches' statistics are each rank's own.
    for units in (UNITS, ()):
        model = assert_trains_alike(Net, lambda m, u=units: shard(m, u), lambda m, _, step: loss(m, 0, step))  # type: ignore[misc]
        assert all(group_of(parameter) is not None for parameter in model.parameters())


@CHECKS.on(2)
def other_dtypes_and_devices_are_refused_on_a_part_too() -> None:
    harmful: tuple[Callable[[nn.Module], nn.Module], ...] = (
        nn.Module.double,
        nn.Module.half,
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="meta"),
    )
    plain, model = seeded(Net), shard(seeded(Net), UNITS)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    with pytest.raises(RuntimeError, match="before fully_shard"):  # a part of a unit, whose others would keep theirs
        model.get_submodule("blocks.0.body").double()
    for m in (plain, model):
        with torch.no_grad():
            _loss(m, 0, 0)
    for part in PARTS:
        for convert in harmful:
            with pytest.raises(
                RuntimeError, match=r"dtype and device of sharded parameters must stay.*before fully_shard"
            ):
                convert(model.get_submodule(part))
    for step in range(2):
        for m, optimizer in ((plain, theirs), (model, ours)):
            optimizer.zero_grad()
            _loss(m, 0, step).backward()
            optimizer.step()
        assert_same_parameters(model, plain)


@CHECKS.on(2)
def whole_units_take_another_dtype_before_their_first_forward() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        plain, model = seeded(Net), shard(seeded(Net), UNITS)
        for m in (plain, model):
            m.blocks[1].body[0].weight.requires_grad_(False)
        parameters = list(model.parameters())
        plain, model = plain.to(dtype), model.to(dtype)
        assert all(map(operator.is_, model.parameters(), parameters))
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)]
        for step in range(3):
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                m(inputs(0, step, 3, 5).to(dtype)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for parameter, other in zip(parameters, plain.parameters(), strict=True):
            assert parameter.dtype == parameter.to_local().dtype == dtype
            torch.testing.assert_close(parameter.full_tensor(), other, rtol=tolerance, atol=tolerance)
        with pytest.raises(RuntimeError, match="must stay"):
            model.float()


class _Resizable(Net):
    def resize_token_embeddings(self, num_rows: int) -> None:
        self.table = nn.Embedding(num_rows, 5)

    def save_pretrained(self, folder: str, state_dict: Any = None) -> tuple[str, Any]:
        return folder, state_dict or self.state_dict()


@CHECKS.on(2)
def embeddings_are_resized_before_they_are_sharded() -> None:
    """Resized later, the model would hold plain weights of other rows, which each rank trains by itself."""
    model = seeded(_Resizable)
    model.resize_token_embeddings(7)
    model = shard(model, UNITS)
    with pytest.raises(
        NotImplementedError, match=r"sharded FSDP_Resizable must keep its rows.*call it before fully_shard"
    ):
        model.resize_token_embeddings(9)
    with pytest.raises(
        NotImplementedError, match=r"save_pretrained of the sharded FSDP_Resizable .* on all ranks, or pass"
    ):
        model.save_pretrained("folder")
    assert model.save_pretrained("folder", state_dict={"weight": 1}) == ("folder", {"weight": 1})
    _loss(model, dist.get_rank(), 0).backward()


@CHECKS.on(2)
def functions_of_values_reach_main_weights() -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "in place": lambda t: t.mul_(2) if t.is_floating_point() else t,
        "anew": lambda t: t * 2 if t.is_floating_point() else t,
    }
    for name, function in functions.items():
        for part in PARTS:
            for dtype in (torch.float32, torch.bfloat16):
                plain = seeded(Net).to(dtype)
                model = shard(seeded(Net).to(dtype), UNITS, mixed_precision_policy=MixedPrecisionPolicy())
                kept = list(model.parameters())
                x = inputs(0, 0, 3, 5).to(dtype)
                with torch.no_grad():
                    model.eval()(x)
                    for m in (plain, model):
                        m.get_submodule(part)._apply(function)
                    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
                    assert torch.equal(model.eval()(x), plain.eval()(x)), (name, part)


@CHECKS.on(2)
def emptied_parts_can_be_filled_again() -> None:
    """As FSDP2's users initialise: ``to_empty`` leaves what is in memory, and keeps parameters sharded."""
    plain, model = seeded(Net), shard(seeded(Net), UNITS)
    for part in ("blocks.0", "blocks.1.body"):
        for m in (plain, model):
            m.get_submodule(part).to_empty(device="cpu")
    values = {name: torch.full_like(value, 0.25) for name, value in plain.state_dict().items()}
    for m in (plain, model):
        m.load_state_dict(values)
    assert_same_parameters(model, plain)
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs(0, 0, 3, 5)), plain.eval()(inputs(0, 0, 3, 5)))


@CHECKS.on(2)
def weights_that_the_user_unsharded_stay_theirs() -> None:
    model = shard(seeded(Net), UNITS)
    model.blocks[0].unshard()
    model.blocks[0].float()
    model.blocks[0].body[0].to("cpu")
    with pytest.raises(RuntimeError, match="dtype and device of sharded parameters must stay"):
        model.blocks[0].body.half()
    model.blocks[0].reshard()
    assert all(group_of(parameter) is not None for parameter in model.parameters())
    assert_same_parameters(model, seeded(Net))
    assert dist.get_world_size() == 2


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
