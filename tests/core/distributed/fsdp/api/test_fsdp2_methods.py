"""FSDP2's methods by their names: the same script, with PyTorch's ``fully_shard`` and with ours, gives the same numbers."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.core.distributed.fsdp import fsdp2 as ours
from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.fsdp2.methods import say_once
from tests.support.agreement import inputs, seeded
from tests.support.fsdp2_table import TABLE, Fate, entries_of_torch, fates
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
Numbers = list[torch.Tensor]


class Net(nn.Module):
    """Layers of which each is a unit; the last one is used by another method, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.norm(x)) * scale

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {"out": [self.norm(self.layers[0](x).to(x.dtype))], "n": 1}


def _wrapped(library: Any, mesh: Any = None, **settings: Any) -> Any:
    model = seeded(Net)
    for layer in model.layers:
        library.fully_shard(layer, mesh=mesh, **settings)
    return library.fully_shard(model, mesh=mesh, **settings)


def _step(
    model: Any, step: int, *, num_microbatches: int = 1, before: Callable[[bool], None] = lambda _: None
) -> Numbers:
    """Losses of the microbatches of a step, and its gradients; an update."""
    found: Numbers = []
    for index in range(num_microbatches):
        before(index == num_microbatches - 1)
        loss = model(inputs(dist.get_rank(), 10 * step + index, 4, 6)).square().mean()
        loss.backward()
        found.append(loss.detach())
    parameters = list(model.parameters())
    found += [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    torch.optim.SGD(parameters, lr=0.1).step()
    model.zero_grad()
    return found


def _assert_alike(script: Callable[[Any], Numbers], *, tolerance: float = 1e-6) -> None:
    """Run the script with both libraries and compare what it returns."""
    expected, got = script(theirs), script(ours)
    assert len(got) == len(expected)
    for ours_value, their_value in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_value, their_value, rtol=tolerance, atol=tolerance)


@CHECKS.on(2)
def accumulation_without_communication() -> None:
    hsdp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    for mesh, settings in ((None, {}), (None, {"reshard_after_forward": False}), (hsdp, {})):
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):

            def script(library: Any, mesh: Any = mesh, name: str = name, settings: Any = settings) -> Numbers:
                model = _wrapped(library, mesh, **settings)

                def before(is_last: bool) -> None:
                    getattr(model, name)(is_last)
                    model.set_is_last_backward(is_last)
                    model.set_reshard_after_backward(is_last)

                found: Numbers = []
                for step in range(3):
                    found += _step(model, step, num_microbatches=3, before=before)
                model.set_requires_gradient_sync(True)
                return found + _step(model, 4)

            _assert_alike(script)


@CHECKS.on(2)
def units_by_themselves_may_leave_out_communication() -> None:
    def script(library: Any) -> Numbers:
        model = _wrapped(library)

        def before(is_last: bool) -> None:
            for unit in [*model.layers, model]:
                unit.set_requires_gradient_sync(is_last, recurse=False)

        return [number for step in range(3) for number in _step(model, step, num_microbatches=2, before=before)]

    _assert_alike(script)


@CHECKS.on(2)
def the_last_microbatch_is_known_before_the_first_forward() -> None:
    model = _wrapped(ours)
    model.set_requires_gradient_sync(False)
    assert not model.context.state.is_last
    model.layers[0].set_requires_gradient_sync(True)
    assert model.context.state.is_last
    model.set_requires_all_reduce(False)  # means nothing where there is one axis
    assert model.context.state.is_last


@CHECKS.on(2)
def a_unit_that_came_later_is_told_too() -> None:
    """The unit is added after the root has run, so it has a separate context."""
    for strategy in ("no_shard", "optim_grads_params"):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), placements=strategy)
        model(torch.ones(2, 4)).sum().backward()
        model.append(fully_shard(nn.Linear(4, 4), placements=strategy))
        model.zero_grad()
        for is_last in (False, True, False, True):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model(torch.ones(2, 4)).sum().backward()
        grad: Any = model[2].bias.grad
        torch.testing.assert_close(grad.full_tensor(), torch.full((4,), 8.0))


