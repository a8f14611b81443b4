"""Frozen weights rest in bytes and scales alone: what is read, written, saved and trained later equals whole weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from megatron.core.distributed.fsdp import (
    Fp8Codec,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.codec import float8
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeight, FrozenWeights, RestingBytes
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from tests.support.float8_weights import Fp8Net, WholeNet, fp8_batch, fp8_loss, make_codec, make_fp8_net
from tests.support.fp8_training import LEARNING_RATE, assert_same_bytes, assert_same_weights, scaled_groups, shard
from tests.support.models import STRATEGY_NAMES, context_of, full
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
RECIPES = ("delayed", "tensorwise", "blockwise")


def make_frozen(codec: Fp8Codec | None, strategy: str, outer: str | None = None) -> Fp8Net:
    """A sharded net whose matrices are frozen, as under LoRA; the rest is trained."""
    net = make_fp8_net(codec)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not _is_scaled(name))
    return shard(net, strategy, outer, mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.float32))


def _is_scaled(name: str) -> bool:
    return name.endswith(("up.weight", "down.weight"))


def _dequantized(whole: WholeNet, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The values that the bytes stand for, of scaled weights; main weights of the others."""
    return {
        name: float8.read_bytes(whole.data[name], whole.net.get_parameter(name)._inverse, dtype)  # type: ignore[attr-defined]
        if _is_scaled(name)
        else main
        for name, main in whole.main.items()
    }


def _my_loss(net: Fp8Net, step: int) -> torch.Tensor:
    return fp8_loss(net, fp8_batch(step, dist.get_world_size())[dist.get_rank()])


def _assert_no_values(net: Fp8Net) -> None:
    for group in scaled_groups(net):
        assert isinstance(group.weights, FrozenWeights)
        assert not group.weights.main.has_values, "a main weight is there"


@contextmanager
def _no_values() -> Iterator[None]:
    """Within it nobody computes the values of a whole group."""

    def refuse(self: RestingBytes, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("the values of a group were made")

    with patch.object(RestingBytes, "read_all", refuse):
        yield


def _train_and_unfreeze(recipe: Any, strategy: str, outer: str | None = None) -> None:
    world, rank, codec = dist.get_world_size(), dist.get_rank(), make_codec(recipe)
    net, whole = make_frozen(codec, strategy, outer), WholeNet(codec)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.SGD(trained, lr=LEARNING_RATE))
    for step in range(5):
        whole.write()
        if step == 2:
            for parameter in net.parameters():
                parameter.requires_grad_(True)
            optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
            whole.main = _dequantized(whole, torch.float32)
            whole.write()
        flat = fp8_batch(step, world)
        of_ranks = [whole.gradients(flat[other]) for other in range(world)]
        loss = fp8_loss(net, flat[rank])
        loss.backward()
        assert_same_bytes(net, whole)
        assert torch.equal(loss, of_ranks[rank][0]), (strategy, recipe, step)
        for index, name in enumerate(whole.main):
            if not _is_scaled(name) or step >= 2:
                parts = [gradients[index].float() for _, gradients in of_ranks]
                total = parts[0] + parts[1] if world == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3])
                whole.main[name] = whole.main[name] - LEARNING_RATE * (total / world)
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            _assert_no_values(net)
            with _no_values():
                assert_same_weights(net, _dequantized(whole, torch.bfloat16))
        else:
            assert_same_weights(net, whole.main)
    assert {type(group.weights) for group in scaled_groups(net)} == {ScaledWeights}


@CHECKS.on(2)
def frozen_weights_are_multiplied_as_bytes_and_can_be_trained_later() -> None:
    """From the values of the bytes; at rest they read as these values, in their own dtype."""
    for strategy in STRATEGY_NAMES:
        for recipe in RECIPES:
            _train_and_unfreeze(recipe, strategy)


@CHECKS.on(4)
def hybrid_sharding_does_the_same() -> None:
    for recipe in RECIPES:
        _train_and_unfreeze(recipe, "optim_grads_params", "optim")


