"""A sharded model looks like the unwrapped one: names, order, shapes, attributes of parameters, type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FsdpModule, fully_shard
from tests.support.agreement import shard
from tests.support.models import STRATEGY_NAMES, Block, make_net, my_piece, shard_net
from tests.support.models import loss_of as net_loss
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@CHECKS.on(1, 2, 4)
def names_shapes_and_strides_are_those_of_the_unwrapped_model() -> None:
    plain = make_net()
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(), strategy)
        for _ in range(2):  # before and after a step
            assert list(net.state_dict()) == list(plain.state_dict())
            ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
            assert list(ours) == list(theirs)
            for name, parameter in ours.items():
                assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
                assert parameter.shape == theirs[name].shape and parameter.stride() == theirs[name].stride()
                assert parameter.numel() == theirs[name].numel() and parameter.is_leaf
            assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
            net_loss(net, my_piece(0)).backward()


@CHECKS.on(2)
def attributes_of_parameters_stay() -> None:
    """Optimizers read them on sharded parameters, layers on unsharded ones in forward."""
    marks: dict[str, Any] = {
        "sequence_parallel": True,
        "allreduce": False,
        "is_embedding_or_output_parameter": True,
        "mine": ["a list"],
    }
    for strategy in STRATEGY_NAMES:
        net = make_net()
        for name, value in marks.items():
            setattr(net.blocks[0].up.weight, name, value)
        shard_net(net, strategy)
        seen: dict[str, Any] = {}

        def look(block: nn.Module, x: torch.Tensor, seen: dict[str, Any] = seen) -> torch.Tensor:
            if not seen:
                seen.update({name: getattr(block.up.weight, name, None) for name in marks})
            out: torch.Tensor = block(x)
            return out

        handle = net.blocks[0].register_forward_pre_hook(
            lambda module, args, seen=seen: seen.update({n: getattr(module.up.weight, n, None) for n in marks})
        )
        net_loss(net, my_piece(0)).backward()
        handle.remove()
        assert seen == marks
        for name, value in marks.items():
            assert getattr(net.blocks[0].up.weight, name) is value
            assert not hasattr(net.blocks[1].up.weight, name)


@CHECKS.on(2)
def a_sharded_module_is_still_of_its_class() -> None:
    block = fully_shard(Block(7))
    assert isinstance(block, Block) and isinstance(block, FsdpModule)
    assert type(block).__name__ == "FSDPBlock" and type(block).__module__ == Block.__module__
    assert type(fully_shard(Block(7))) is type(block)
    assert not issubclass(Block, FsdpModule)


# After torch 2.11.
_NEW_IN_FSDP2 = {
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


@CHECKS.on(1)
def names_of_users_are_theirs() -> None:
    """Of the public names that FSDP2 does not add, in the class, an instance, and as a property with a setter."""

    class Owner(nn.Linear):
        Phase, parameter_groups = "mine", property(lambda self: [self.weight])

        def context(self) -> str:
            return "mine"

        @property
        def phase(self) -> str:
            return self._mine

        @phase.setter
        def phase(self, value: str) -> None:
            self._mine = value

        @staticmethod
        def encode(x: float, scale: float = 3.0) -> float:
            return x * scale

        @classmethod
        def decode(cls, x: torch.Tensor) -> Any:
            return x, cls

    theirs = {name for cls in (nn.Module, FSDPModule) for name in dir(cls)} | _NEW_IN_FSDP2
    added = {name for name in dir(FsdpModule) if not name.startswith("_")} - theirs
    hooks = {f"{when}_{phase}" for when in ("pre", "post") for phase in ("forward", "backward")}
    assert added == {"Phase", "context", "is_root", "name", "parameter_groups", "phase", *hooks}
    plain, module = nn.Linear(2, 2), fully_shard(Owner(2, 2))
    module.phase = "set"
    assert (module.Phase, type(module).Phase, module.context(), module.phase) == ("mine", "mine", "mine", "set")
    assert module.parameter_groups == [module.weight] and module.name == "" and callable(module.is_root)
    assert module.encode(2.0) == 6.0 and module.decode(torch.ones(1))[1] is type(module)
    for name in added:
        setattr(plain, name, nn.Identity() if name == "context" else name)
    fully_shard(plain)
    assert all(getattr(plain, name) == name for name in added - {"context"})
    assert isinstance(plain.context, nn.Identity)
    for model in (module, plain):
        model(torch.ones(1, 2)).sum().backward()
        assert list(model.state_dict()) == ["weight", "bias"]


@CHECKS.on(2)
def hooks_and_modes_of_the_module_go_on_working() -> None:
    plain, net = make_net(), shard_net(make_net())
    calls: list[str] = []
    for name, model in (("plain", plain), ("sharded", net)):
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda m, args: (calls.append("pre"), (args[0] * 2,))[1])
        block.register_forward_hook(lambda m, args, out: (calls.append("post"), out + 1)[1])
        block.register_full_backward_hook(lambda m, grad_in, grad_out: calls.append("backward"))
        calls.clear()
        loss = net_loss(model, my_piece(0))
        loss.backward()
        assert calls == ["pre", "post", "backward"], name
    assert net.eval() is net and not net.blocks[0].training
    torch.testing.assert_close(net_loss(net, my_piece(0)), net_loss(plain, my_piece(0)))


@CHECKS.on(2)
def parametrized_weights_are_computed_from_sharded_ones() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(4)
                self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out

    plain, model = Normed(), shard(Normed())
    x = torch.ones(2, 5)
    torch.testing.assert_close(model(x), plain(x))
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