@CHECKS.on(2)
def gradients_are_divided_by_a_factor_of_ones_own() -> None:
    for mesh_shape in ((2,), (2, 1)):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :])

        def script(library: Any, mesh: Any = mesh) -> Numbers:
            # Sums forced, FSDP2 (torch 2.13) divides by the factor twice where shards have one rank.
            model = _wrapped(library, mesh if library is ours else None)
            model.layers[1].set_gradient_divide_factor(5.0)
            model.set_gradient_divide_factor(1)
            for unit in (model, *model.layers):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no other one for FSDP2
            return [number for step in range(3) for number in _step(model, step)]

        _assert_alike(script)
    with pytest.raises(ValueError, match="by which gradients are divided must be positive, got 0"):
        _wrapped(ours).set_gradient_divide_factor(0)


@CHECKS.on(2)
def a_hook_sees_reduced_gradients_before_they_are_added() -> None:
    for mesh_shape in ((2,), (2, 1)):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :])

        def script(library: Any, mesh: Any = mesh) -> Numbers:
            model = _wrapped(library, mesh)
            model.layers[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))
            found = _step(model, 0)
            for index in range(2):  # sums
                model(inputs(dist.get_rank(), index, 4, 6)).square().mean().backward()
            return [*found, *_step(model, 1)]

        _assert_alike(script)
    with pytest.raises(ValueError, match="stream cannot be set"):
        _wrapped(ours, init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))).set_all_reduce_hook(
            print, stream=object()
        )


@CHECKS.on(2)
def weights_that_stay_are_gathered_once() -> None:
    """``set_reshard_after_forward(False)``: from the second step on the unit's weights live through the turn."""
    model, expected = _wrapped(ours), _wrapped(theirs)
    for step in range(6):
        if step == 1:
            model.set_reshard_after_forward(False)
        if step == 4:
            model.layers[0].set_reshard_after_forward(True)
        for got, wanted in zip(_step(model, step), _step(expected, step), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        kept = [unit.parameter_groups[0].weights.holders.by_plan for unit in (*model.layers, model)]
        if step in (3, 5):
            assert kept == [step == 3, True, True, True], (step, kept)
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        model.set_reshard_after_forward(2)


@CHECKS.on(2)
def prefetches_are_as_many_as_are_listed() -> None:
    def script(library: Any) -> Numbers:
        model = _wrapped(library)
        for index, layer in enumerate(model.layers):
            layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 3]))
            layer.set_modules_to_backward_prefetch(list(model.layers[max(index - 2, 0) : index]))
        return [number for step in range(4) for number in _step(model, step)]

    _assert_alike(script)
    model = _wrapped(ours)
    model.layers[0].set_modules_to_forward_prefetch(list(model.layers[1:]))
    assert model.layers[0]._fsdp_unit.prefetch_depth(None) == (2, 1)
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        model.set_modules_to_backward_prefetch([nn.Linear(2, 2)])


@CHECKS.on(2)
def weights_may_be_unsharded_ahead() -> None:
    def script(library: Any) -> Numbers:
        model = _wrapped(library)
        found: Numbers = []
        for step in range(3):
            handle = model.layers[0].unshard(async_op=True)
            model.layers[1].unshard(async_op=True)
            assert isinstance(handle, library.UnshardHandle)
            handle.wait()
            assert model.layers[2].unshard() is None
            found += [model.layers[i].weight.detach().clone() for i in (0, 2)]
            assert not isinstance(model.layers[0].weight, DTensor)
            model.layers[2].reshard()
            assert isinstance(model.layers[2].weight, DTensor)
            found += _step(model, step)
            handle.wait()  # means nothing any more
            assert isinstance(model.layers[0].weight, DTensor)
        return found

    _assert_alike(script)


@CHECKS.on(2)
def other_methods_compute_with_whole_weights() -> None:
    bf16 = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for settings in ({}, {"mp_policy": bf16}):

        def script(library: Any, settings: Any = settings) -> Numbers:
            model = _wrapped(library, **settings)
            if library is theirs:
                library.register_fsdp_forward_method(model, "encode")
            library.register_fsdp_forward_method(model, "describe")
            library.register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
            found: Numbers = []
            for step in range(3):
                x = inputs(dist.get_rank(), step, 4, 6)
                loss = model.encode(x, scale=2.0).square().mean() + model.describe(x)["out"][0].square().mean()
                loss.backward()
                found.append(loss.detach())
                found += [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
                with torch.no_grad():
                    found.append(model.encode(x))
                found += _step(model, step)
            return found

        _assert_alike(script, tolerance=0.02 if settings else 1e-6)
    model = _wrapped(ours)
    with pytest.raises(ValueError, match="does not have a method nothing"):
        ours.register_fsdp_forward_method(model, "nothing")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"register_fsdp_forward_method\(module, \"name\"\)"):
        model.describe(torch.ones(2, 6))
    assert model.encode.__name__ == "encode"
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None, "a registered method keeps its module alive"
    finally:
        gc.enable()


