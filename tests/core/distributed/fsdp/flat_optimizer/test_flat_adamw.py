"""``FlatAdamW`` on the CPU is bitwise ``torch.optim.AdamW``, whatever is sharded, grouped, clipped or left out."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    FsdpParameterGroup,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.optimizer.clip_grads import clip_factor
from tests.support.agreement import groups_of
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    context_of,
    full,
    local_of,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)
BF16 = torch.bfloat16


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return param groups: vectors without weight decay, matrices with other betas, the head with its own rate."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if p.dim() == 1 and "head" not in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if p.dim() > 1 and "head" not in name], "betas": (0.8, 0.95)},
        {"params": [p for name, p in named if "head" in name], "lr": 0.02, "eps": 1e-6},
    ]


def _torch_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(_groups(net), lr=0.01, weight_decay=0.1, foreach=True))


def _flat_adamw(net: nn.Module, **options: Any) -> FlatAdamW:
    return FlatAdamW(_groups(net), lr=0.01, weight_decay=0.1, **options)


def _train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train with rates that change from step to step, and return the losses."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if step else 1.0
        optimizer.zero_grad()
        loss = loss_of(net, my_piece(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def _poison_padding(net: nn.Module, buffer_of: Callable[[FsdpParameterGroup], FlatBuffer]) -> None:
    """Fill the padding of the groups' buffers with NaN."""
    for group in groups_of(net):
        buffer = buffer_of(group)
        kept = [buffer.view(index).clone() for index in range(len(group.parameters))]
        buffer.local.data.fill_(float("nan"))
        for index, local in enumerate(kept):
            buffer.view(index).data.copy_(local)


def _main_grad(group: FsdpParameterGroup) -> FlatBuffer:
    return FlatBuffer(group.layout, group.weights.main.placements, group.group_mesh.axes, group.grads.main.storage.flat)


def _assert_same(ours: nn.Module, theirs: nn.Module, what: str = "") -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(other)), f"{what} {name}"