@CHECKS.on(2)
def one_byte_rests_for_each_parameter() -> None:
    """Also in the report; nothing measures or encodes them from step to step."""
    codec = make_codec("tensorwise")
    nets = {"frozen": make_frozen(codec, "optim_grads_params"), "plain": make_frozen(None, "optim_grads_params")}
    numel = sum(group.layout.total_numel for group in scaled_groups(nets["frozen"])) // dist.get_world_size()
    _assert_no_values(nets["frozen"])
    reports = {name: context_of(net).describe() for name, net in nets.items()}
    persistent = {name: report.persistent for name, report in reports.items()}
    rounding = sum(group.layout.total_numel - group.layout.used_numel for group in context_of(nets["plain"]).groups)
    assert abs(persistent["plain"] - persistent["frozen"] - numel) <= 4 * rounding, (persistent, numel)
    with patch.object(Fp8Codec, "write", side_effect=AssertionError), _no_values():
        for step in range(3):
            _my_loss(nets["frozen"], step).backward()
    _assert_no_values(nets["frozen"])


def _folder() -> str:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return folders[0]


@CHECKS.on(2)
def checkpoints_hold_values_and_give_the_same_bytes_again() -> None:
    """Under another strategy too; a run in bf16 loads the values, and what it saves is encoded as at the start."""
    for recipe in RECIPES:
        path, codec = _folder(), make_codec(recipe)
        net = make_frozen(codec, "optim_grads_params")
        _my_loss(net, 0)
        loss = _my_loss(net, 1)
        with _no_values():
            save_checkpoint(net, None, f"{path}/fp8")
        whole = WholeNet(codec)
        whole.write()
        plain = shard(make_fp8_net(None), "optim")
        load_checkpoint(plain, None, f"{path}/fp8")
        assert_same_weights(plain, _dequantized(whole, torch.bfloat16))
        for strategy in ("no_shard", "optim_grads_params"):
            again = make_frozen(codec, strategy)
            with torch.no_grad():
                for parameter in again.parameters():
                    parameter.mul_(3.0)
            _my_loss(again, 7)
            load_checkpoint(again, None, f"{path}/fp8")
            assert torch.equal(_my_loss(again, 1), loss), (recipe, strategy)
            assert_same_bytes(again, whole)
            _assert_no_values(again)
            for ours, theirs in zip(scaled_groups(again), scaled_groups(net), strict=True):
                assert all(map(torch.equal, ours.weights._scale, theirs.weights._scale)), (recipe, strategy)
        trained = shard(make_fp8_net(codec), "optim")
        load_checkpoint(trained, None, f"{path}/fp8")
        _my_loss(trained, 1).backward()
        save_checkpoint(shard(make_fp8_net(None), "optim"), None, f"{path}/bf16")
        from_plain = make_frozen(codec, "optim_grads_params")
        with torch.no_grad():
            for parameter in from_plain.parameters():
                parameter.mul_(100.0)
        load_checkpoint(from_plain, None, f"{path}/bf16")
        assert torch.equal(_my_loss(from_plain, 1), loss)
        assert_same_bytes(from_plain, whole)


@contextmanager
def _encoded() -> Iterator[list[int]]:
    """The weights of which pieces are encoded within it."""
    encoded: list[int] = []
    write = Fp8Codec.write

    def counted(self: Any, target: Any, weights: Any, scale: Any, piece: Any, **nominal: Any) -> None:
        encoded.append(piece.weight)
        write(self, target, weights, scale, piece, **nominal)

    with patch.object(Fp8Codec, "write", counted):
        yield encoded


def _scales(net: Fp8Net) -> list[torch.Tensor]:
    return [scale.clone() for group in scaled_groups(net) for scale in group.weights._scale]