@CHECKS.on(2)
def ignored_parameters_stay_as_they_are() -> None:
    def script(library: Any) -> Numbers:
        model = seeded(Net)
        ignored = {model.head.weight, model.layers[1].bias}
        for layer in model.layers:
            library.fully_shard(layer, ignored_params=ignored)
        library.fully_shard(model, ignored_params=ignored)
        assert all(
            (type(p) is nn.Parameter and not isinstance(p, DTensor)) == (p in ignored) for p in model.parameters()
        )
        return [number for step in range(3) for number in _step(model, step)]

    _assert_alike(script)


@CHECKS.on(2)
def arguments_that_say_where_shards_lie() -> None:
    def script(library: Any) -> Numbers:
        mesh = init_device_mesh("cpu", (2,))
        model = _wrapped(
            library,
            mesh,
            shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None,
            offload_policy=theirs.CPUOffloadPolicy(pin_memory=False),
            reshard_after_forward=2,
        )
        return [number for step in range(3) for number in _step(model, step)]

    _assert_alike(script)


@CHECKS.on(2)
def a_pass_that_failed_is_dropped() -> None:
    def script(library: Any) -> Numbers:
        model = _wrapped(library)
        found = _step(model, 0)
        hook = model.layers[1].register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 6))
        hook.remove()
        model.reset_iter_state() if hasattr(model, "reset_iter_state") else model.reshard()
        return found + _step(model, 1)

    _assert_alike(script)
    with pytest.raises(RuntimeError, match=r"reset_iter_state must be called on the root, got layers\.0"):
        model = _wrapped(ours)
        model(torch.ones(2, 6))
        model.layers[0].reset_iter_state()


@CHECKS.on(2)
def averages_of_weights_are_sharded_alike() -> None:
    def script(sharded: bool) -> Numbers:
        model = seeded(Net)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for net in (model, average.module) if sharded else ():
            for layer in net.layers:
                ours.fully_shard(layer)
            ours.fully_shard(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(inputs(0, step, 4, 6)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in average.parameters()]
        return [average(inputs(0, 9, 4, 6)), *weights]

    for got, expected in zip(script(True), script(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(NotImplementedError, match=r"must not be copied.*AveragedModel: make it of the plain module"):
        AveragedModel(_wrapped(ours))


@CHECKS.on(2)
def optimizers_that_run_under_fsdp2_run_here() -> None:
    names = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
    for name in (*names, "Adafactor", "Rprop"):

        def script(library: Any, name: str = name) -> Numbers:
            model = _wrapped(library)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)

            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                value: torch.Tensor = model(inputs(dist.get_rank(), 0, 4, 6)).square().mean()
                value.backward()
                return value

            for _ in range(3):
                optimizer.step(loss)
            return [parameter.full_tensor() for parameter in model.parameters()]

        if name in names:
            _assert_alike(script)
        else:  # nor do these there
            for library in (theirs, ours):
                with pytest.raises((RuntimeError, NotImplementedError), match=r"plac|[uU]neven"):
                    script(library)
    # There parameters of uneven rows are refused.
    plain, model = seeded(Net), _wrapped(ours)
    for net in (plain, model):
        lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure(net: Any = net, optimizer: Any = lbfgs) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = net(inputs(0, 0, 4, 6)).square().mean()
            value.backward()
            return value

        for _ in range(2):
            lbfgs.step(closure)
    for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), whole)
    model = _wrapped(ours)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"torch\.optim\.Muon: fully_shard_optimizer\(optimizer\)"):
        optimizer.step()
    fully_shard_optimizer(optimizer).step()