def _copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy a state_dict, so that later steps do not change it."""
    state = optimizer.state_dict()
    return {
        "param_groups": [dict(group) for group in state["param_groups"]],
        "state": {index: {key: value.clone() for key, value in own.items()} for index, own in state["state"].items()},
    }


@CHECKS.on(1, 2, 4)
def it_equals_torch_adamw_bit_for_bit() -> None:
    """Losses and main weights, with rates that differ between groups and change between steps."""
    for strategy, dtype in zip(STRATEGY_NAMES, (torch.float32, BF16, BF16, torch.float32), strict=True):
        nets = [shard_net(make_net(2, dtype=dtype), strategy) for _ in range(2)]
        losses = [_train(net, make(net), range(4)) for net, make in zip(nets, (_flat_adamw, _torch_adamw), strict=True)]
        assert losses[0] == losses[1], strategy
        _assert_same(nets[0], nets[1], strategy)


@CHECKS.on(2)
def clipping_by_a_factor_equals_clipping_the_gradients() -> None:
    """The factor is applied when gradients are read: ``param.grad`` does not change, weights are as after clipping."""
    for strategy in STRATEGY_NAMES:
        ours, theirs = (shard_net(make_net(2), strategy) for _ in range(2))
        optimizer, reference = _flat_adamw(ours), _torch_adamw(theirs)
        for step in range(3):
            for net in (ours, theirs):
                loss_of(net, my_piece(step)).backward()
            before = [local_of(p.grad).clone() for p in ours.parameters()]
            norm = optimizer.grad_norm()
            expected = torch.nn.utils.get_total_norm([full(p.grad) for p in theirs.parameters()])
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)  # summed in another order
            factor = clip_factor(norm, 0.1)
            assert factor < 1
            for parameter in theirs.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * factor
            optimizer.step(grad_factor=factor)
            reference.step()
            for parameter, grad in zip(ours.parameters(), before, strict=True):
                assert torch.equal(local_of(parameter.grad), grad)
            _assert_same(ours, theirs, strategy)
            optimizer.zero_grad()
            reference.zero_grad()


@CHECKS.on(2)
def padding_is_never_read() -> None:
    nets = [shard_net(make_net(2)) for _ in range(2)]
    optimizers = [_flat_adamw(net) for net in nets]
    assert any(group.layout.padding_numel for group in groups_of(nets[0]))
    _poison_padding(nets[0], lambda group: group.weights.main)
    for step in range(3):
        norms = []
        for index, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            loss_of(net, my_piece(step)).backward()
            if index == 0:
                _poison_padding(net, _main_grad)
            norms.append(optimizer.grad_norm())
            optimizer.step(grad_factor=clip_factor(norms[-1], 0.5))
            optimizer.zero_grad()
        assert torch.equal(*norms) and norms[0].isfinite()
        _assert_same(nets[0], nets[1])


@CHECKS.on(2)
def a_norm_that_is_not_finite_shows_on_all_ranks_and_in_all_weights() -> None:
    """NaN on one rank must not be clipped away."""
    net = shard_net(make_net(2))
    optimizer = _flat_adamw(net)
    loss_of(net, my_piece(0)).backward()
    if dist.get_rank() == 1:
        local_of(next(p for p in net.parameters() if local_of(p).numel()).grad).fill_(float("nan"))
    norm = optimizer.grad_norm()
    assert norm.isnan()
    optimizer.step(grad_factor=clip_factor(norm, 1.0))
    assert all(local_of(p).isnan().all() for p in net.parameters())


@CHECKS.on(1, 2)
def units_without_gradients_are_left_alone() -> None:
    """Their weights, state and step count are torch's, which skips them too."""
    nets = [shard_net(make_net(3)) for _ in range(2)]
    optimizers = [_flat_adamw(nets[0]), _torch_adamw(nets[1])]
    for step, order in enumerate(([0, 1], [0, 1, 2], [2, 0], [0, 1, 2])):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.order = order
            optimizer.zero_grad()
            loss_of(net, my_piece(step)).backward()
            optimizer.step()
        _assert_same(nets[0], nets[1])
    assert len({float(state["step"]) for state in optimizers[0].state.values()}) == 2
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert float(optimizers[0].state[mine]["step"]) == float(optimizers[1].state[other]["step"])


@CHECKS.on(2)
def gradients_that_the_user_sets_are_used() -> None:
    """The user's own tensor in place of ``param.grad`` is used; None is none, also beside others."""
    nets = [shard_net(make_net(1)) for _ in range(2)]
    optimizers = [_flat_adamw(nets[0]), _torch_adamw(nets[1])]
    for step in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            if step == 0:
                loss_of(net, my_piece(step)).backward()
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            net.head.bias.grad = None
            optimizer.step()
        _assert_same(nets[0], nets[1])


@CHECKS.on(2)
def microbatches_closures_and_updates_beside_the_forward_change_nothing() -> None:
    for strategy in STRATEGY_NAMES:
        results = []
        for options in ({}, {"overlaps_forward": True}):
            net = shard_net(make_net(2, dtype=BF16), strategy)
            optimizer = _flat_adamw(net, **options)

            def closure(net: Net = net, optimizer: FlatAdamW = optimizer) -> float:
                optimizer.zero_grad()
                total = 0.0
                for index in range(2):
                    with microbatch(net, is_first=index == 0, is_last=index == 1):
                        loss = loss_of(net, my_piece(index))
                        loss.backward()
                        total += loss.item()
                return total

            results.append([optimizer.step(closure) for _ in range(3)])
            with torch.no_grad():
                results[-1].append(loss_of(net, my_piece(7)).item())
        assert results[0] == results[1], strategy
        assert results[0][0] > results[0][2]


