"""Where no other rank shares weights, backward writes their main gradient: the same numbers, without a reduce-scatter input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatStorage
from megatron.core.distributed.fsdp.buffers.gradients import Gradients, TrainingSettings
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.config.placement import hybrid_placements, strategy_placements
from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from tests.support.agreement import inputs, seeded
from tests.support.models import STRATEGY_NAMES, assert_at_rest, context_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
WIDTH = 6
Grads = dict[str, torch.Tensor | None]


class InPlaceLinear(nn.Linear):
    """A linear layer as the framework's: its weight gradient goes into ``weight.get_main_grad()``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with_main_grad(x, self.weight, self.bias)


class Layer(nn.Module):
    """Weights that are written in place, and such that autograd leaves; some get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own, self.foreign = nn.LayerNorm(WIDTH), InPlaceLinear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = torch.tanh(self.own(self.norm(x)))
        out: torch.Tensor = x if skips else x + self.foreign(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Layer(), Layer(), InPlaceLinear(WIDTH, 3)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = checkpoint(self.second, self.first(x, skips), use_reentrant=False)
        out: torch.Tensor = self.last(x)
        return out


class Twice(InPlaceLinear):
    """A layer that uses its weight twice."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(super().forward(x)))


def _mesh_of_one() -> DeviceMesh:
    """A mesh of this rank, as a pipeline stage with one data-parallel rank has."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("other", "dp"))["dp"]


def _shard(
    dtype: torch.dtype = torch.float32,
    strategy: str = "optim_grads_params",
    policy: MixedPrecisionPolicy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    **settings: Any,
) -> Any:
    model, placements = seeded(Model).to(dtype), placements or strategy_placements(strategy)
    mesh = mesh or _mesh_of_one()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh, placements, mixed_precision_policy=policy, **settings)
    context_of(model).change_options(poisons=True)
    return model


def _backward(model: Any, step: int, *, skips: bool = False) -> None:
    x = inputs(dist.get_rank(), step, 4, WIDTH).to(context_of(model).groups[0].dtypes.compute)
    model(x, skips).float().square().mean().backward()


def _gradients(model: nn.Module) -> Grads:
    return {
        name: None if parameter.grad is None else getattr(parameter.grad, "_local_tensor", parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }


def _assert_equal(found: Grads, expected: Grads, what: Any) -> None:
    """To the last bit."""
    for name, gradient in expected.items():
        mine = found[name]
        if gradient is None or mine is None:
            assert gradient is mine, (what, name)
        else:
            assert mine.dtype == gradient.dtype and torch.equal(mine, gradient), (what, name)


def _place(model: Any, name: str) -> tuple[FsdpParameterGroup, int]:
    """The group of a parameter, and its index there."""
    parameter = model.get_parameter(name)
    group = group_of(parameter)
    assert group is not None
    return group, next(index for index, own in enumerate(group.sharded) if own is parameter)


@contextmanager
def _failing(model: Any, name: str) -> Iterator[None]:
    """The gradient of a parameter raises when it arrives, and so does the scope."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle of backward")

    group, index = _place(model, name)
    handle = group.unsharded[index].register_hook(fail)
    with pytest.raises(ValueError, match="in the middle of backward"):
        yield
    handle.remove()


@contextmanager
def _staged() -> Iterator[None]:
    """Groups that are made in the scope reduce a reduce-scatter input, as those do that ranks share."""
    follow = Gradients.use_settings

    def use_settings(self: Gradients, settings: TrainingSettings) -> None:
        follow(self, settings)
        self.is_direct = False

    with patch.object(Gradients, "use_settings", use_settings):
        yield


@contextmanager
def _garbage_in_new_memory() -> Iterator[None]:
    """What is read before it was written is NaN."""
    allocate = FlatStorage.allocate

    def allocate_nan(self: FlatStorage) -> None:
        was_allocated = self.allocated
        allocate(self)
        if not was_allocated:
            self.flat.fill_(float("nan"))

    with patch.object(FlatStorage, "allocate", allocate_nan):
        yield


def _gradients_of_steps(model: Any) -> list[Grads]:
    """Gradients after each step of three microbatches, and after a backward that adds to them."""
    found = []
    for step in range(3):
        for index in range(3):
            with microbatch(model, is_first=index == 0, is_last=index == 2):
                _backward(model, 3 * step + index, skips=step == 1)
        found.append(_gradients(model))
        _backward(model, step, skips=step == 0)
        found.append(_gradients(model))
        assert_at_rest(context_of(model))
        for parameter in model.parameters():
            parameter.grad = None
    return found