@CHECKS.on(2)
def weights_that_are_merged_or_loaded_are_encoded_anew() -> None:
    """Each with its own scale, and no other weight of its group with it."""
    for recipe in RECIPES:
        codec = make_codec(recipe)
        net, whole = make_fp8_net(codec), WholeNet(codec)
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        fully_shard(net)
        whole.write()
        _my_loss(net, 0)
        before = _scales(net)
        name = "blocks.0.up.weight"
        weight: Any = net.get_parameter(name)
        assert isinstance(weight._local_tensor, FrozenWeight)
        delta = torch.full(weight.shape, 0.25, dtype=torch.bfloat16)
        with torch.no_grad():
            weight.add_(distribute_tensor(delta, weight.device_mesh, weight.placements))
        whole.main = _dequantized(whole, torch.bfloat16)
        whole.main[name] = whole.main[name] + delta
        assert torch.equal(full(weight), whole.main[name])
        with _encoded() as encoded:
            loss = _my_loss(net, 0)
        assert len(encoded) <= 1, "others than the weight that was written were encoded"
        after = _scales(net)
        assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == 1, recipe
        _assert_no_values(net)
        fresh = WholeNet(codec)
        fresh.main = {key: main.float() for key, main in whole.main.items()}
        fresh.write()
        for group in scaled_groups(net):
            for index, parameter in enumerate(group.sharded):
                if group.name_of(index) == name:
                    expected = _dequantized(fresh, torch.bfloat16)[name]
                    assert torch.equal(parameter._local_tensor.clone(), local_rows(parameter, expected))
        # Loading the whole model gives what sharding it would give.
        other = make_fp8_net(None)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(64.0)
        net.load_state_dict(other.state_dict())
        loaded = _my_loss(net, 0)
        reference = WholeNet(codec)
        reference.main = {key: parameter.detach().float() for key, parameter in other.named_parameters()}
        reference.write()
        assert torch.equal(loaded, fp8_loss(reference.net, fp8_batch(0, 2)[dist.get_rank()]))
        assert not torch.equal(loaded, loss)


@CHECKS.on(2)
def reads_change_nothing_and_writes_to_views_are_refused() -> None:
    net = make_frozen(make_codec("tensorwise"), "optim_grads_params")
    weight: Any = net.get_parameter("blocks.1.down.weight")
    loss, local = _my_loss(net, 0), weight.to_local()
    with _no_values(), patch.object(Fp8Codec, "write", side_effect=AssertionError):
        assert weight.dtype == local.dtype == torch.bfloat16 and not weight.requires_grad
        assert torch.equal(local[1:3].t().contiguous(), local.clone()[1:3].t())
        assert torch.equal(torch.cat([part.clone() for part in local.split(2)]), local.clone())
        assert float(weight.float().square().sum().full_tensor()) > 0.0
        if local.shape[0]:
            assert local[0].abs().max() > 0.0  # on one rank alone
        assert torch.equal(_my_loss(net, 0), loss)
        for write in (
            lambda: local[:1].zero_(),
            lambda: local.view(-1).add_(1.0),
            lambda: local.t()[0].copy_(local[:, 0]),
        ):
            with pytest.raises(RuntimeError, match="a view of a frozen weight that rests in bytes must not be written"):
                write()
    for value in net.state_dict().values():
        assert type(value._local_tensor) is torch.Tensor
    assert torch.equal(_my_loss(net, 0), loss)
    _assert_no_values(net)


@CHECKS.on(2)
def foreach_operations_and_norms_work() -> None:
    net = make_frozen(make_codec("blockwise"), "optim_grads_params")
    weights: list[Any] = [p for name, p in net.named_parameters() if _is_scaled(name)]
    before = [full(weight).clone() for weight in weights]
    with torch.no_grad():
        of_weights: Any = torch._foreach_norm(weights)
        norms = torch.stack([norm.full_tensor() for norm in of_weights])
        assert torch.allclose(norms, torch.stack([value.norm() for value in before]), rtol=1e-2)
        torch._foreach_mul_(weights, 2.0)
    assert all(torch.equal(full(weight), 2.0 * value) for weight, value in zip(weights, before, strict=True))
    _my_loss(net, 0)
    _assert_no_values(net)
    assert all(torch.equal(full(weight), 2.0 * value) for weight, value in zip(weights, before, strict=True))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
