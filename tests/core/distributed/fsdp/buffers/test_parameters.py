"""Parameters that are not a plain matrix of one module: tied, frozen, unused, tiny, empty, of several dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from tests.support.agreement import (
    assert_same_gradients,
    assert_trains_alike,
    backward_plainly,
    groups_of,
    inputs,
    seeded,
    shard,
)
from tests.support.models import STRATEGY_NAMES, full
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
WORLDS = (1, 2, 4)


class Tied(nn.Module):
    """Embedding and head of one weight [11, 6]; the head writes its gradient in place, as the framework's layers do."""

    def __init__(self, writes_main_grad: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = MainGradLinear(6, 11) if writes_main_grad else nn.Linear(6, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return out


class MainGradLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with_main_grad(x, self.weight, self.bias)


def _tokens_loss(model: Any, rank: int, step: int) -> torch.Tensor:
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(50 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# ---- tied weights ---------------------------------------------------------------------------------------------------

TIED_UNITS: dict[str, tuple[str, ...]] = {
    "inside one unit": (),
    "across units": ("embedding", "body", "head"),
    "across units, head wrapped first": ("head", "body", "embedding"),
    "one in the root": ("embedding",),
    "the other in the root": ("head", "body"),
}


def _tied(names: tuple[str, ...], strategy: str, **options: Any) -> None:
    for writes in (True, False):
        model = assert_trains_alike(
            lambda writes=writes: Tied(writes),  # type: ignore[misc]
            lambda m: shard(m, names, strategy),
            _tokens_loss,
            **options,
        )
        assert model.embedding.weight is model.head.weight
        assert len(list(model.parameters())) == 4
        owners = [group for group in groups_of(model) for p in group.sharded if p is model.head.weight]
        assert len(owners) == 1, "one group owns a tied weight"


@CHECKS.on(*WORLDS)
def tied_weights_train_as_one() -> None:
    for strategy in ("optim", "optim_grads_params") if dist.get_world_size() == 2 else ("optim_grads_params",):
        for names in TIED_UNITS.values() if dist.get_world_size() == 2 else (("embedding", "body", "head"), ()):
            _tied(names, strategy)


@CHECKS.on(2)
def tied_weights_train_as_one_over_microbatches() -> None:
    for strategy in STRATEGY_NAMES:
        _tied(TIED_UNITS["across units"], strategy, num_microbatches=3, steps=2)


@CHECKS.on(2)
def tied_weights_under_activation_recomputation() -> None:
    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(50 * step + rank))
        hidden = torch.utils.checkpoint.checkpoint(model.embedding, tokens, use_reentrant=False)
        hidden = torch.utils.checkpoint.checkpoint(model.body, hidden, use_reentrant=False)
        out = torch.utils.checkpoint.checkpoint(model.head, hidden, use_reentrant=False)
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())

    class Whole(Tied):
        def forward(self, *args: Any) -> torch.Tensor:
            return loss(self, *args)

    assert_trains_alike(
        Whole, lambda m: shard(m, ("embedding", "body", "head")), lambda model, rank, step: model(rank, step)
    )


@CHECKS.on(2)
def a_tied_weight_whose_other_holder_is_not_wrapped_is_refused() -> None:
    """Its gradient would be lost, and the two copies would grow apart without a word."""
    model = seeded(Tied)
    fully_shard(model.embedding)
    with pytest.raises(RuntimeError, match=r"fully_shard.*also on the module"):
        model.head(torch.randn(2, 6))
    with pytest.raises(ValueError, match="must be built after fully_shard"):
        fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


# ---- frozen ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear map and a trainable low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return torch.tanh(out)


class FrozenMiddle(nn.Module):
    """Trainable, frozen and adapted units; the frozen one is fed by keywords and must pass gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.frozen = KeywordLinear(6, 6).requires_grad_(False)
        self.adapted = nn.ModuleList([Adapted(), Adapted()])
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x=torch.relu(self.first(x)))
        for layer in self.adapted:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


class KeywordLinear(nn.Linear):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def _square_loss(model: Any, rank: int, step: int) -> torch.Tensor:
    out: torch.Tensor = model(inputs(rank, step, 3, 5))
    return out.square().mean()


@CHECKS.on(*WORLDS)
def frozen_parameters_beside_trainable_ones() -> None:
    for strategy in STRATEGY_NAMES if dist.get_world_size() == 2 else ("optim_grads_params",):
        for names in ((), ("first", "frozen", "adapted.0", "adapted.1", "last"), ("frozen", "adapted.1")):
            model = assert_trains_alike(FrozenMiddle, lambda m, s=strategy, n=names: shard(m, n, s), _square_loss)  # type: ignore[misc]
            frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
            assert frozen == [
                *("frozen.weight", "frozen.bias"),
                *("adapted.0.base.weight", "adapted.0.base.bias", "adapted.1.base.weight", "adapted.1.base.bias"),
            ]
            assert all(model.get_parameter(name).grad is None for name in frozen)


@CHECKS.on(2)
def frozen_parameters_take_no_memory_for_gradients_or_main_weights() -> None:
    model = seeded(FrozenMiddle).to(torch.bfloat16)
    shard(model, ("frozen",), mixed_precision_policy=MixedPrecisionPolicy())
    (group,) = model.frozen.parameter_groups
    assert not group.trainable and not hasattr(group, "staging_storage")
    assert group.weights.main is group.weights.model and group.sharded[0].dtype is torch.bfloat16
    assert model.first.weight.dtype is torch.float32


@CHECKS.on(2)
def a_model_that_is_frozen_altogether_computes() -> None:
    plain = seeded(FrozenMiddle).requires_grad_(False)
    model = shard(seeded(FrozenMiddle).requires_grad_(False), ("first", "adapted.0"))
    for step in range(3):
        torch.testing.assert_close(_square_loss(model, 0, step), _square_loss(plain, 0, step))
    assert not any(group.weights.is_unsharded for group in groups_of(model))


@CHECKS.on(2)
def frozen_weights_of_other_dtypes_are_gathered_as_they_are() -> None:
    """Quantised base weights are bytes, which ranks share out like any others."""

    class Quantised(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            values = torch.arange(21).view(7, 3) % 2 if dtype is torch.bool else torch.arange(21.0).view(7, 3)
            self.codes = nn.Parameter(values.to(dtype), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(7, 1))

        def forward(self) -> torch.Tensor:
            return (self.codes.float() * self.scale).square().sum()

    dtypes = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
    for dtype in dtypes[:-1]:
        for strategy in ("optim_grads_params", "no_shard"):
            model, plain = shard(Quantised(dtype), strategy=strategy), Quantised(dtype)
            for _ in range(2):
                loss, expected = model(), plain()
                loss.backward()
                expected.backward()
                assert loss.item() == expected.item(), dtype


# ---- parameters without gradient ------------------------------------------------------------------------------------


class Optional(nn.Module):
    """Uses each of its weights only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 5), MainGradLinear(5, 5)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) * self.gain if uses else y


class OptionalStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(3))
        self.own = nn.Parameter(torch.ones(5))
        self.blocks[2].sometimes.weight = self.blocks[0].sometimes.weight  # tied across units

    def forward(self, x: torch.Tensor, used: list[bool]) -> torch.Tensor:
        for block, uses in zip(self.blocks, used, strict=False):
            x = torch.tanh(block(x, uses))
        return x * self.own if used[3] else x


# [step] of [rank % 2] of what is used: blocks 0, 1 and 2 and the root's own parameter.
USES = {
    "never": [[[False] * 4] * 2] * 3,
    "on one rank only": [[[False] * 4, [True] * 4], [[True] * 4, [False] * 4], [[False] * 4, [True] * 4]],
    "in turns": [
        [[True, False, True, False], [False, True, False, True]],
        [[False, False, True, True], [True, True, False, False]],
        [[True, True, True, True], [False, False, False, False]],
    ],
}


@CHECKS.on(*WORLDS)
def parameters_without_gradient_count_as_zero() -> None:
    """On all ranks or on some: nobody hangs, reductions still pair up, and every other gradient is right."""
    names = ("blocks.0", "blocks.1", "blocks.2")
    for strategy in ("optim", "optim_grads_params") if dist.get_world_size() == 2 else ("optim_grads_params",):
        for uses in USES.values():

            def loss(model: Any, rank: int, step: int, uses: Any = uses) -> torch.Tensor:
                out: torch.Tensor = model(inputs(rank, step, 3, 5), uses[step % 3][rank % 2])
                return out.square().mean()

            for wrapped in (names, ("blocks.1",)):
                # Without momentum: to an optimizer, a gradient of zero is not the same as none.
                assert_trains_alike(
                    OptionalStack,
                    lambda m, w=wrapped, s=strategy: shard(m, w, s),  # type: ignore[misc]
                    loss,
                    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                )


@CHECKS.on(2)
def a_tied_weight_whose_owner_has_no_backward_gets_a_gradient_on_one_rank_only() -> None:
    """The unit that borrows the weight must announce its gradient, on every rank."""

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner, self.last = nn.Linear(5, 5, bias=False), Optional()
            self.last.sometimes.weight = self.owner.weight

        def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
            with torch.no_grad():
                x = self.owner(x)
            out: torch.Tensor = self.last(x, uses)
            return out

    for strategy in STRATEGY_NAMES:
        assert_trains_alike(
            Borrowing,
            lambda m, s=strategy: shard(m, ("owner", "last"), s),  # type: ignore[misc]
            lambda model, rank, step: model(inputs(rank, step, 3, 5), (rank + step) % 2 == 0).square().mean(),
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )


@CHECKS.on(2)
def a_unit_that_does_not_run_on_any_rank_has_no_gradient() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.skipped = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    model = assert_trains_alike(Skips, lambda m: shard(m, ("used", "skipped")), _square_loss)
    assert model.skipped.weight.grad is None and model.skipped.bias.grad is None


@CHECKS.on(2)
def a_unit_whose_output_no_loss_needs_has_no_gradient() -> None:
    class Wasted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.wasted = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.wasted(x)
            out: torch.Tensor = self.used(x)
            return out

    model = assert_trains_alike(Wasted, lambda m: shard(m, ("used", "wasted")), _square_loss)
    assert model.wasted.weight.grad is None


# ---- dtypes and shapes ----------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Every shape that has no obvious rows to share: 0-dim, one element, no element, fewer rows than ranks, odd sizes."""

    SHAPES = ((), (1,), (1, 1), (0,), (0, 3), (3, 0), (2, 5), (3,), (7, 3), (1, 13), (5, 2, 3), (2, 1, 1, 4), (31,))

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in self.SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for index, value in enumerate(self.values):
            total = total + (value * (x.mean() + index + 1)).square().sum()
        return total / 100


class ShapesByUnit(nn.Module):
    """One unit for each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(OneShape(shape) for shape in Shapes.SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([unit(x) for unit in self.units]).sum() / 100


class OneShape(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + (self.value * (x.mean() + 1)).square().sum()


@CHECKS.on(*WORLDS)
def any_shape_trains() -> None:
    units = tuple(f"units.{index}" for index in range(len(Shapes.SHAPES)))
    for strategy in STRATEGY_NAMES if dist.get_world_size() == 4 else ("optim_grads_params",):
        assert_trains_alike(Shapes, lambda m, s=strategy: shard(m, (), s), _square_loss)  # type: ignore[misc]
        assert_trains_alike(ShapesByUnit, lambda m, s=strategy: shard(m, units, s), _square_loss)  # type: ignore[misc]


class MixedDtypes(nn.Module):
    """fp32, fp64 and bf16 parameters, trainable and frozen, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(5, 4), nn.Linear(4, 3, dtype=torch.float64)
        self.narrow = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.single(x).double())
        return (self.narrow(x.bfloat16()) * self.scale).float()


@CHECKS.on(*WORLDS)
def dtypes_mix_in_one_unit() -> None:
    """In bf16 the reference sums ranks' gradients in bf16, the engine in fp32: fp32 parameters of one rank are compared."""
    for strategy in STRATEGY_NAMES:
        plain, model = seeded(MixedDtypes), seeded(MixedDtypes)
        shard(model, (), strategy, mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None))
        dtypes = [parameter.dtype for parameter in model.parameters()]
        assert dtypes == [parameter.dtype for parameter in plain.parameters()]
        for step in range(3):
            # The same batch on every rank: the mean of equal numbers is exact in any dtype.
            model.zero_grad()
            plain.zero_grad()
            loss, expected = _square_loss(model, 0, step), _square_loss(plain, 0, step)
            assert loss.item() == expected.item()
            loss.backward()
            expected.backward()
            for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert ours.grad is None if theirs.grad is None else torch.equal(full(ours.grad), theirs.grad), name


@CHECKS.on(2)
def parameters_that_are_not_contiguous_keep_their_values() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 7).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight)

    assert_trains_alike(Transposed, shard, _square_loss)


# ---- no parameters --------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    """A root and a unit without parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.first, self.second = nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.act(self.first(x)))
        return out


@CHECKS.on(*WORLDS)
def modules_without_parameters_are_units_too() -> None:
    model = assert_trains_alike(Sparse, lambda m: shard(m, ("act", "first", "second")), _square_loss)
    assert not model.parameter_groups and not model.act.parameter_groups
    nothing = shard(nn.Tanh())
    x = torch.randn(3, requires_grad=True)
    with microbatch(nothing):
        nothing(x).sum().backward()
    assert x.grad is not None and x.grad.any()


@CHECKS.on(2)
def a_group_of_another_mesh_does_not_take_part() -> None:
    """Placements name the mesh's axis by index or name, and a part of a larger mesh serves."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    for axis in (1, -1, "dp"):
        placements = strategy_placements("optim_grads_params", axis)
        plain, model = seeded(Sparse), seeded(Sparse)
        for name in ("first", ""):
            fully_shard(model.get_submodule(name), mesh, placements)
        assert model.first.parameter_groups[0].group_mesh.mesh.size() == 2
        _square_loss(model, dist.get_rank(), 0).backward()
        backward_plainly(plain, _square_loss, 0)
        assert_same_gradients(model, plain)
    (group,) = fully_shard(seeded(Sparse), mesh, strategy_placements("optim_grads_params", "tp")).parameter_groups
    assert group.group_mesh.mesh.size() == 1 and group.layout.num_ranks == 1


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
