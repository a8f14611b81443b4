"""Initial values from the meta device that ``reset_parameters`` alone does not give: whose they are, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, hybrid_placements
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.agreement import assert_same_parameters, messages_of_the_engine, seeded, shard
from tests.support.models import STRATEGY_NAMES, full
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _on_meta(build: Callable[..., nn.Module], *args: Any) -> Any:
    with torch.device("meta"):
        return build(*args)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.gain


class HubModel(nn.Module):
    """Initialised as Hugging Face's models are: by a method of the model, which writes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 11)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        elif isinstance(module, Layer):
            module.gain.data.fill_(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaled(nn.Module):
    """Initialised a second time by the module around, with ``torch.nn.init``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        nn.init.normal_(self.second.weight, std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@CHECKS.on(2)
def a_model_that_initialises_itself_is_asked_for_an_init_fn() -> None:
    with pytest.raises(ValueError, match=r"got HubModel \(HubModel\) with an _init_weights of its own.*pass init_fn"):
        fully_shard(_on_meta(HubModel))
    model = _on_meta(HubModel)
    fully_shard(model.head)
    remedy = r"pass init_fn to fully_shard .*`init_fn=lambda module: None` if all values are loaded afterwards"
    with pytest.raises(ValueError, match=rf"got HubModel \(HubModel\) with an _init_weights of its own.*{remedy}"):
        fully_shard(model)
    with pytest.raises(
        ValueError, match=r"got 0\.second \(Linear\), whose parameters a module around them init.*pass init_fn"
    ):
        fully_shard(_on_meta(lambda: nn.Sequential(Scaled(), nn.Linear(6, 6))))


@CHECKS.on(2)
def an_init_fn_gives_the_values_of_the_unsharded_model() -> None:
    """Bit for bit, as if it were applied once after all constructors."""
    for units in ((), ("embedding", "layers.0", "layers.1", "head")):
        plain, model = HubModel(), _on_meta(HubModel)
        torch.manual_seed(7)
        plain.apply(plain._init_weights)
        torch.manual_seed(7 if dist.get_rank() == 0 else 8)
        shard(model, units, init_fn=model._init_weights)
        assert_same_parameters(model, plain)
        tokens = torch.arange(6).view(2, 3)
        assert torch.equal(model(tokens), plain(tokens))


@CHECKS.on(2)
def what_nobody_fills_is_named_before_the_first_forward() -> None:
    model = _on_meta(HubModel)
    shard(
        model, ("layers.0",), init_fn=lambda module: None if isinstance(module, Layer) else model._init_weights(module)
    )
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.gain, layers\.0\.gain must have values before the next forward"
    ):
        model(torch.arange(3))
    for layer in model.layers:
        nn.init.ones_(layer.gain)
    model(torch.arange(3)).sum().backward()


class Positions(nn.Module):
    """Holds buffers that no state_dict has, as rotary embeddings do, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("order", torch.arange(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("angles")[self.get_buffer("order")]


def _broadcast_numels(build: Callable[[], Any]) -> list[int]:
    """Return the sizes of the tensors that are broadcast while ``build`` runs."""
    sent: list[int] = []
    broadcast = dist.broadcast
    with pytest.MonkeyPatch.context() as patch:

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.numel())
            return broadcast(tensor, *args, **kwargs)

        patch.setattr(dist, "broadcast", counted)
        build()
    return sent


@CHECKS.on(2)
def only_values_are_sent() -> None:
    """Weights that are loaded afterwards were broadcast too, whole, before they had any; a rank without values gets those of the first."""
    empty = _on_meta(HubModel)
    assert not _broadcast_numels(lambda: shard(empty, ("layers.0", "head"), init_fn=lambda module: None))
    assert all(full(parameter).isnan().all() for parameter in empty.parameters())
    own = seeded(HubModel)
    given = own if dist.get_rank() == 0 else _on_meta(HubModel)
    plain = seeded(HubModel)
    assert _broadcast_numels(lambda: shard(given, ("layers.0", "head"), init_fn=lambda module: None))
    assert_same_parameters(given, plain, "values of the first rank")


@CHECKS.on(2)
def what_to_empty_leaves_is_named_before_the_next_forward() -> None:
    """The order of FSDP2's users, and of those who then load: ``state_dict`` has no buffer that is not persistent."""

    def build() -> Any:
        return nn.Sequential(nn.Sequential(nn.Linear(6, 6), Positions()), nn.Linear(6, 6))

    plain = seeded(build)
    message = r"got none since the meta device or to_empty\(\).*writing to them, as module.angles.copy_\(values\)$"
    for part in ("", "0", "0.1"):
        for from_meta in (False, True):
            model = _on_meta(build) if from_meta else build()
            shard(model, ("0",), init_fn=(lambda module: None) if from_meta else None)
            for _ in range(2):  # before the first forward, and later
                model.get_submodule(part).to_empty(device="cpu")
                model.load_state_dict(plain.state_dict())
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=r"^0\.1\.angles, 0\.1\.order must.*" + message):
                        model(torch.ones(2, 6))
                model[0][1].angles.copy_(plain[0][1].angles)
                with pytest.raises(RuntimeError, match=r"^0\.1\.order must have values.*as module.order.copy_"):
                    model(torch.ones(2, 6))
                model[0][1].order = torch.arange(6)
                torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    model = shard(build(), ("0",))
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="must have values before the next forward") as error:
        model(torch.ones(2, 6))
    named = str(error.value).partition(" must")[0].split(", ")
    assert sorted(named) == ["0.0.bias", "0.0.weight", "0.1.angles", "0.1.order", "1.bias", "1.weight"]


