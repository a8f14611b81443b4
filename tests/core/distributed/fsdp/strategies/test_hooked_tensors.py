"""Parameters with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``: the same numbers as whole, and as under FSDP2."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import warnings
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport
from tests.support.float8_weights import Fp8Net, fp8_batch, fp8_loss, make_fp8_net
from tests.support.fp8_training import NUM_STEPS, scaled_groups, shard, train_own_batches, train_pair
from tests.support.hooked_tensors import (
    Float8OfPolicy,
    Float8Parameter,
    HalvedParameter,
    MultipliedWeight,
    Wrapped,
    hook,
    hooked_nets,
    precompute,
)
from tests.support.models import STRATEGY_NAMES, context_of, full, local_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def _precompute(net: Fp8Net) -> None:
    precompute(net)


@CHECKS.on(2)
def strategies_equal_whole_weights_to_the_last_bit() -> None:
    """With scales that hooks reduce, and with those that somebody has set on the shards."""
    for strategy in STRATEGY_NAMES:
        train_pair(None, strategy, nets=hooked_nets)
        train_pair(None, strategy, nets=hooked_nets, num_microbatches=3, disturb=_precompute)
    train_pair(None, "optim_grads_params", nets=lambda: hooked_nets(Float8OfPolicy), transport="peer_copy")


@CHECKS.on(4)
def hybrid_sharding_equals_whole_weights_to_the_last_bit() -> None:
    for outer in ("no_shard", "optim"):
        train_pair(None, "optim_grads_params", outer, nets=hooked_nets)


@CHECKS.on(4)
def ranks_without_rows_take_part_in_reductions() -> None:
    """A matrix of three rows on four ranks: the maximum of no row is an error of torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        linear = nn.Linear(16, 3, bias=False)
    values = linear.weight.detach().clone()
    linear.weight = nn.Parameter(Float8Parameter(values.clone()))
    fully_shard(linear)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    scale = 448.0 / values.abs().max()
    expected = (values * scale).to(torch.float8_e4m3fn).float() * (1.0 / scale)
    assert torch.equal(linear(x), x @ expected.t())
    held = [0] * 4
    dist.all_gather_object(held, local_of(linear.weight).shape[0])
    assert 0 in held and sum(held) == 3


@CHECKS.on(2)
def numbers_are_those_of_fsdp2() -> None:
    """With fp32 parameters that compute in bf16, resharded after forward or not."""
    for reshards in (True, False):
        trained = []
        for shard_one in (fsdp2_fully_shard, fully_shard):
            net = make_fp8_net(None).float()
            hook(net, Float8OfPolicy)
            policy = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*net.blocks, net):
                shard_one(module, mp_policy=policy, reshard_after_forward=reshards)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
            if shard_one is fully_shard:
                fully_shard_optimizer(optimizer)
                assert all(group.weights.main.local.dtype == torch.float32 for group in scaled_groups(net))
            losses = train_own_batches(net, optimizer, range(4))
            trained.append((losses, [full(parameter) for parameter in net.parameters()]))
        for theirs, ours in zip(*trained, strict=True):
            assert all(map(torch.equal, theirs, ours)), (reshards, theirs, ours)


@CHECKS.on(2)
def weights_travel_as_bytes_and_originals_are_freed() -> None:
    moved: list[tuple[torch.dtype, int]] = []
    all_gather = ProcessGroupTransport.all_gather

    def watched(self: Any, whole: torch.Tensor, part: torch.Tensor) -> None:
        moved.append((whole.dtype, whole.numel()))
        all_gather(self, whole, part)

    net = hooked_nets()[0]
    block: Any = net.blocks[0]
    block.up.weight.note = "mine"
    memory = weakref.ref(block.up.weight._tensor.untyped_storage())
    with patch.object(ProcessGroupTransport, "all_gather", watched):
        shard(net, "optim_grads_params")
        gc.collect()
        assert memory() is None, "the values from before sharding are kept"
        train_own_batches(net, FlatAdamW(net.parameters(), lr=0.01), range(3))
    numels = {group.layout.total_numel for group in scaled_groups(net)}
    assert len(numels) == 1 and {dtype for dtype, numel in moved if numel in numels} == {torch.uint8}
    assert block.up.weight.note == "mine" and isinstance(block.up.weight, DTensor)
    assert isinstance(block.up.weight._local_tensor, Float8Parameter)
    block.unshard()
    whole: Any = block.up.weight
    assert isinstance(whole, MultipliedWeight) and getattr(whole, "note", "") == "mine"
    block.reshard()


