"""``fully_shard`` on any module that holds layers of transformer-engine, also with weights that are born in FP8.

With the package's stand-in: main weights, codecs and attributes are what they would be if the weights had been made in bf16
and asked for the codec.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer, load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeights
from tests.support import fake_float8_tensors, fake_transformer_engine
from tests.support.models import full, local_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
WIDTH, HIDDEN = 32, 48


def _te() -> Any:
    fake_transformer_engine.install()
    import transformer_engine.pytorch as te  # type: ignore[import-not-found, unused-ignore]

    return te


RECIPES: dict[str, Any] = {
    "delayed": fake_transformer_engine.DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo="most_recent"),
    "tensorwise": fake_transformer_engine.Float8CurrentScaling(),
}


class _Net(nn.Module):
    """No GPT model: an embedding, blocks with layers of transformer-engine, and a head."""

    def __init__(self, te: Any, device: str) -> None:
        super().__init__()
        kind = {"device": device, "params_dtype": torch.bfloat16}
        self.embedding = nn.Embedding(20, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                te.LayerNormLinear(WIDTH, HIDDEN, **kind), nn.Tanh(), te.Linear(HIDDEN, WIDTH, bias=False, **kind)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _make(te: Any, recipe: str, *, born: bool, device: str = "cpu", keeps: bool = False) -> Any:
    torch.manual_seed(11)
    with te.quantized_model_init(enabled=born, recipe=RECIPES[recipe], preserve_high_precision_init_val=keeps):
        net = _Net(te, device)
    return net


def _weights(net: Any) -> list[Any]:
    return [layer.weight for block in net.blocks for layer in (block[0], block[2])]


def _shard(net: Any, strategy: str = "optim_grads_params") -> Any:
    torch.manual_seed(11)  # what is materialised
    for block in net.blocks:
        fully_shard(block, placements=strategy)
    fully_shard(net, placements=strategy)
    return net


def _with_optimizer(net: Any) -> tuple[Any, Any]:
    _shard(net)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return net, fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.01))


def _train(te: Any, net: Any, recipe: str, num_steps: int = 3) -> list[torch.Tensor]:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.01))
    return _steps(te, net, optimizer, recipe, range(num_steps))


def _steps(te: Any, net: Any, optimizer: Any, recipe: str, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        with te.autocast(enabled=True, recipe=RECIPES[recipe]):
            loss = net(torch.randint(20, (8,), generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _asking(te: Any, recipe: str, device: str, values: list[torch.Tensor] | None) -> Any:
    """The net made in bf16, whose weights ask for the codec."""
    from megatron.core.extensions.transformer_engine_weights import te_weight_codec

    net = _make(te, recipe, born=False, device=device)
    settings: dict[str, Any] = {"power_of_two": False}
    if recipe == "delayed":
        settings = {"margin": 1, "amax_history_len": 4, "amax_compute_algo": "most_recent"}
    for index, weight in enumerate(_weights(net)):
        weight.fsdp_codec = te_weight_codec(recipe, **settings)
        if values is not None:
            weight.data.copy_(values[index])
    return net


def _codecs(net: Any) -> list[Any]:
    return [group.weights.codec for module in (*net.blocks, net) for group in module.parameter_groups]


@CHECKS.on(2)
def any_module_with_the_layers_is_sharded() -> None:
    """In bf16 and in FP8; without the engine the same net has the same first loss."""
    te = _te()
    for recipe in RECIPES:
        whole = _make(te, recipe, born=False)
        generator = torch.Generator().manual_seed(dist.get_rank())
        with te.autocast(enabled=True, recipe=RECIPES["tensorwise"]):
            expected = whole(torch.randint(20, (8,), generator=generator)).float().square().mean()
        for strategy in ("optim", "optim_grads_params"):
            net = _shard(_make(te, recipe, born=False), strategy)
            assert torch.equal(_train(te, net, "tensorwise")[0], expected)
            assert {group.weights.rest_dtype for block in net.blocks for group in block.parameter_groups} == {
                torch.bfloat16
            }


@CHECKS.on(2)
def modules_of_the_package_resume_bitwise() -> None:
    """Their histories and scales are tensors in the checkpoint: what they pickle themselves they would not load again."""
    te = _te()
    names: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    folder = Path(str(names[0]))
    net, optimizer = _with_optimizer(_make(te, "delayed", born=False))
    _steps(te, net, optimizer, "delayed", range(2))
    save_checkpoint(net, optimizer, folder)
    expected = _steps(te, net, optimizer, "delayed", range(2, 4))
    resumed, fresh = _with_optimizer(_make(te, "delayed", born=False))
    load_checkpoint(resumed, fresh, folder)
    assert _steps(te, resumed, fresh, "delayed", range(2, 4)) == expected
    other, fresh = _with_optimizer(_make(te, "delayed", born=False))
    load_checkpoint(other, fresh, folder)
    for layer in (part for block in other.blocks for part in (block[0], block[2])):
        layer.fp8_meta["scaling_fwd"].scale.fill_(1.0)
    assert _steps(te, other, fresh, "delayed", range(2, 4)) != expected, "without the scales the losses are others"
    other, fresh = _with_optimizer(_make(te, "tensorwise", born=False))
    load_checkpoint(other, fresh, folder)
    _steps(te, other, fresh, "tensorwise", range(2, 3))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@CHECKS.on(2)
def weights_that_are_born_in_fp8_train_as_those_that_ask_for_the_codec() -> None:
    """From the values before they were quantised, where they were kept, and always on the meta device; else from the bytes."""
    te = _te()
    for recipe in RECIPES:
        for device, keeps in (("cpu", True), ("cpu", False), ("meta", True), ("meta", False)):
            net = _make(te, recipe, born=True, device=device, keeps=keeps)
            assert all(isinstance(w, fake_float8_tensors.Float8Tensor) is (device == "cpu") for w in _weights(net))
            values = None
            if device == "cpu" and not keeps:
                values = [weight.dequantize() for weight in _weights(net)]
            strategy = "optim" if keeps else "optim_grads_params"
            sharded, reference = _shard(net, strategy), _shard(_asking(te, recipe, device, values), strategy)
            for (name, ours), theirs in zip(sharded.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(full(ours), full(theirs)), (recipe, device, keeps, name)
            assert _codecs(sharded) == _codecs(reference)
            losses, expected = _train(te, sharded, recipe), _train(te, reference, recipe)
            assert all(map(torch.equal, losses, expected)), (recipe, device, keeps, losses, expected)
            for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
                assert torch.equal(local_of(ours), local_of(theirs))


@CHECKS.on(2)
def attributes_stay_and_originals_are_freed() -> None:
    """Layers on the meta device make other parameters when they are reset; so the attributes would be lost."""
    te = _te()
    for device in ("cpu", "meta"):
        net = _make(te, "tensorwise", born=True, device=device, keeps=True)
        for parameter in net.blocks[0].parameters():
            parameter.note = "mine"
        for parameter in net.blocks[1][2].parameters():
            parameter.requires_grad_(False)
        kept = [weakref.ref(w._high_precision_init_val) for w in _weights(net)] if device == "cpu" else []
        data = [weakref.ref(w._data) for w in _weights(net)] if device == "cpu" else []
        del parameter  # the last one
        gc.disable()
        _shard(net)
        gc.enable()
        assert all(reference() is None for reference in (*kept, *data)), "what weights were before is kept"
        assert all(parameter.note == "mine" for parameter in net.blocks[0].parameters())
        assert not any(hasattr(weight, "get_high_precision_init_val") for weight in _weights(net))
        assert [weight.requires_grad for weight in _weights(net)] == [True, True, True, False]
        net.blocks[0].unshard()
        assert not hasattr(net.blocks[0][0].weight, "get_high_precision_init_val")
        assert net.blocks[0][0].weight.note == "mine"
        net.blocks[0].reshard()


@CHECKS.on(2)
def frozen_weights_that_are_born_in_fp8_keep_their_bytes_and_scales() -> None:
    """As they are multiplied without the engine: LoRA over a base in FP8."""
    te = _te()
    for recipe in RECIPES:
        for strategy in ("optim", "optim_grads_params"):
            net = _make(te, recipe, born=True, keeps=True)
            for weight in _weights(net):
                weight.requires_grad_(False)
            before = [(weight._data.clone(), weight._scale_inv.clone()) for weight in _weights(net)]
            generator = torch.Generator().manual_seed(dist.get_rank())
            with te.autocast(enabled=True, recipe=RECIPES["tensorwise"]):
                expected = net(torch.randint(20, (8,), generator=generator)).float().square().mean()
            _shard(net, strategy)
            groups = [group for block in net.blocks for group in block.parameter_groups]
            assert sum(isinstance(group.weights, FrozenWeights) for group in groups) >= 2
            assert torch.equal(_train(te, net, "tensorwise")[0], expected)
            for block in net.blocks:
                block.unshard()
            for weight, (data, inverse) in zip(_weights(net), before, strict=True):
                assert torch.equal(weight._data, data) and torch.equal(weight._scale_inv, inverse)
            for block in net.blocks:
                block.reshard()


@CHECKS.on(2)
def weights_in_other_formats_are_refused() -> None:
    te = _te()
    net = _make(te, "tensorwise", born=True)
    weight: Any = net.blocks[0][0].weight
    weight._fp8_dtype = torch.float8_e5m2
    with pytest.raises(NotImplementedError, match="E4M3"):
        fully_shard(net.blocks[0])


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