@CHECKS.on(2)
def the_model_weight_is_written_with_the_main_weight() -> None:
    """The forward after a step needs no cast, but a write to the main weights in between takes effect."""
    net = shard_net(make_net(2, dtype=BF16))
    optimizer = _flat_adamw(net)
    for _ in range(2):
        _train(net, optimizer, range(1))
    for group in groups_of(net):
        assert group.weights.piece_of_update is not None
        for index in range(len(group.parameters)):
            assert torch.equal(group.weights.model.view(index), group.weights.main.view(index).to(BF16))
        group.weights.model.local.data.fill_(1.0)  # a cast in the next forward would undo this
    features = my_piece(0)[0].bfloat16()
    ones = make_net(2, dtype=BF16)
    for parameter in ones.parameters():
        nn.init.ones_(parameter)
    with torch.no_grad():
        assert torch.equal(net(features), ones(features))
        for parameter in net.parameters():
            parameter.mul_(1.0)
        copied = make_net(2, dtype=BF16)
        copied.load_state_dict({name: full(parameter) for name, parameter in net.named_parameters()})
        context_of(net).weights_changed()
        assert torch.equal(net(features), copied(features))


@CHECKS.on(2)
def weights_may_move() -> None:
    """An update uses the buffers' current addresses. One rank computes with these buffers, which stay where they are."""
    nets = [shard_net(make_net(2)) for _ in range(2)]
    optimizers = [_flat_adamw(net) for net in nets]
    for step in range(3):
        losses = [
            _train(net, optimizer, range(step, step + 1)) for net, optimizer in zip(nets, optimizers, strict=True)
        ]
        assert losses[0] == losses[1]
        for group in groups_of(nets[0]):
            old = group.weights.main.local
            old.data = old.clone()
            for index, parameter in enumerate(group.sharded):
                local_of(parameter)  # a view of the old memory
                parameter._local_tensor.data = group.weights.main.view(index)  # type: ignore[attr-defined]
    _assert_same(nets[0], nets[1])


# ---- state ----------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def state_goes_to_torch_adamw_and_comes_from_there() -> None:
    """Each loads the other's ``state_dict`` and continues bitwise alike."""
    for first, second in ((_flat_adamw, _torch_adamw), (_torch_adamw, _flat_adamw), (_flat_adamw, _flat_adamw)):
        net = shard_net(make_net(2))
        optimizer = first(net)
        _train(net, optimizer, range(3))
        other = shard_net(make_net(2, seed=1))
        continued = second(other)
        if second is _flat_adamw:
            _train(other, continued, range(1))
        other.load_state_dict(net.state_dict())
        continued.load_state_dict(_copied(optimizer))
        assert [g["lr"] for g in continued.param_groups] == [g["lr"] for g in optimizer.param_groups]
        assert _train(other, continued, range(3, 5)) == _train(net, optimizer, range(3, 5))
        _assert_same(net, other)


@CHECKS.on(1)
def it_has_the_hyperparameters_that_torch_has() -> None:
    net = shard_net(make_net(1))
    parameters = list(net.parameters())
    assert set(FlatAdamW(parameters).defaults) == set(torch.optim.AdamW(parameters).defaults)


@CHECKS.on(1)
def counts_of_steps_may_differ_within_a_unit() -> None:
    """In the state of a run with other units they do: each parameter continues from its own count."""
    nets = [shard_net(make_net(1)) for _ in range(2)]
    optimizers = [_flat_adamw(nets[0]), _torch_adamw(nets[1])]
    for net, optimizer in zip(nets, optimizers, strict=True):
        _train(net, optimizer, range(2))
        state = _copied(optimizer)
        for index, entries in state["state"].items():
            entries["step"] = torch.tensor(float(index % 3 + 1))
        optimizer.load_state_dict(state)
        _train(net, optimizer, range(2, 4))
    _assert_same(nets[0], nets[1])


