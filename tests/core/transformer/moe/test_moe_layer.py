"""Mixture-of-experts layers in a GPT: their places, names, refusals and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer, has_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_moe import FIELDS, build_moe_gpt, mean_loss


def _gradients(model: GPTModel, *data_ranks: int) -> dict[str, torch.Tensor]:
    """Return the gradients of the sum of the losses of these ranks' tokens; all forwards come before all backwards."""
    model.zero_grad()
    for loss in [mean_loss(model, rank) for rank in data_ranks]:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("freq", "expected"),
    [(1, [True] * 4), (2, [True, False] * 2), (3, [True, False, False, True]), ([0, 1, 1, 0], None)],
)
def test_the_frequency_says_which_layers_have_experts(freq: Any, expected: list[bool] | None) -> None:
    model = build_moe_gpt(num_layers=4, moe_layer_freq=freq)
    kinds = [isinstance(layer.mlp, MoELayer) for layer in model.decoder.layers]
    assert kinds == (expected or [bool(value) for value in freq])
    assert kinds == [has_experts(model.config, number) for number in range(1, 5)]


def test_a_dense_model_of_the_block_spec_has_no_experts() -> None:
    dense = {name: value for name, value in FIELDS.items() if "moe" not in name}
    specs = get_gpt_decoder_block_spec(TransformerConfig(**dense)).layer_specs or []
    assert [spec.submodules.mlp.module for spec in specs] == [MLP, MLP]


def test_names_are_megatron_cores_whether_grouped_or_not() -> None:
    names = {name for name, _ in build_moe_gpt(moe_shared_expert_gate=True).named_parameters()}
    layer = "decoder.layers.0.mlp."
    assert {name[len(layer) :] for name in names if name.startswith(layer)} == {
        "router.weight",
        *(f"experts.local_experts.{index}.linear_fc{number}.weight" for index in range(4) for number in (1, 2)),
        "shared_experts.linear_fc1.weight",
        "shared_experts.linear_fc2.weight",
        "shared_experts.gate_weight",
    }
    grouped = build_moe_gpt(moe_shared_expert_gate=True, moe_grouped_gemm=True)
    assert {name for name, _ in grouped.named_parameters()} == names


def test_routed_experts_alone_are_sharded_over_their_own_ranks() -> None:
    model = build_moe_gpt(moe_shared_expert_gate=True)
    marked = {name for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    assert marked == {name for name, _ in model.named_parameters() if ".local_experts." in name}


def test_the_shared_expert_is_added_times_its_gate() -> None:
    """A gate weight of zeros is a gate of 1/2."""
    model = build_moe_gpt(moe_shared_expert_gate=True).eval()
    layer: Any = model.decoder.layers[0].mlp
    x = torch.randn(5, 2, 16)
    with torch.no_grad():
        layer.shared_experts.gate_weight.zero_()
        shared = MLP.forward(layer.shared_experts._mlp[0], x)[0]
        output = layer(x)[0]
        layer.shared_experts = None
        torch.testing.assert_close(output, layer(x)[0] + shared / 2)


@pytest.mark.parametrize("fields", [{}, {"moe_expert_capacity_factor": 0.75}], ids=["dropless", "dropped"])
def test_two_runs_are_bitwise_equal(fields: dict[str, Any]) -> None:
    first, second = (_gradients(build_moe_gpt(**fields), 0) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_forwards_may_come_before_their_backwards() -> None:
    """A pipeline stage has several microbatches in flight, so the layer must keep no state of a dispatch."""
    model = build_moe_gpt()
    together, one, other = _gradients(model, 0, 1), _gradients(model, 0), _gradients(model, 1)
    for name in together:
        torch.testing.assert_close(together[name], one[name] + other[name])


def test_recomputed_layers_have_the_same_gradients() -> None:
    """The auxiliary losses count once, though the router runs twice."""
    recomputed = build_moe_gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    expected, ours = _gradients(build_moe_gpt(), 0), _gradients(recomputed, 0)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_padding_mask_is_refused_where_routers_would_ignore_it() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(NotImplementedError, match=r"GPTModel.forward\(padding_mask=...\) is not served, got Tensor"):
        build_moe_gpt()(tokens, None, None, padding_mask=torch.zeros(1, 4, dtype=torch.bool))


def test_enough_capacity_drops_nothing_and_little_capacity_something() -> None:
    plain = mean_loss(build_moe_gpt(), 0)
    for pads in (False, True):
        fields: dict[str, Any] = {"moe_pad_expert_input_to_capacity": pads}
        torch.testing.assert_close(mean_loss(build_moe_gpt(moe_expert_capacity_factor=4.0, **fields), 0), plain)
        assert mean_loss(build_moe_gpt(moe_expert_capacity_factor=0.5, **fields), 0) != plain


def test_padding_to_capacity_changes_shapes_but_no_numbers() -> None:
    padded = build_moe_gpt(moe_expert_capacity_factor=0.75, moe_pad_expert_input_to_capacity=True)
    expected, ours = _gradients(build_moe_gpt(moe_expert_capacity_factor=0.75), 0), _gradients(padded, 0)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name])


