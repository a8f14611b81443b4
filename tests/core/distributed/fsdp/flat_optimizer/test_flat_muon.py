"""``FlatMuon`` is Muon on whole matrices bit for bit, whatever is sharded, clipped, split, delayed or left out."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp import (
    FlatMuon,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from tests.support.agreement import groups_of
from tests.support.hybrid import shard_hybrid
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    assert_is_cut,
    difference,
    full,
    local_of,
    loss_of,
    make_cut_net,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.plain_muon import QUINTIC, SIMPLE, PlainMuon
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)
BF16 = torch.bfloat16
LR, DECAY = 0.02, 0.1
_NETS = {2: (make_net, make_cut_net), 4: (make_cut_net,)}


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and "head" not in name


def _param_groups(net: nn.Module) -> list[dict[str, Any]]:
    """The head and vectors are AdamW's, as in language models."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if _is_matrix(name, p)], "use_muon": True},
        {"params": [p for name, p in named if not _is_matrix(name, p)], "lr": 0.01, "weight_decay": 0.05},
    ]


def _flat_muon(net: nn.Module, **options: Any) -> FlatMuon:
    return FlatMuon(_param_groups(net), lr=LR, weight_decay=DECAY, **options)


class _Reference:
    """The same net whole in this process, trained by ``PlainMuon`` and torch's AdamW on gradients that it is given."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        self.weights = {name: full(p).clone().float() for name, p in net.named_parameters()}
        matrices = [w for name, w in self.weights.items() if _is_matrix(name, w)]
        self.muon = PlainMuon(matrices, lr=LR, weight_decay=DECAY, **options)
        others = [w for name, w in self.weights.items() if not _is_matrix(name, w)]
        self.adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.05, foreach=True)

    def step(self, net: nn.Module, factor: torch.Tensor | None = None) -> None:
        grads = {name: None if p.grad is None else full(p.grad).float() for name, p in net.named_parameters()}
        if factor is not None:
            grads = {name: grad if grad is None else grad * factor for name, grad in grads.items()}
        self.muon.step([grad for name, grad in grads.items() if _is_matrix(name, self.weights[name])])
        for name, weight in self.weights.items():
            weight.grad = None if _is_matrix(name, weight) else grads[name]
        self.adamw.step()

    def assert_same(self, net: nn.Module, what: object = "", *, tolerance: float = 0.0) -> None:
        for name, parameter in net.named_parameters():
            assert difference(full(parameter), self.weights[name]) <= tolerance, (what, name)


def _train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, my_piece(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@CHECKS.on(2, 4)
def it_is_muon_on_whole_matrices() -> None:
    """Each strategy, with other settings for each."""
    settings: list[dict[str, Any]] = [
        {},
        {"nesterov": True, "momentum": 0.9, "scale_mode": "shape_scaling"},
        {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2},
        {"nesterov": True, "coefficient_type": "simple"},
    ]
    for strategy, options in zip(STRATEGY_NAMES, settings, strict=True):
        for make in _NETS[dist.get_world_size()]:
            net = shard_net(make(), strategy)
            if make is make_cut_net and strategy == "optim_grads_params" and dist.get_world_size() > 1:
                assert_is_cut(net)
            optimizer = _flat_muon(net, **options)
            known = {key: value for key, value in options.items() if key != "coefficient_type"}
            reference = _Reference(net, coefficients=SIMPLE if "coefficient_type" in options else QUINTIC, **known)
            for step in range(2):
                optimizer.zero_grad()
                loss_of(net, my_piece(step)).backward()
                reference.step(net)
                optimizer.step()
                reference.assert_same(net, (strategy, make.__name__, step))


@CHECKS.on(4)
def it_is_so_under_hybrid_sharding() -> None:
    for strategy, outer in (("optim_grads_params", "no_shard"), ("optim_grads_params", "optim"), ("optim", "optim")):
        net = shard_hybrid(make_cut_net(), strategy, outer)
        optimizer, reference = _flat_muon(net), _Reference(net)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, my_piece(step)).backward()
            reference.step(net)
            optimizer.step()
            reference.assert_same(net, (strategy, outer))


@CHECKS.on(2)
def many_rounds_are_as_one() -> None:
    """Rounds of one matrix for each owner, of matrices in several groups, that are needed in another order."""
    nets = [shard_net(make_net(3)) for _ in range(2)]
    for net, options in zip(nets, ({}, {"round_numel": 1}), strict=True):
        optimizer = _flat_muon(net, nesterov=True, **options)
        net.order = [2, 0, 1]
        _train(net, optimizer, range(3))
        assert optimizer._orthogonalizer is not None
        assert optimizer._orthogonalizer.num_rounds == (4 if options else 1)  # 7 matrices on 2 owners
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(other))


@CHECKS.on(2)
def blocks_of_rows_are_matrices_of_their_own() -> None:
    """Queries, keys and values of each group of heads follow each other; each kind is orthogonalized by itself."""
    for scale_mode in ("spectral", "unit_rms_norm"):
        net = shard_net(make_cut_net())
        net.order = [0, 1]

        def blocks(parameter: torch.Tensor) -> tuple[int, ...] | None:
            # 37 rows are one group of 20 + 9 + 8; the entry's are left whole.
            return (20, 9, 8) if parameter.shape == (37, 37) else None

        optimizer = _flat_muon(net, row_blocks_of=blocks, scale_mode=scale_mode)
        of_matrix = [blocks(p) for name, p in net.named_parameters() if _is_matrix(name, p)]
        assert of_matrix.count(None) == 1
        reference = _Reference(net, row_blocks=of_matrix, scale_mode=scale_mode)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, my_piece(step)).backward()
            reference.step(net)
            optimizer.step()
            reference.assert_same(net, scale_mode)


@CHECKS.on(2)
def gradients_are_clipped_and_products_are_as_precise_as_asked() -> None:
    """Gradients are clipped as they are read, and bf16 main weights updated in fp32."""
    net = shard_net(make_cut_net())
    optimizer = _flat_muon(net, fp32_matmul_prec="highest")
    reference, factor = _Reference(net, dtype=torch.float32), torch.tensor([0.25])
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, my_piece(step)).backward()
        reference.step(net, factor)
        optimizer.step(grad_factor=factor)
        # Products in fp32 of a batch and of one matrix are summed in another order.
        reference.assert_same(net, tolerance=1e-6)
    net = shard_net(make_cut_net(dtype=BF16), policy=MixedPrecisionPolicy(main_params_dtype=None))
    optimizer, reference = _flat_muon(net, extra_scale_factor=3.0), _Reference(net, extra_scale_factor=3.0)
    loss_of(net, my_piece(0)).backward()
    reference.step(net)
    optimizer.step()
    for name, parameter in net.named_parameters():
        assert torch.equal(full(parameter), reference.weights[name].bfloat16()), name


@CHECKS.on(2)
def units_and_parameters_without_gradients_are_left_alone() -> None:
    net = shard_net(make_net(3))
    optimizer, reference = _flat_muon(net), _Reference(net)
    for step, order in enumerate(([0, 1], [0, 1, 2], [2, 0], [0, 1, 2])):
        net.order = order
        optimizer.zero_grad()
        loss_of(net, my_piece(step)).backward()
        if step == 1:
            net.blocks[1].up.weight.grad = None
            net.blocks[2].norm.bias.grad = None
        reference.step(net)
        optimizer.step()
        reference.assert_same(net, step)


@CHECKS.on(2)
def microbatches_and_updates_beside_the_forward_change_nothing() -> None:
    for strategy in STRATEGY_NAMES:
        results = []
        for options in ({}, {"overlaps_forward": True}):
            net = shard_net(make_net(2, dtype=BF16), strategy)
            optimizer = _flat_muon(net, **options)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                for index in range(2):
                    with microbatch(net, is_first=index == 0, is_last=index == 1):
                        loss = loss_of(net, my_piece(index))
                        loss.backward()
                        losses.append(loss.item())
                optimizer.step()
            with torch.no_grad():
                losses.append(loss_of(net, my_piece(7)).item())
            results.append(losses)
        assert results[0] == results[1], strategy
        assert results[0][0] > results[0][4]


@CHECKS.on(2)
def models_with_streams_of_their_own_are_updated_before_the_forward() -> None:
    """A round holds matrices of several; none waits for what another's stream has computed."""
    overlapping: list[bool] = []
    update = FsdpContext.update_weights

    def update_and_note(*arguments: Any, overlaps: bool) -> None:
        overlapping.append(overlaps)
        update(*arguments)

    for count in (1, 2):
        nets = nn.ModuleList(shard_net(make_net(1, seed=at)) for at in range(count))
        optimizer = _flat_muon(nets, overlaps_forward=True)
        for net in nets:
            loss_of(net, my_piece(0)).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FsdpContext, "update_weights", update_and_note)
            optimizer.step()
    assert overlapping == [True, False, False]