@CHECKS.on(2)
def sharded_parameters_are_initialised_like_whole_ones() -> None:
    """FSDP2's order: build on the meta device, shard, make empty, initialise."""
    fills: tuple[Callable[[torch.Tensor], object], ...] = (
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
        nn.init.ones_,
        lambda weight: weight.data.normal_(0.0, 0.02),
    )

    def initialise(module: nn.Module, fill: Callable[[torch.Tensor], object]) -> None:
        for parameter in module.parameters():
            (fill if parameter.dim() == 2 else nn.init.uniform_)(parameter)

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    for fill in fills:
        for strategy in STRATEGY_NAMES:
            plain, model = HubModel(), _on_meta(HubModel)
            shard(model, ("layers.0", "layers.1"), strategy, init_fn=lambda module: None)
            model.to_empty(device="cpu")
            torch.manual_seed(11)
            initialise(plain, fill)
            torch.manual_seed(11)
            initialise(model, fill)
            assert_same_parameters(model, plain)
            tokens = torch.arange(6).view(2, 3)
            assert torch.equal(model(tokens), plain(tokens)), strategy
    # Replicas would drift apart where ranks draw from other seeds.
    replicated: list[dict[str, Any]] = [
        {"placements": strategy_placements("no_shard")},
        {"mesh": mesh, "placements": hybrid_placements("optim", axes=("outer", "inner"))},
    ]
    for options in replicated:
        torch.manual_seed(dist.get_rank())
        model = fully_shard(nn.Linear(6, 6), **options)
        nn.init.normal_(model.weight)
        mine = full(model.weight).clone()
        theirs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(theirs, mine)
        assert torch.equal(*theirs)
    # Others' DTensors are left to torch, which warns of CPUs.
    others = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("others",))
    other = torch.distributed.tensor.distribute_tensor(torch.zeros(4, 4), others)
    with pytest.warns(UserWarning, match="random operators may not have complete support on cpu"):
        other.normal_()
    assert other.to_local().all()


@CHECKS.on(2)
def modules_of_torch_that_hide_their_reset_are_served() -> None:
    torch.manual_seed(5)
    plain = nn.MultiheadAttention(6, 2, add_bias_kv=True)
    torch.manual_seed(5)
    assert_same_parameters(shard(_on_meta(nn.MultiheadAttention, 6, 2, 0.0, True, True)), plain)
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(6, 2, 8)
    torch.manual_seed(5)
    assert_same_parameters(shard(_on_meta(nn.TransformerEncoderLayer, 6, 2, 8)), layer)
    said = messages_of_the_engine()
    for units in ((), ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0")):
        said.clear()
        model = _on_meta(lambda: nn.Transformer(16, 2, 2, 1, 32, batch_first=True))
        shard(model, units)
        for name, parameter in model.named_parameters():
            whole = full(parameter)
            assert not whole.isnan().any(), name
            if whole.dim() > 1:  # Xavier's bound, which the whole transformer asks for
                bound = (6 / sum(whole.shape)) ** 0.5
                assert 0.8 * bound < whole.abs().max() <= bound, name
        assert any("linear1 (Linear)" in text for text in said) is (dist.get_rank() == 0), said
        assert len(set(said)) == len(said), "units that are alike are named once"
        x = torch.randn(2, 3, 16)
        model(x, x).sum().backward()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