@CHECKS.on(1, 2)
def numbers_are_those_of_the_reduce_scatter_input_to_the_last_bit() -> None:
    """Each weight gets one contribution in a microbatch, rounded where it was, and added in the main gradient's dtype."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, policy in (
        (fp32, MixedPrecisionPolicy()),
        (bf16, MixedPrecisionPolicy()),
        (bf16, MixedPrecisionPolicy(main_params_dtype=bf16)),
        (bf16, MixedPrecisionPolicy(grad_comm_dtype=fp32)),
    ):
        with _staged():
            staged = _shard(dtype, "optim_grads_params", policy)
        assert not any(group.grads.is_direct for group in context_of(staged).groups)
        expected = _gradients_of_steps(staged)
        for strategy in STRATEGY_NAMES:
            with _garbage_in_new_memory():
                direct = _shard(dtype, strategy, policy)
                assert all(group.grads.is_direct for group in context_of(direct).groups)
                found = _gradients_of_steps(direct)
            for number, pair in enumerate(zip(found, expected, strict=True)):
                _assert_equal(*pair, (dtype, policy, strategy, number))


@CHECKS.on(1)
def a_weight_that_is_used_twice_is_summed_in_the_main_gradients_dtype() -> None:
    """The reduce-scatter input rounds the sum of both uses to bf16. Within a microbatch their order is the same."""
    for dtype, num_bits in ((torch.float32, 24), (torch.bfloat16, 8)):
        found = []
        for is_direct in (True, False):
            with nullcontext() if is_direct else _staged():
                model = fully_shard(seeded(Twice).to(dtype), _mesh_of_one())
            for index in range(2):
                model(inputs(0, index, 4, WIDTH).to(dtype)).float().square().mean().backward()
                found.append(model.weight.grad.to_local().clone())
        first, both, first_staged, both_staged = found
        assert first.dtype == torch.float32 and (dtype == torch.bfloat16 or torch.equal(first, first_staged))
        # One rounding of each microbatch's sum, to the gradients' dtype.
        for mine, rounded in ((first, first_staged), (both, both_staged)):
            assert torch.allclose(mine, rounded, rtol=0, atol=2 * 2.0**-num_bits * float(rounded.abs().max()))


@CHECKS.on(1, 2)
def gradients_are_those_of_the_model_without_sharding_to_the_last_bit() -> None:
    hybrid = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("other", "outer", "dp"))
    hybrid = hybrid["outer", "dp"]
    both = hybrid_placements("optim_grads_params", "optim", ("outer", "dp"))
    for model in (_shard(), _shard(strategy="no_shard"), _shard(mesh=hybrid, placements=both)):
        assert all(group.grads.is_direct for group in context_of(model).groups)
        plain = seeded(Model)
        for index in range(3):
            with microbatch(model, is_first=index == 0, is_last=index == 2):
                _backward(model, index)
            plain(inputs(dist.get_rank(), index, 4, WIDTH)).square().mean().backward()
        _assert_equal(_gradients(model), _gradients(plain), "three microbatches")


@CHECKS.on(1, 2)
def what_must_be_scaled_or_seen_or_summed_wider_is_reduced() -> None:
    for model in (
        _shard(grad_divisor=2),
        _shard(policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)),
        *([_shard(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))] if dist.get_world_size() == 2 else []),
    ):
        assert not any(group.grads.is_direct for group in context_of(model).groups)
        assert context_of(model).describe().reduce_scatter_inputs > 0
    model = _shard()
    model.first.set_all_reduce_hook(lambda flat: None)
    assert [group.grads.is_direct for group in context_of(model).groups] == [
        not name.startswith("first") for name in (group.name_of(0) for group in context_of(model).groups)
    ]


@CHECKS.on(1, 2)
def no_memory_is_spent_on_reduce_scatter_inputs() -> None:
    for strategy in STRATEGY_NAMES:
        for least_memory in (False, True):
            model = _shard(torch.bfloat16, strategy, least_memory=least_memory)
            assert context_of(model).describe().reduce_scatter_inputs == 0, "expected of the first step"
            taken: list[FlatStorage] = []
            allocate = FlatStorage.allocate
            with patch.object(FlatStorage, "allocate", lambda own: (taken.append(own), allocate(own))[1]):  # noqa: B023
                for step in range(6):
                    with microbatch(model, is_first=step % 2 == 0, is_last=step % 2 == 1):
                        _backward(model, step)
                    if step % 2:
                        model.zero_grad()
            context = context_of(model)
            mains = {id(group.grads.main.storage) for group in context.groups}
            gathered = {id(group.weights.full_storage) for group in context.groups}
            assert mains <= {id(storage) for storage in taken} <= mains | gathered, strategy
            report = context.describe()
            assert report.is_planned and report.main_gradients > 0
            assert report.reduce_scatter_inputs == report.largest_input == report.partial_gradients == 0, strategy
            assert least_memory or report.arena == sum(arena.nbytes for arena in context.planner.arenas), strategy


@CHECKS.on(1, 2)
def a_failed_backward_leaves_no_part_of_a_gradient() -> None:
    """It leaves none where there was none, and the next step is as if it had not been, however gradients are cleared."""
    expected = _shard()
    _backward(expected, 0)
    _backward(expected, 2)
    for num_before, set_to_none in ((0, True), (1, True), (2, True), (1, False)):
        model = _shard()
        for step in range(num_before):  # sums of earlier microbatches, to which a part is added
            _backward(model, step)
        before = _gradients(model)
        with _garbage_in_new_memory(), _failing(model, "first.norm.weight"):
            _backward(model, 1)
        # The root's unit, in which the last layer is, is reduced at the end of a backward.
        found = _gradients(model)
        assert all(found[name] is not None for name in before if before[name] is not None)
        fresh = {name for name in before if before[name] is None and found[name] is not None}
        assert all(name.startswith("second.") for name in fresh), fresh
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=set_to_none)
        cleared = _gradients(model)
        _backward(model, 0)
        _backward(model, 2)
        _assert_equal(_gradients(model), _gradients(expected), num_before)
        assert_at_rest(context_of(model))
        assert set_to_none or any(gradient is not None for gradient in cleared.values())
        del kept


@CHECKS.on(1, 2)
def the_rest_of_a_step_after_a_failed_backward_is_added_to_what_is_whole() -> None:
    """Without ``zero_grad`` gradients that were complete remain, and sums to which a part was added begin again at zero."""
    model, plain = _shard(), _shard()
    _backward(model, 0)
    with _failing(model, "first.norm.weight"):
        _backward(model, 1)
    _backward(model, 2)
    _backward(plain, 2)
    found = _gradients(model)
    for name, gradient in _gradients(plain).items():
        mine = found[name]
        is_fresh = gradient is None or (mine is not None and torch.equal(mine, gradient))
        assert is_fresh is (not name.startswith("second.") or gradient is None), name


@CHECKS.on(1, 2)
def gradients_that_the_user_keeps_or_sets_are_the_users() -> None:
    model, plain = _shard(), _shard()
    _backward(model, 0)
    kept = _gradients(model)
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    _backward(model, 1)
    for name, gradient in held.items():
        before = kept[name]
        if gradient is not None and before is not None:
            assert torch.equal(gradient.to_local(), before), f"{name} was kept"
    _backward(plain, 1)
    _assert_equal(_gradients(model), _gradients(plain), "new memory")
    with _staged():
        staged = _shard()
    _backward(staged, 1)
    for net in (model, staged):
        net.first.own.weight.grad = torch.full_like(net.first.own.weight, 0.5)  # which is added to
        net.second.own.weight.grad = None
        _backward(net, 2)
    _assert_equal(_gradients(model), _gradients(staged), "set by hand")
    for net in (model, staged):
        net.zero_grad(set_to_none=False)
        _backward(net, 3, skips=True)  # zeros that the user has written are a gradient
    _assert_equal(_gradients(model), _gradients(staged), "zeros")
    assert model.first.foreign.weight.grad is not None


@CHECKS.on(1)
def a_layer_may_keep_the_slice_that_it_writes() -> None:
    """As transformer-engine does, in ``weight.main_grad``: that is no user who keeps a gradient, for whom memory is taken."""
    model = _shard()
    group, index = _place(model, "last.weight")
    weight: Any = group.unsharded[index]
    get_main_grad: Callable[[], torch.Tensor] = weight.get_main_grad

    def keeping() -> torch.Tensor:
        weight.main_grad = get_main_grad()
        main_grad: torch.Tensor = weight.main_grad
        return main_grad

    weight.get_main_grad = keeping
    tensors = group.grads.main.tensors
    for step in range(3):
        _backward(model, step)
        assert weight.main_grad.data_ptr() == model.last.weight.grad.to_local().data_ptr()
        assert group.grads.main.tensors is tensors
        model.zero_grad()


@CHECKS.on(1)
def a_hook_between_two_microbatches_sees_each_reduction_after_it() -> None:
    """It changes a backward's gradients without what the main gradient held."""
    model, plain, kept = _shard(), _shard(), {}
    for index in range(4):
        for net in (model, plain):
            _backward(net, index)
        if index == 1:
            model.first.set_all_reduce_hook(lambda flat: flat.mul_(0.0))
            kept = _gradients(model)
        if index == 2:
            for group in model.first.parameter_groups:
                group.change_training(reduced_hook=None)
    fresh, expected = _shard(), _gradients(plain)
    _backward(fresh, 3)
    for name, gradient in _gradients(fresh).items():
        before = kept[name]
        if name.startswith("first.") and gradient is not None and before is not None:
            expected[name] = before + gradient
    _assert_equal(_gradients(model), expected, "a hook in the middle")


@CHECKS.on(1)
def the_debug_mode_names_the_first_gradient_that_is_not_finite() -> None:
    with fully_shard_context(debug=True):
        model = _shard()
    _backward(model, 0)
    with pytest.raises(RuntimeError, match=r"gradients must be finite.*second\..*before its reduction: NaN"):
        (model(inputs(0, 1, 4, WIDTH)).square().mean() * float("nan")).backward()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