class OwnInitialisation(Net):
    """Initial values other than those of ``reset_parameters``, as models of ``transformers`` have."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def init_weights(self) -> None:
        torch.manual_seed(7)
        self.norm.reset_parameters()
        self.apply(self._init_weights)


@CHECKS.on(2)
def values_come_after_the_meta_device_as_in_fsdp2() -> None:
    """There is no ``init_fn`` there, and nothing is drawn by ``fully_shard``: what was drawn would be lost, or seen."""
    plain = OwnInitialisation()
    plain.init_weights()
    with torch.device("meta"):
        model: Any = OwnInitialisation()
    state = torch.random.get_rng_state()
    for layer in model.layers:
        ours.fully_shard(layer)
    ours.fully_shard(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for prepare in (lambda: None, lambda: model.to_empty(device="cpu")):
        prepare()
        with pytest.raises(RuntimeError, match=r"norm\.weight.* must have values before the next forward"):
            model(torch.ones(2, 6))
    model.init_weights()
    for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), whole)
    model(torch.ones(2, 6)).sum().backward()


@CHECKS.on(2)
def replicas_of_the_rest_of_a_model() -> None:
    """``replicate`` around units averages the gradients of what is not sharded, and leaves the units alone."""

    def script(library: Any) -> Numbers:
        model = seeded(Net)
        for layer in model.layers:
            library.fully_shard(layer)
        replicate(model)
        found: Numbers = []
        for step in range(3):
            model(inputs(dist.get_rank(), step, 4, 6)).square().mean().backward()
            grads = [parameter.grad for parameter in model.parameters()]
            found += [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads]
            model.zero_grad()
        return found

    _assert_alike(script)


class Chunked(nn.Module):
    """A model whose head is called by its user, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.body(x)))


@CHECKS.on(2)
def losses_by_chunks_outside_of_the_model() -> None:
    """Backwards of the head come between forward and backward of the unit that it shares with the norm."""

    def gradients(shard: Callable[[Any], Any]) -> Numbers:
        model = seeded(Chunked)
        shard(model)
        found: Numbers = []
        for step in range(3):
            hidden = model(inputs(dist.get_rank(), step, 6, 6))
            grads = []
            for chunk in hidden.detach().chunk(3):
                chunk.requires_grad_()
                model.head(chunk).square().sum().backward()
                grads.append(chunk.grad)
            hidden.backward(torch.cat(grads))
            for parameter in model.parameters():
                grad = parameter.grad
                if not isinstance(grad, DTensor):
                    dist.all_reduce(grad)
                    grad = grad / dist.get_world_size()
                found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
            model.zero_grad()
        return found

    for around in (True, False):

        def shard(model: Any, around: bool = around) -> None:
            ours.fully_shard(model.body)
            ours.fully_shard([model.norm, model.head])
            if around:
                ours.fully_shard(model)

        for got, expected in zip(gradients(shard), gradients(lambda model: None), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@CHECKS.on(2)
def roots_share_streams() -> None:
    first, second = _wrapped(ours), _wrapped(ours)
    ours.share_comm_ctx([first, second])
    ours.share_comm_ctx([])
    assert first.context.streams.queues is second.context.streams.queues
    for step in range(2):
        _step(first, step)
        _step(second, step)
    with pytest.raises(ValueError, match="Expects list of FSDPModules but got"):
        ours.share_comm_ctx([first, nn.Linear(1, 1)])


@CHECKS.on(2)
def each_entry_of_the_table_is_what_happens() -> None:
    for entry, (fate, call) in fates().items():
        model = ours.fully_shard(nn.Sequential(*map(ours.fully_shard, (nn.Linear(4, 4), nn.Linear(4, 4)))))
        say_once.cache_clear()
        if fate is Fate.REFUSED:
            with pytest.raises(NotImplementedError, match=r"not served|must be left out"):
                call(model)
            continue
        call(model)
        assert say_once.cache_info().currsize == (fate is Fate.SAID), entry
        model(torch.ones(2, 4)).sum().backward()


def test_the_table_has_all_that_torch_has() -> None:
    """And of other versions of torch at most what this one lacks."""
    found = entries_of_torch()
    assert len(found) > 30 and len(set(found)) == len(found)
    assert [entry for entry in found if entry not in TABLE] == []
    if torch.__version__.startswith("2.13"):
        assert sorted(TABLE) == sorted(found)


def test_what_the_table_serves_has_the_arguments_of_torch() -> None:
    """A keyword that torch's method has and ours lacks would be found by users alone."""
    for name, method in vars(theirs.FSDPModule).items():
        if name[0] != "_" and callable(method):
            wanted, own = (inspect.signature(f).parameters for f in (method, getattr(ours.FSDPModule, name)))
            assert [(p.name, p.kind) for p in own.values()] == [(p.name, p.kind) for p in wanted.values()], name
    wanted, own = (inspect.signature(library.fully_shard).parameters for library in (theirs, ours))
    assert {name: p.kind for name, p in wanted.items()}.items() <= {name: p.kind for name, p in own.items()}.items()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