@CHECKS.on(2)
def a_resumed_run_goes_on_to_the_last_bit() -> None:
    """Under another strategy, and in a model without hooks: checkpoints and state dicts hold plain tensors."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    net = shard(hooked_nets()[0], "optim_grads_params")
    optimizer = FlatAdamW(net.parameters(), lr=0.02)
    train_own_batches(net, optimizer, range(2))
    save_checkpoint(net, optimizer, f"{folders[0]}/checkpoint")
    state = net.state_dict()
    assert all(type(value._local_tensor) is torch.Tensor for value in state.values())
    state = {name: value.clone() for name, value in state.items()}
    expected = train_own_batches(net, optimizer, range(2, 4))
    plain = shard(make_fp8_net(None), "optim")
    load_checkpoint(plain, None, f"{folders[0]}/checkpoint")
    for name, parameter in plain.named_parameters():
        assert torch.equal(full(parameter), full(state[name]))
    for strategy in ("optim", "optim_grads_params"):
        again = shard(hooked_nets()[0], strategy)
        other = FlatAdamW(again.parameters(), lr=0.02)
        train_own_batches(again, other, range(7, 8))
        load_checkpoint(again, other, f"{folders[0]}/checkpoint")
        losses = train_own_batches(again, other, range(2, 4))
        assert all(map(torch.equal, losses, expected)), (strategy, losses, expected)
    loaded = shard(hooked_nets()[0], "optim_grads_params")
    loaded.load_state_dict(state)
    loss = fp8_loss(loaded, fp8_batch(2, 2)[dist.get_rank()])
    assert torch.equal(loss, expected[0])


@CHECKS.on(2)
def hooks_may_unpack_to_memory_of_their_own() -> None:
    """It is freed when the unit is resharded; without hooks the same net has halved weights."""
    for strategy in ("optim", "optim_grads_params"):
        nets = []
        for kind in (HalvedParameter, None):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                net = Fp8Net(2)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(parameter.bfloat16())
            if kind is None:
                for block in net.blocks:
                    block.up.weight.data /= 2  # type: ignore[operator]
                    block.down.weight.data /= 2  # type: ignore[operator]
            else:
                hook(net, kind)
            nets.append(shard(net, strategy))
        x = torch.randn(4, 144, generator=torch.Generator().manual_seed(5))
        for _ in range(3):
            results = [net(x).square().sum() for net in nets]
            assert torch.equal(*results)
            for result in results:
                result.backward()
        for group in scaled_groups(nets[0]):
            gathers = group.weights.needs_gather
            assert all((weight.untyped_storage().nbytes() == 0) is gathers for weight in group.unsharded)


@CHECKS.on(2)
def meta_parameters_get_the_values_of_reset_parameters() -> None:
    """Tied ones stay tied; the values are those of linears without hooks."""

    def make(kind: Any) -> Any:
        with torch.device("meta"):
            net: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        if kind is not None:
            for linear in net[:2]:
                linear.weight = nn.Parameter(kind(linear.weight.detach()))
        net[2].weight = net[0].weight
        return net

    values = []
    for kind in (Float8Parameter, None):
        torch.manual_seed(5)
        net = make(kind)
        fully_shard(net[1])
        fully_shard(net)
        values.append([full(parameter) for parameter in net.parameters()])
        assert net[2].weight is net[0].weight
        if kind is not None:
            assert isinstance(net[0].weight._local_tensor, kind)
    assert all(map(torch.equal, *values))


@CHECKS.on(2)
def frozen_weights_can_be_trained_later() -> None:
    made, whole = hooked_nets()
    assert whole is not None
    for parameter in made.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    nets = [shard(made, "optim_grads_params"), shard(hooked_nets()[0], "optim_grads_params")]
    first = [fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()]) for net in nets]
    assert torch.equal(*first)  # bf16 values, of main weights in bf16 or fp32
    first[0].backward()
    for parameter in nets[0].parameters():
        parameter.grad = None
        parameter.requires_grad_(True)
    results = []
    for net in nets:
        policy = torch.optim.SGD(net.parameters(), lr=0.5)
        results.append(train_own_batches(net, fully_shard_optimizer(policy), range(NUM_STEPS)))
        assert all(isinstance(g.sharded[0]._local_tensor, Float8Parameter) for g in scaled_groups(net))
        assert all(group.weights.main.local.dtype == torch.float32 for group in scaled_groups(net))
    assert all(map(torch.equal, *results)), results


@CHECKS.on(2)
def a_graph_does_not_survive_a_write() -> None:
    net = shard(hooked_nets()[0], "optim_grads_params")
    loss = fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2.0)
    fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|were written"):
        loss.backward()


class _TwoOutputs(Float8Parameter):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._tensor, self._tensor[:, :1]), None


class _Packed(Float8Parameter):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._tensor[:, ::2],), None


class _Pre(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._tensor,), None


class _TwoTensors(Float8Parameter):
    def __tensor_flatten__(self) -> Any:
        return ["_tensor", "_tensor"], None


class _NoWrapper(Float8Parameter):
    __tensor_flatten__ = property()


class _OtherShape(Float8Parameter):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0].t(), outputs


@CHECKS.on(2)
def what_cannot_be_served_is_refused_by_name() -> None:
    for kind, words in (
        (_TwoOutputs, "must return one tensor with an element for each of the shard's"),
        (_Packed, "must return one tensor with an element for each of the shard's"),
        (_Pre, "must have both fsdp_pre_all_gather and fsdp_post_all_gather"),
        (_TwoTensors, "must hold one tensor of its own shape and dtype"),
        (Wrapped, "must be a plain tensor, or of a class with fsdp_pre_all_gather"),
        (_OtherShape, "must return a tensor of shape"),
    ):
        linear = nn.Linear(6, 8)
        linear.weight = nn.Parameter(kind(linear.weight.detach()))
        with pytest.raises(NotImplementedError, match=words) as error:
            fully_shard(linear)
        assert "weight" in str(error.value) and kind.__name__ in str(error.value)
    linear = nn.Linear(6, 8)
    linear.weight = nn.Parameter(Wrapped(linear.weight.detach()), requires_grad=False)
    expected = linear(torch.ones(2, 6))
    fully_shard(linear, ignored_params={linear.weight})
    assert torch.equal(linear(torch.ones(2, 6)), expected)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("precomputes", [False, True])
def test_torchao_trains_as_under_fsdp2(precomputes: bool) -> None:
    from tests.support.launch import run_ranks

    run_ranks(2, _train_torchao, precomputes)


def _train_torchao(precomputes: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own escapes and deprecations, when it is compiled first
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

    for param_dtype in (None, torch.bfloat16):
        trained = []
        for shard_one in (fsdp2_fully_shard, fully_shard):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            convert_to_float8_training(net, config=config)
            policy: Any = Fsdp2Policy(param_dtype=param_dtype, reduce_dtype=torch.float32)
            for module in (net[0], net[2], net):
                shard_one(module, mp_policy=policy)
            optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
            if shard_one is fully_shard:
                fully_shard_optimizer(optimizer)
                rest = [group.weights.model.local.dtype for group in context_of(net).groups]
                assert rest.count(torch.uint8) == 2, rest
            losses = []
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                loss = net(torch.randn(16, 32, generator=generator)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if precomputes:
                    precompute_float8_dynamic_scale_for_fsdp(net)
                losses.append(loss.detach())
            trained.append((losses, [full(parameter) for parameter in net.parameters()]))
        for theirs, ours in zip(*trained, strict=True):
            assert all(map(torch.equal, theirs, ours)), (precomputes, param_dtype)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
