"""Weights made on the meta device get, unit by unit, the values that the unsharded model would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard
from megatron.core.distributed.fsdp.buffers.materialize import move_buffers
from tests.support.agreement import assert_same_parameters, groups_of, messages_of_the_engine, shard
from tests.support.models import Net, full, my_piece
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import build_gpt, random_tokens

CHECKS = RankChecks(__name__)


def _on_meta(build: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return build(*args, **kwargs)


@CHECKS.on(1, 2, 4)
def modules_of_torch_start_as_if_they_were_made_eagerly() -> None:
    """Units in the order of construction draw the same numbers, whoever else draws in between on other ranks."""
    torch.manual_seed(5)
    plain = Net(2)
    net = _on_meta(Net, 2)
    torch.manual_seed(5 if dist.get_rank() == 0 else 77)
    for name in ("entry", "blocks.0", "blocks.1", "head"):
        fully_shard(net.get_submodule(name))
    fully_shard(net)
    assert_same_parameters(net, plain)
    assert not any(parameter.is_meta for parameter in net.parameters())
    with torch.no_grad():
        assert torch.equal(net(my_piece(0)[0]), plain(my_piece(0)[0]))


@CHECKS.on(2, 4)
def gpt_starts_with_the_same_bits() -> None:
    said = messages_of_the_engine()
    for tied in (False, True):
        arguments = {"share_embeddings_and_output_weights": tied}
        plain, model = build_gpt(arguments), _on_meta(build_gpt, arguments)
        assert all(parameter.is_meta for parameter in model.parameters())
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        wrapped = FullyShardedDataParallel(model.config, ddp_config, model)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(ours), theirs), name
        tokens, positions, labels = random_tokens()
        assert torch.equal(
            wrapped(tokens, positions, None, labels=labels), plain(tokens, positions, None, labels=labels)
        )
    assert not [text for text in said if "initial values" in text]


class Buffered(nn.Module):
    """A table in a buffer, a weight, and a real buffer that nobody fills again."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.empty(4))
        self.weight = nn.Parameter(torch.empty(4))
        self.real: torch.Tensor
        self.register_buffer("real", torch.arange(4.0, device="cpu"))
        self.num_resets = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.num_resets += 1
        with torch.no_grad():
            self.table.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.table.device))
            self.weight.copy_(2 * self.table)

    def forward(self) -> torch.Tensor:
        return (self.weight * self.table + self.real).sum()


@CHECKS.on(2)
def every_reset_runs_once_and_what_is_real_stays() -> None:
    module = _on_meta(Buffered)
    assert module.table.is_meta and not module.real.is_meta
    before = module.num_resets
    fully_shard(module)
    assert module.num_resets == before + 1
    assert module().item() == Buffered()().item()


@CHECKS.on(2)
def attributes_and_frozen_weights_survive() -> None:
    linear = _on_meta(nn.Linear, 3, 4)
    linear.weight.requires_grad_(False)
    linear.weight.mine = "a word"
    fully_shard(linear)
    assert linear.weight.mine == "a word" and not linear.weight.requires_grad and linear.bias.requires_grad


class Scale(nn.Module):
    """A parameter of its own, written by the constructor, and no ``reset_parameters``."""

    def __init__(self, *, mask: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        nn.init.uniform_(self.gain)
        if mask:
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def _scaled() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Scale(), nn.Linear(3, 3), Scale()))


@CHECKS.on(2)
def a_module_that_cannot_fill_its_weights_is_filled_later_or_named() -> None:
    """As in FSDP2, by each way to load and by ``torch.nn.init``."""

    def load(model: Any, state: dict[str, Any]) -> None:
        model.load_state_dict(state)

    def assign(model: Any, state: dict[str, Any]) -> None:
        model.load_state_dict(state, assign=True)

    def broadcast(model: Any, state: dict[str, Any]) -> None:
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)

    def init(model: Any, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(distribute_tensor(state[name], parameter.device_mesh, parameter.placements))

    torch.manual_seed(1)
    plain, x = _scaled(), torch.randn(2, 3)
    for fill in (load, assign, broadcast, init):
        model = _on_meta(_scaled)
        fully_shard(model[1])
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"1\.0\.gain, 1\.2\.gain must have values before the next forward"):
            model(x)
        fill(model, plain.state_dict())
        assert_same_parameters(model, plain)
        assert torch.equal(model(x), plain(x))
    # A mask holds no mark by which one could tell that nobody has filled it.
    with pytest.raises(ValueError, match=r"reset_parameters\(\).*got none in 0 \(Scale\), whose mask has no.*bool"):
        fully_shard(_on_meta(lambda: nn.Sequential(Scale(mask=True), Scale())))


def test_buffers_follow_the_parameters_device() -> None:
    module = Buffered()
    move_buffers([("", module)], torch.device("meta"))
    assert module.table.is_meta and module.real.is_meta and not module.weight.is_meta


class Tied(nn.Module):
    """Ties in both directions: the embedding's weight is the head's, the second body's the first body's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
        self.bodies = nn.ModuleList([nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)])
        self.head.weight = self.embedding.weight
        self.bodies[1].weight = self.bodies[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for body in self.bodies:
            x = torch.tanh(body(x))
        out: torch.Tensor = self.head(x)
        return out


@CHECKS.on(1, 2)
def ties_hold_inside_of_units_and_across_them() -> None:
    """Each unit would otherwise make a weight of its own of the one that they share."""
    for units in (
        (),
        ("embedding", "head"),
        ("head", "embedding"),
        ("embedding", "bodies.0", "bodies.1", "head"),
        ("bodies.1",),
    ):
        model = _on_meta(Tied)
        torch.manual_seed(1)
        shard(model, units)
        assert model.head.weight is model.embedding.weight, units
        assert model.bodies[1].weight is model.bodies[0].weight, units
        assert sum(len(group.parameters) for group in groups_of(model)) == 3, units
        plain = Tied()
        plain.load_state_dict({name: full(parameter) for name, parameter in model.state_dict().items()})
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        tokens = torch.arange(6).view(2, 3)
        for _ in range(2):
            for m, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                m(tokens).square().mean().backward()
                optimizer.step()
            assert_same_parameters(model, plain)


@CHECKS.on(2)
def a_tied_weight_keeps_the_values_of_its_first_holder() -> None:
    """As in the eager model, where the head's own initial weight is dropped when it is tied."""
    for units in ((), ("embedding", "head")):
        model = _on_meta(Tied)
        shard(model, units)
        # An embedding starts with a deviation of 1, a linear layer below 1 / sqrt(5).
        assert full(model.embedding.weight).std() > 0.6


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
