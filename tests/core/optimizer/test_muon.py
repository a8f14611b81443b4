"""Which parameters of a GPT are Muon's, how its queries, keys and values are split, and steps that overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import FlatMuon, fully_shard, load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from tests.support.models import full
from tests.support.plain_muon import PlainMuon
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder
from tests.support.tiny_gpt import build_gpt, random_tokens

CHECKS = RankChecks(__name__)
MODEL: dict[str, Any] = {"num_query_groups": 2, "gated_linear_unit": True, "ffn_hidden_size": 24}


def _sharded(strategy: str = "optim_grads_params", **fields: Any) -> Any:
    torch.manual_seed(1)
    model = build_gpt(
        {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}, **MODEL, **fields
    )
    for layer in model.decoder.layers:
        fully_shard(layer, placements=strategy_placements(strategy))
    return fully_shard(model, placements=strategy_placements(strategy))


def _optimizer(model: nn.Module, **settings: Any) -> MegatronOptimizer:
    config = OptimizerConfig(**{"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, **settings})
    return get_megatron_optimizer(config, [model])


def _loss(model: nn.Module) -> torch.Tensor:
    tokens, positions, labels = random_tokens()
    loss: torch.Tensor = model(tokens, positions, None, labels=labels).mean()
    return loss


@CHECKS.on(2)
def matrices_but_embedding_and_output_layer_are_muons() -> None:
    model = _sharded(num_moe_experts=2)
    optimizer = _optimizer(model)
    assert isinstance(optimizer.optimizer, FlatMuon)
    named = {id(p): name for name, p in model.named_parameters()}
    of = {True: set(), False: set()}  # type: dict[bool, set[str]]
    for group in optimizer.param_groups:
        of[group["use_muon"]].update(named[id(p)] for p in group["params"])
    layer = "decoder.layers.0."
    assert {name for name in of[True] if name.startswith(layer)} == {
        f"{layer}{name}.weight"
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.router",
            *(f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in (0, 1) for n in (1, 2)),
        )
    }
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= of[False]
    assert all(
        name.endswith(("bias", "layernorm.weight", "layer_norm_weight")) for name in of[False] if "layers" in name
    )
    first = next(p for name, p in model.named_parameters() if name == f"{layer}mlp.router.weight")
    first.use_muon = False
    again = _optimizer(model)
    held = [group["use_muon"] for group in again.param_groups for p in group["params"] if p is first]
    assert held == [False]


@CHECKS.on(2)
def queries_keys_and_values_are_split_as_in_megatron_core() -> None:
    """2 groups of 2 heads of 4 channels: 8 rows of queries, 4 of keys and 4 of values in each."""
    for splits, gated in ((True, False), (True, True), (False, False)):
        model = _sharded(attention_output_gate=True) if gated else _sharded()
        optimizer = _optimizer(
            model, muon_split_qkv=splits, muon_momentum=0.9, muon_nesterov=True, muon_extra_scale_factor=0.2
        )
        matrices = {
            p: name
            for group in optimizer.param_groups
            if group["use_muon"]
            for p in group["params"]
            for name in [next(n for n, q in model.named_parameters() if q is p)]
        }
        heights = (8, 8, 4, 4) if gated else (8, 4, 4)
        blocks = [heights if splits and "linear_qkv" in name else None for name in matrices.values()]
        weights = [full(p).clone() for p in matrices]
        reference = PlainMuon(
            weights, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, extra_scale_factor=0.2, row_blocks=blocks
        )
        for _ in range(2):
            optimizer.zero_grad()
            _loss(model).backward()
            reference.step([full(p.grad) for p in matrices])
            result = optimizer.step()
            assert result.update_successful and result.grad_norm is not None and result.grad_norm > 0
            for parameter, expected in zip(matrices, weights, strict=True):
                assert torch.equal(full(parameter), expected), (matrices[parameter], splits, gated)


@CHECKS.on(2)
def a_step_that_overflows_changes_nothing() -> None:
    model = _sharded()
    optimizer = _optimizer(model, loss_scale=4.0)
    _loss(model).backward()
    optimizer.step()
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    momenta = {
        p: full(state["momentum_buffer"]).clone()
        for p, state in optimizer.optimizer.state.items()
        if "momentum_buffer" in state
    }
    optimizer.zero_grad()
    (_loss(model) * float("inf")).backward()
    assert not optimizer.step().update_successful
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), before[name]), name
    assert momenta and all(
        torch.equal(full(optimizer.optimizer.state[p]["momentum_buffer"]), m) for p, m in momenta.items()
    )
    optimizer.zero_grad()
    optimizer.scale_loss(_loss(model)).backward()
    assert optimizer.step().update_successful
    assert not torch.equal(full(model.output_layer.weight), before["output_layer.weight"])


@CHECKS.on(2)
def checkpoints_go_on_under_another_strategy() -> None:
    with shared_folder() as folder:
        model = _sharded()
        optimizer = _optimizer(model)
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(model, optimizer, folder)
        other = _sharded("optim")
        again = _optimizer(other)
        load_checkpoint(other, again, folder)
        for one, by in ((model, optimizer), (other, again)):
            _loss(one).backward()
            by.step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(full(mine), full(theirs))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_widths_scale_no_rate_of_muons_matrices() -> None:
    """With maximal update parametrisation, Muon's own scale is that of widths; other hidden matrices follow Adam's rule."""
    from megatron.core.optimizer.param_groups import get_param_groups

    weight, other = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    other.use_muon = False  # type: ignore[attr-defined]
    named = [("layer.weight", weight), ("other.weight", other)]
    groups = get_param_groups(named, OptimizerConfig(optimizer="dist_muon", lr=0.1), width_mult=4.0)
    found = {group["use_muon"]: (group["lr"], group.get("eps")) for group in groups}
    assert found == {True: (0.1, None), False: (0.025, None)}


def test_what_muon_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer muon needs a model whose parameters are all sharded by the engine"):
        _optimizer(nn.Linear(4, 4))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"muon_use_syrk": True}, "muon_use_syrk"),
        ({"muon_scalar_optimizer": "lion"}, "Lion is not served"),
        ({"optimizer": "adaptive_muon"}, "must be adam, sgd or muon"),
    ]
    for setting, match in refused:
        with pytest.raises((ValueError, NotImplementedError), match=match):
            OptimizerConfig(**{"optimizer": "muon", "lr": 0.1, **setting})


def test_callers_ask_for_muon_by_a_name_of_its_own() -> None:
    """The configuration says which optimizer it is."""
    with pytest.raises(ValueError, match="optimizer muon needs a model whose parameters are all sharded by the engine"):
        get_megatron_muon_optimizer(
            OptimizerConfig(optimizer="dist_muon", lr=0.1), [nn.Linear(4, 4)], layer_wise_distributed_optimizer=True
        )
    found = get_megatron_muon_optimizer(config=OptimizerConfig(optimizer="sgd", lr=0.1), model_chunks=[nn.Linear(4, 4)])
    assert isinstance(found, MegatronOptimizer) and isinstance(found.optimizer, torch.optim.SGD)
