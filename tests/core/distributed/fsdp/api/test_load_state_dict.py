"""``load_state_dict`` on sharded modules: the next forward uses what was loaded, or it raises and names the key."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp import microbatch
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from tests.core.distributed.fsdp.buffers.test_parameters import Tied
from tests.support.agreement import assert_same_parameters, seeded, shard
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    context_of,
    full,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _evenly(placement: Any) -> Callable[[Net], dict[str, torch.Tensor]]:
    def distribute(net: Net) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {name: distribute_tensor(value, mesh, [placement]) for name, value in net.state_dict().items()}

    return distribute


# What a state_dict may hold: (the source's net) -> state_dict.
SOURCES: dict[str, Callable[[Net], dict[str, Any]]] = {
    "full tensors": lambda net: net.state_dict(),
    "of another dtype": lambda net: {name: value.double() for name, value in net.state_dict().items()},
    "sharded alike": lambda net: shard_net(net).state_dict(),
    "sharded by another strategy": lambda net: shard_net(net, "no_shard").state_dict(),
    "sharded by units that differ": lambda net: shard(net).state_dict(),
    "sharded evenly": _evenly(Shard(0)),
    "replicated": _evenly(Replicate()),
}


def _outputs(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = net(my_piece(0)[0])
    return out


@CHECKS.on(1, 2, 4)
def what_is_loaded_is_in_effect_from_the_next_forward() -> None:
    expected = make_net(2, seed=9)
    for strategy in STRATEGY_NAMES if dist.get_world_size() == 2 else ("optim_grads_params",):
        for name, make in SOURCES.items():
            for assign in (False, True):
                net = shard_net(make_net(2), strategy)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                _outputs(net)
                result = net.load_state_dict(make(make_net(2, seed=9)), assign=assign)
                assert not result.missing_keys and not result.unexpected_keys
                assert torch.equal(_outputs(net), _outputs(expected)), (name, strategy, assign)
                assert_same_parameters(net, expected)
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                assert all(a is b for a, b in zip(held, net.parameters(), strict=True)), (
                    "the optimizer holds them still"
                )


@CHECKS.on(1, 2)
def what_torch_saves_and_copies_is_whole() -> None:
    """Each rank saves its own parts; a deepcopy is independent; torch.load works with ``weights_only=True``."""
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(2), strategy)
        optimizer = FlatAdamW(net.parameters(), lr=0.1)
        loss_of(net, my_piece(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = net.state_dict()
        copied = copy.deepcopy(saved)
        assert all(value._local_tensor is not saved[name]._local_tensor for name, value in copied.items())
        file = io.BytesIO()
        torch.save({"model": saved, "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        fresh = shard_net(make_net(2, seed=9), strategy)
        continued = FlatAdamW(fresh.parameters(), lr=0.1)
        fresh.load_state_dict(loaded["model"])
        continued.load_state_dict(loaded["optimizer"])
        for model, owner in ((net, optimizer), (fresh, continued)):
            loss_of(model, my_piece(1)).backward()
            owner.step()
        others = dict(fresh.named_parameters())
        for name, parameter in net.named_parameters():
            assert torch.equal(full(others[name]), full(parameter)), name
            assert not torch.equal(full(copied[name]), full(parameter)), "training has moved on from the copy"


@CHECKS.on(2)
def main_weights_take_more_digits_than_model_weights() -> None:
    """A bf16 model's fp32 main weights are loaded without a cast to bf16."""
    source = make_net(2, seed=9)
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(2, dtype=torch.bfloat16), strategy)
        net.load_state_dict(source.state_dict())
        assert_same_parameters(net, source)
        expected = make_net(2, seed=9, dtype=torch.bfloat16)
        with torch.no_grad():
            features = my_piece(0)[0].bfloat16()
            assert torch.equal(net(features), expected(features))