@CHECKS.on(2)
def state_is_momentum_alone_and_goes_through_checkpoints() -> None:
    """4 bytes for each element of a matrix, none for padding; another strategy continues to the bit."""
    with shared_folder() as folder:
        net = shard_net(make_cut_net())
        optimizer = _flat_muon(net)
        _train(net, optimizer, range(2))
        for name, parameter in net.named_parameters():
            keys = {"momentum_buffer"} if _is_matrix(name, parameter) else {"step", "exp_avg", "exp_avg_sq"}
            assert set(optimizer.state[parameter]) == keys, name
        held = sum(local_of(p).numel() * (4 if _is_matrix(n, p) else 8) for n, p in net.named_parameters())
        block_only = [g for g in groups_of(net) if not any("head" in g.name_of(i) for i in range(len(g.sharded)))]
        assert 0 < sum(group.state_nbytes.on_device for group in block_only) < held
        save_checkpoint(net, optimizer, folder)
        others = [shard_net(make_cut_net(seed=1), strategy) for strategy in ("optim", "no_shard")]
        continued = [_flat_muon(other) for other in others]
        _train(others[0], continued[0], range(1))
        expected = None
        for other, again in zip(others, continued, strict=True):
            load_checkpoint(other, again, folder)
            losses = _train(other, again, range(2, 4))
            expected = _train(net, optimizer, range(2, 4)) if expected is None else expected
            assert losses == expected
        copied = shard_net(make_cut_net(seed=1))
        again = _flat_muon(copied)
        copied.load_state_dict(net.state_dict())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert _train(copied, again, range(4, 6)) == _train(net, optimizer, range(4, 6))