def _edits(net: nn.Module) -> dict[str, Callable[[torch.optim.Optimizer], object]]:
    """What users do to an optimizer's state between steps."""
    first, second = [p for name, p in net.named_parameters() if name.startswith("blocks") and p.dim() == 2][::2][:2]

    def swap(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]

    def replace_moments(optimizer: torch.optim.Optimizer) -> None:
        for own in optimizer.state.values():
            own["exp_avg"] = torch.zeros_like(own["exp_avg"])

    def replace_state(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state = defaultdict(dict)

    return {
        "clear": lambda optimizer: optimizer.state.clear(),
        "replace the state": replace_state,
        "pop one": lambda optimizer: optimizer.state.pop(first),
        "step counts": lambda optimizer: [own.update(step=torch.tensor(0.0)) for own in optimizer.state.values()],
        "step counts in place": lambda optimizer: [own["step"].zero_() for own in optimizer.state.values()],
        "one step count in place": lambda optimizer: optimizer.state[first]["step"].add_(5),
        "moments": replace_moments,
        "moments in place": lambda optimizer: [own["exp_avg_sq"].mul_(2) for own in optimizer.state.values()],
        "swap": swap,
    }


@CHECKS.on(2)
def what_users_write_to_its_state_is_used() -> None:
    """As by torch's AdamW, and kept: state that is saved afterwards has it."""
    for name in _edits(shard_net(make_net(2))):
        nets = [shard_net(make_net(2)) for _ in range(2)]
        optimizers = [_flat_adamw(nets[0]), _torch_adamw(nets[1])]
        for net, optimizer in zip(nets, optimizers, strict=True):
            _train(net, optimizer, range(2))
            held = optimizer.state[net.entry.weight]
            _edits(net)[name](optimizer)
            _train(net, optimizer, range(2, 4))
            if "clear" not in name and "replace the state" not in name:
                held["step"] = torch.tensor(1.0)  # whoever has the dict goes on to see and to write the state
            _train(net, optimizer, range(4, 5))
        _assert_same(nets[0], nets[1], name)
        saved = [_copied(optimizer)["state"] for optimizer in optimizers]
        for index, entries in saved[1].items():
            assert {key: full(value).tolist() for key, value in entries.items()} == {
                key: full(saved[0][index][key]).tolist() for key in entries
            }, name


@CHECKS.on(1)
def state_that_it_cannot_use_and_other_parameters_of_groups_are_refused() -> None:
    def move(optimizer: FlatAdamW) -> None:
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())

    changes: dict[str, Callable[[FlatAdamW], object]] = {
        r"got also \['max_exp_avg_sq'\]": lambda o: o.state[o.param_groups[0]["params"][0]].update(max_exp_avg_sq=0),
        "must have the parameter's shape": lambda o: o.state[o.param_groups[0]["params"][0]].update(
            exp_avg=torch.ones(1)
        ),
        "got others in param_groups; build another": move,
        "got others in param_groups": lambda o: o.param_groups[0]["params"].pop(),
        "FlatAdamW needs the parameters": lambda o: o.param_groups.pop(),
        "needs maximize=False, got True": lambda o: o.param_groups[0].update(maximize=True),
        "needs differentiable=False, got True": lambda o: o.param_groups[2].update(differentiable=True),
    }
    for message, change in changes.items():
        net = shard_net(make_net(1))
        optimizer = _flat_adamw(net)
        _train(net, optimizer, range(1))
        change(optimizer)
        with pytest.raises((NotImplementedError, ValueError), match=message):
            optimizer.step()


@CHECKS.on(2)
def the_engines_checkpoints_go_both_ways() -> None:
    """FlatAdamW and torch's AdamW load each other's checkpoints, also under other strategies."""
    with shared_folder() as folder:
        for index, (first, second) in enumerate(((_flat_adamw, _torch_adamw), (_torch_adamw, _flat_adamw))):
            net = shard_net(make_net(2))
            optimizer = first(net)
            _train(net, optimizer, range(2))
            if index:  # as in a run with other units: step counts differ within one of these
                for at, parameter in enumerate(net.parameters()):
                    optimizer.state[parameter]["step"].fill_(at % 3 + 1)
            save_checkpoint(net, optimizer, f"{folder}/{index}")
            other = shard_net(make_net(2, seed=1), "optim")
            continued = second(other)
            _train(other, continued, range(1))
            load_checkpoint(other, continued, f"{folder}/{index}")
            assert _train(other, continued, range(2, 4)) == _train(net, optimizer, range(2, 4))