@CHECKS.on(2)
def what_was_gathered_before_the_load_is_not_used() -> None:
    """Neither weights that start_param_sync gathered, nor those of an earlier microbatch."""
    expected = make_net(2, seed=9)
    for strategy in ("optim", "optim_grads_params"):
        net = shard_net(make_net(2, dtype=torch.float32), strategy)
        for step in range(3):
            loss_of(net, my_piece(step)).backward()
        assert context_of(net).planner.plan is not None
        context_of(net).prepare_forward()
        net.load_state_dict(expected.state_dict())
        assert torch.equal(_outputs(net), _outputs(expected))
        net.load_state_dict(make_net(2).state_dict())
        with microbatch(net, is_first=True, is_last=False):
            loss_of(net, my_piece(0)).backward()
        net.load_state_dict(expected.state_dict())
        with microbatch(net, is_first=False, is_last=True):
            assert torch.equal(_outputs(net), _outputs(expected))


@CHECKS.on(2)
def part_of_a_model_loads_too() -> None:
    """Load into a unit, into a module inside a unit, and from a plain module around units."""
    expected = make_net(2, seed=9)
    net = shard_net(make_net(2))
    net.blocks[0].load_state_dict(expected.blocks[0].state_dict())
    net.head.load_state_dict(expected.head.state_dict())
    net.blocks[1].up.load_state_dict(expected.blocks[1].up.state_dict())
    for name in ("blocks.0", "head", "blocks.1.up"):
        assert_same_parameters(net.get_submodule(name), expected.get_submodule(name))
    around = nn.ModuleDict({"net": net})
    around.load_state_dict({f"net.{name}": value for name, value in expected.state_dict().items()})
    assert torch.equal(_outputs(net), _outputs(expected))


@CHECKS.on(2)
def tied_weights_load_under_both_names() -> None:
    source = seeded(Tied)
    with torch.no_grad():
        source.embedding.weight.fill_(3.0)
    for names in ((), ("embedding", "head")):
        model = shard(seeded(Tied), names)
        model.load_state_dict(source.state_dict())
        assert model.head.weight is model.embedding.weight
        assert_same_parameters(model, source)


@CHECKS.on(2)
def keys_that_do_not_match_are_named() -> None:
    net = shard_net(make_net(2))
    good = make_net(2, seed=9).state_dict()
    wrong = {name: value for name, value in good.items() if name != "head.bias"}
    wrong["tail.bias"], wrong["blocks.1.up.weight"] = torch.ones(3), torch.ones(11, 8)
    for assign in (False, True):
        with pytest.raises(RuntimeError) as caught:
            net.load_state_dict(wrong, assign=assign)
        message = str(caught.value)
        for words in ('Missing key(s) in state_dict: "head.bias"', 'Unexpected key(s) in state_dict: "tail.bias"'):
            assert words in message, message
        assert "blocks.1.up.weight" in message and "[11, 8]" in message and "[11, 7]" in message, message
    kept = {name: full(parameter).clone() for name, parameter in net.named_parameters()}
    del wrong["blocks.1.up.weight"]
    result = net.load_state_dict(wrong, strict=False)
    assert set(result.missing_keys) == {"head.bias", "blocks.1.up.weight"} and result.unexpected_keys == ["tail.bias"]
    for name, parameter in net.named_parameters():
        assert torch.equal(full(parameter), kept[name] if name in result.missing_keys else good[name])
    _outputs(net)


@CHECKS.on(2)
def a_load_into_weights_that_the_user_unsharded_is_in_effect() -> None:
    """They are resharded first, as in FSDP2, also where their state is taken."""
    net = shard_net(make_net(2))
    net.blocks[0].unshard()
    net.load_state_dict(make_net(2, seed=9).state_dict())
    assert torch.equal(_outputs(net), _outputs(make_net(2, seed=9)))
    net.blocks[0].unshard()
    assert all(isinstance(value, DTensor) for value in net.state_dict().values())


@CHECKS.on(2)
def a_load_within_forward_is_refused() -> None:
    """It would be written to the gathered copy, which the unit drops."""
    net, values = shard_net(make_net(2)), make_net(2, seed=9).state_dict()

    def load(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.load_state_dict(values)
        return x

    net.around = load
    with pytest.raises(RuntimeError, match=r"must find sharded parameters, got those of \S+ within its forward"):
        _outputs(net)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