class _Operators(TorchDispatchMode):
    """Counts operators; collectives are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@CHECKS.on(2)
def a_unit_costs_the_host_a_few_operators() -> None:
    """Equal matrices are multiplied in one call, however many there are; what is left is work on flat buffers."""
    counts = []
    for num_blocks in (4, 12):
        net = shard_net(make_net(num_blocks))
        optimizer = _flat_muon(net)
        _train(net, optimizer, range(2))
        loss_of(net, my_piece(2)).backward()
        with _Operators() as operators:
            optimizer.step()
        counts.append(operators.number)
    assert counts[1] - counts[0] <= 8 * 50, counts


@CHECKS.on(2)
def a_deleted_model_and_its_optimizer_free_their_memory() -> None:
    """At once: nothing waits for the garbage collector."""
    net = shard_net(make_net(1))
    optimizer = _flat_muon(net)
    _train(net, optimizer, range(1))
    optimizer.zero_grad()
    group = weakref.ref(groups_of(net)[0])
    momentum = weakref.ref(optimizer.state[net.entry.weight]["momentum_buffer"]._local_tensor)
    gc.collect()
    gc.disable()
    try:
        del net
        assert group() is None and optimizer.groups == []
        del optimizer
        assert momentum() is None
    finally:
        gc.enable()


# ---- torch's Muon ---------------------------------------------------------------------------------------------------


def _torch_muon(net: nn.Module, **options: Any) -> torch.optim.Muon:
    return torch.optim.Muon([p for name, p in net.named_parameters() if _is_matrix(name, p)], lr=LR, **options)


@CHECKS.on(2)
def torchs_muon_steps_on_sharded_matrices() -> None:
    """Bit for bit as on whole ones, in each strategy, beside an AdamW of its own."""
    settings: list[dict[str, Any]] = [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.2},
        {"nesterov": False, "momentum": 0.8},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
    ]
    for strategy, options in zip(STRATEGY_NAMES, settings, strict=True):
        net, whole = shard_net(make_cut_net(), strategy), make_cut_net()
        named = dict(net.named_parameters())
        others = [p for name, p in named.items() if not _is_matrix(name, p)]
        muon, adamw = fully_shard_optimizer(_torch_muon(net, **options)), torch.optim.AdamW(others, lr=0.01)
        fully_shard_optimizer(adamw)
        assert isinstance(muon, torch.optim.Muon) and fully_shard_optimizer(muon) is muon
        reference = _torch_muon(whole, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(muon, 1, gamma=0.5)
        for step in range(3):
            loss_of(net, my_piece(step)).backward()
            for name, parameter in whole.named_parameters():
                parameter.grad = full(named[name].grad).clone()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
            reference.step()
            scheduler.step()
            reference.param_groups[0]["lr"] *= 0.5
            for name, parameter in whole.named_parameters():
                if _is_matrix(name, parameter):
                    assert torch.equal(full(named[name]), parameter), (strategy, name, step)
        momentum = muon.state[named["entry.weight"]]["momentum_buffer"]
        assert torch.equal(full(momentum), reference.state[whole.entry.weight]["momentum_buffer"])


@CHECKS.on(2)
def torchs_muon_knows_idle_units_bf16_and_checkpoints() -> None:
    with shared_folder() as folder:
        net = shard_net(make_net(3, dtype=BF16), policy=MixedPrecisionPolicy(main_params_dtype=None))
        whole = make_net(3, dtype=BF16)
        muon, reference = fully_shard_optimizer(_torch_muon(net)), _torch_muon(whole)
        for step, order in enumerate(([0, 1], [1, 0, 2], [2])):
            net.order = order
            loss_of(net, my_piece(step)).backward()
            for parameter, mine in zip(whole.parameters(), net.parameters(), strict=True):
                parameter.grad = None if mine.grad is None else full(mine.grad).clone()
            for optimizer in (muon, reference):
                optimizer.step()
            for (name, parameter), mine in zip(whole.named_parameters(), net.parameters(), strict=True):
                # On the CPU, additions of transposed tensors to bf16 ones are rounded otherwise: those of tall matrices.
                tolerance = (
                    5e-3 * (step + 1) if parameter.dim() == 2 and parameter.shape[0] > parameter.shape[1] else 0.0
                )
                error = difference(full(mine), parameter.detach())
                assert not _is_matrix(name, parameter) or error <= tolerance, (name, step)
            muon.zero_grad()
        net.order = [0, 1, 2]
        save_checkpoint(net, muon, folder)
        policy = MixedPrecisionPolicy(main_params_dtype=None)
        other = shard_net(make_net(3, seed=1, dtype=BF16), "optim", policy=policy)
        continued = fully_shard_optimizer(_torch_muon(other))
        load_checkpoint(other, continued, folder)
        assert _train(other, continued, range(2)) == _train(net, muon, range(2))


# ---- refusals -------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def what_it_cannot_train_is_refused() -> None:
    net = shard_net(make_net(1))
    with pytest.raises(ValueError, match=r"must be given matrices, got entry\.bias of shape \[7\]"):
        FlatMuon([{"params": net.parameters(), "use_muon": True}])
    for setting, match in (
        ({"scale_mode": "none"}, "scale_mode must be one of spectral"),
        ({"tp_mode": "local"}, "tp_mode must be one of blockwise"),
        ({"fp32_matmul_prec": "low"}, "fp32_matmul_prec must be one of medium"),
        ({"coefficient_type": "mine"}, "coefficients must be one of simple"),
        ({"num_ns_steps": 0}, "must take 1 step at least"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=match):
            _flat_muon(net, **setting)
    with pytest.raises(ValueError, match=r"blocks of \[2\] rows must divide the 7 rows of entry\.weight"):
        _flat_muon(net, row_blocks_of=lambda parameter: (2,))


@CHECKS.on(2)
def what_users_write_to_its_state_and_groups_is_used_or_refused() -> None:
    """A cleared momentum is that of the first step; a group does not change its optimizer."""
    first, second = (shard_net(make_net(2)) for _ in range(2))
    optimizers = [_flat_muon(net, nesterov=False) for net in (first, second)]
    for net, optimizer in zip((first, second), optimizers, strict=True):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, my_piece(step)).backward()
            optimizer.step()
    optimizers[0].state.clear()
    for own in optimizers[1].state.values():
        for value in own.values():
            value.zero_()
    for net, optimizer in zip((first, second), optimizers, strict=True):
        optimizer.zero_grad()
        loss_of(net, my_piece(2)).backward()
        optimizer.step()
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(other))
    optimizers[0].param_groups[0]["use_muon"] = False
    with pytest.raises(NotImplementedError, match=r"use_muon is as when it was built, \[True, False\], got \[False"):
        optimizers[0].step()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_flat_muon(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