@CHECKS.on(2)
def torchs_own_distributed_checkpoints_hold_its_state() -> None:
    with shared_folder() as folder:
        net, other = shard_net(make_net(2)), shard_net(make_net(2, seed=1))
        optimizer, continued = _flat_adamw(net), _flat_adamw(other)
        _train(net, optimizer, range(2))
        model_state, state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
        model_state, state = get_state_dict(other, continued)
        loaded: dict[str, Any] = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(other, continued, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        assert _train(other, continued, range(2, 4)) == _train(net, optimizer, range(2, 4))
        _assert_same(net, other)


# ---- refusals -------------------------------------------------------------------------------------------------------


@CHECKS.on(1)
def what_it_cannot_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 1 others of shapes \[\[2\]\]"):
        FlatAdamW([nn.Parameter(torch.ones(2))])
    net = shard_net(make_net(1))
    with pytest.raises(ValueError, match=r"all trainable parameters of a unit, got .* without entry\.bias"):
        FlatAdamW([p for name, p in net.named_parameters() if name != "entry.bias"])
    mixed = shard_net(make_net(1, dtype=BF16))
    with pytest.raises(ValueError, match=r"needs bf16 main weights of a bf16 model, got torch\.float32 of torch\.bf"):
        FlatAdamW(mixed.parameters(), store_param_remainders=True)
    double = shard_net(make_net(1, dtype=torch.float64), policy=MixedPrecisionPolicy(main_params_dtype=None))
    with pytest.raises(ValueError, match="computes in fp32, got main weights"):
        FlatAdamW(double.parameters())
    with pytest.raises(ValueError, match="lr must not be negative, got -1"):
        FlatAdamW(net.parameters(), lr=-1)
    with pytest.raises(ValueError, match="betas must be"):
        FlatAdamW(net.parameters(), betas=(0.9, 1.0))
    optimizer = FlatAdamW(net.parameters())
    with pytest.raises(NotImplementedError, match="another param group"):
        optimizer.add_param_group({"params": []})
    for key in ("amsgrad", "maximize"):
        other = FlatAdamW(net.parameters())
        other.param_groups[0].update({key: True, "lr": 0.5})
        loss_of(net, my_piece(0)).backward()
        with pytest.raises(NotImplementedError, match=f"needs {key}=False, got True"):
            other.step()
    assert fully_shard_optimizer(optimizer) is optimizer


@CHECKS.on(2)
def a_step_before_the_last_microbatch_is_refused() -> None:
    net = shard_net(make_net(1), "optim")
    optimizer = FlatAdamW(net.parameters())
    with microbatch(net, is_first=True, is_last=False):
        loss_of(net, my_piece(0)).backward()
    with pytest.raises(RuntimeError, match="the last microbatch has not come"):
        optimizer.step()


@CHECKS.on(1)
def frozen_parameters_may_be_given() -> None:
    net = make_net(1)
    net.head.requires_grad_(False)
    shard_net(net)
    optimizer = FlatAdamW(net.parameters(), lr=0.1)
    weight = full(net.head.weight).clone()
    _train(net, optimizer, range(2))
    assert torch.equal(full(net.head.weight), weight) and net.head.weight not in optimizer.state
    assert net.entry.weight in optimizer.state


@CHECKS.on(2)
def cleared_gradients_take_no_memory_and_a_deleted_model_frees_its_own() -> None:
    net = shard_net(make_net(1))
    optimizer = FlatAdamW(net.parameters())
    loss_of(net, my_piece(0)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not local_of(p.grad).any() for p in net.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert not any(group.grads.main.storage.allocated for group in groups_of(net))
    group = weakref.ref(groups_of(net)[0])
    del net
    assert group() is None and optimizer.groups == []


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