def test_weights_made_on_the_meta_device_are_those_of_a_model_made_at_once() -> None:
    with torch.device("meta"):
        model = build_moe_gpt(moe_shared_expert_gate=True)
    model.to_empty(device="cpu")
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
    for (name, ours), theirs in zip(
        model.named_parameters(), build_moe_gpt(moe_shared_expert_gate=True).parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        assert getattr(ours, "allreduce", True) == getattr(theirs, "allreduce", True), name


def _build(config_fields: dict[str, Any], spec: Any) -> GPTModel:
    config = TransformerConfig(**{**FIELDS, **config_fields})
    return GPTModel(config, spec, vocab_size=48, max_sequence_length=12, position_embedding_type="rope")


def test_a_dense_spec_for_a_configuration_with_experts_is_refused() -> None:
    """It would silently be a dense model."""
    with pytest.raises(ValueError, match=r"layer 1 must be a mixture of experts by .* got a spec with MLP"):
        _build({}, get_gpt_layer_local_spec())


def test_a_spec_with_experts_for_every_layer_is_refused_where_some_are_dense() -> None:
    with pytest.raises(ValueError, match=r"layer 2 must be dense by .* got a spec with MoELayer"):
        _build({"moe_layer_freq": 2}, get_gpt_layer_local_spec(num_experts=4))


def test_another_number_of_experts_in_the_spec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_experts must be TransformerConfig.num_moe_experts, got 8 and 4"):
        _build({}, get_gpt_layer_local_spec(num_experts=8))


def test_a_grouped_spec_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_grouped_gemm must go with num_experts"):
        get_gpt_layer_local_spec(moe_grouped_gemm=True)


@pytest.mark.parametrize("name", ["ep", "expt_tp"])
def test_groups_that_the_configuration_does_not_know_are_refused(name: str) -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    config = TransformerConfig(**FIELDS)
    spec = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    groups = ProcessGroupCollection(**{name: TwoRanks()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"pg_collection.{name} must have as many ranks .*\(1:.*got 2"):
        MoELayer(config, spec.submodules, pg_collection=groups)


def _by_hand(
    layer: Any, hidden: torch.Tensor, apply: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Sum over each token's experts of ``apply(expert, token [h], probability)``, one after the other."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    routing = layer.router(hidden, dense=False)
    rows = []
    for token, probs, experts in zip(tokens, routing.probs, routing.experts, strict=True):
        results = [
            apply(layer.experts.local_experts[int(expert)], token.unsqueeze(0), prob)
            for prob, expert in zip(probs, experts, strict=True)
        ]
        rows.append(torch.stack(results).sum(dim=0))
    return torch.cat(rows).view(*hidden.shape[:-1], -1)


def _mlp(expert: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, expert.linear_fc1.weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, expert.linear_fc2.weight)


def test_latent_experts_compute_between_two_projections() -> None:
    """Router and shared expert see the hidden states themselves."""
    layer: Any = build_moe_gpt(moe_latent_size=8).decoder.layers[0].mlp
    first, second = layer.fc1_latent_proj.weight, layer.fc2_latent_proj.weight
    assert (first.shape, second.shape) == ((8, 16), (16, 8))
    hidden = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    latent = _by_hand(layer, hidden, lambda expert, x, prob: prob * _mlp(expert, F.linear(x, first)))
    expected = F.linear(latent, second) + layer.shared_experts(hidden)
    output = layer(hidden)[0]
    torch.testing.assert_close(output, expected)
    weights = [hidden, first, second, layer.experts.local_experts[0].linear_fc1.weight]
    ours = torch.autograd.grad(output.sin().sum(), weights)
    # The router's own backward adds its losses to the first one's gradients alone.
    layer.eval()
    output = layer(hidden)[0]
    expected = F.linear(_by_hand(layer, hidden, lambda e, x, p: p * _mlp(e, F.linear(x, first))), second)
    expected = expected + layer.shared_experts(hidden)
    evaluated, theirs = (torch.autograd.grad(y.sin().sum(), weights) for y in (output, expected))
    torch.testing.assert_close(evaluated, theirs)
    torch.testing.assert_close(ours[1:], theirs[1:])


def test_probabilities_on_the_input_scale_what_experts_read() -> None:
    fields: dict[str, Any] = {
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": None,
    }
    layer: Any = build_moe_gpt(**fields, moe_apply_probs_on_input=True).decoder.layers[0].mlp
    hidden = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer.eval()
    expected = _by_hand(layer, hidden, lambda expert, x, prob: _mlp(expert, prob * x))
    output = layer(hidden)[0]
    torch.testing.assert_close(output, expected)
    weights = [hidden, layer.router.weight, layer.experts.local_experts[0].linear_fc1.weight]
    grads = (torch.autograd.grad(y.sin().sum(), weights) for y in (output, expected))
    torch.testing.assert_close(*grads)
