"""Multi-token prediction against a plain computation, and what is sent, rolled and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.context_parallel import get_batch_on_this_cp_rank
from megatron.core.transformer.moe.router import record_auxiliary_losses, set_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper, roll_tensor
from megatron.core.transformer.pipeline_layers import embedding_ranks, stages_of, wide_messages
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.telemetry.flops import flops_per_sample
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt, random_tokens

DEPTH, WEIGHT, MICROBATCHES = 2, 0.3, 4
MTP: dict[str, Any] = {"mtp_num_layers": DEPTH, "mtp_loss_scaling_factor": WEIGHT}


def build(gpt_arguments: dict[str, Any] | None = None, **fields: Any) -> GPTModel:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **MTP | fields)
    spec = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), False)
    return build_gpt({"mtp_block_spec": spec, **(gpt_arguments or {})}, **MTP | fields)


def plain_losses(model: Any, tokens: Tensor, positions: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the main model's losses, and the mean loss of each further layer, from the weights alone.

    The layers of the model are taken as they are; what is around them is plain PyTorch on whole sequences.
    """
    parts = dict(model.named_modules())
    word = model.embedding.word_embeddings.weight
    place = model.embedding.position_embeddings.weight

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,), parts[name].weight, parts[name].bias)

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return (word[tokens] + place[positions]).transpose(0, 1)

    def moved(x: Tensor, steps: int) -> Tensor:
        return torch.cat((x[:, steps:], torch.zeros_like(x[:, :steps])), dim=1)

    def losses_of(states: Tensor, labels: Tensor) -> Tensor:
        logits = states.transpose(0, 1) @ word.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    states = embed(tokens, positions)
    for layer in model.decoder.layers:
        states = layer(states)
    states = norm("decoder.final_layernorm", states)
    main = (losses_of(states, labels) * mask).sum()
    means = []
    for depth in range(1, DEPTH + 1):
        prefix = f"mtp.layers.{min(depth, len(model.mtp.layers)) - 1}"
        ahead = embed(moved(tokens, depth), moved(positions, depth))
        both = torch.cat((norm(f"{prefix}.enorm", ahead), norm(f"{prefix}.hnorm", states)), dim=-1)
        states = parts[f"{prefix}.mtp_model_layer"](both @ parts[f"{prefix}.eh_proj"].weight.t())
        states = norm(f"{prefix}.final_layernorm", states)
        counts = moved(mask, depth)
        means.append((losses_of(states, moved(labels, depth)) * counts).sum() / counts.sum())
    return main, torch.stack(means)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("fields", [{}, {"mtp_use_repeated_layer": True}], ids=["layers", "one layer"])
def test_losses_and_gradients_are_those_of_plain_pytorch(fields: dict[str, Any], per_token: bool) -> None:
    shared = {"share_embeddings_and_output_weights": True}
    model = build(shared, calculate_per_token_loss=per_token, **fields)
    set_num_microbatches(model, MICROBATCHES)
    record = record_auxiliary_losses(model, model.config)
    assert record is not None and record.names == ("mtp_1 loss", "mtp_2 loss")
    tokens, positions, labels = random_tokens(num_samples=3, length=9)
    mask = (torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) < 0.7).float()
    losses = model(tokens, positions, None, labels=labels, loss_mask=mask)
    divisor = 1.0 if per_token else MICROBATCHES * mask.sum()
    ((losses * mask).sum() / divisor).backward()
    got = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    main, means = plain_losses(model, tokens, positions, labels, mask)
    torch.testing.assert_close(record.take(torch.device("cpu")).float(), means.detach())
    torch.testing.assert_close((losses * mask).sum(), main)
    further = WEIGHT / DEPTH * means.sum()
    (main + further * mask.sum() if per_token else main / divisor + further / MICROBATCHES).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert got.keys() == expected.keys() and any(name.startswith("mtp.layers.0.eh_proj") for name in got)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, msg=name)


def test_without_gradients_or_labels_the_main_model_alone_counts() -> None:
    model, plain = build(), build_gpt()
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith("mtp.")})
    tokens, positions, labels = random_tokens()
    torch.testing.assert_close(model(tokens, positions, None), plain(tokens, positions, None))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens, positions, None, labels=labels), plain(tokens, positions, None, labels=labels)
        )


def test_positions_that_are_left_out_are_those_of_the_sequence() -> None:
    model = build()
    tokens, positions, labels = random_tokens()
    gradients = []
    for given in (positions, None):
        model.zero_grad()
        model(tokens, given, None, labels=labels).sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for with_positions, without in zip(*gradients, strict=True):
        torch.testing.assert_close(with_positions, without)


def test_sequences_of_a_row_are_rolled_one_by_one() -> None:
    row = torch.arange(1, 8).unsqueeze(0)
    ends = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    rolled, total = roll_tensor(row, packed_seq_params=params)
    assert rolled.tolist() == [[2, 3, 0, 0, 6, 7, 0]] and total == 18
    assert roll_tensor(row, return_sum=False)[0].tolist() == [[2, 3, 4, 5, 6, 7, 0]]
    assert roll_tensor(row.t(), dims=0)[0].flatten().tolist() == [2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(NotImplementedError, match="shifts=1"):
        roll_tensor(row, shifts=1)


def _rolled_parts() -> bool:
    group, whole = dist.group.WORLD, torch.arange(2 * 8).view(2, 8) + 1
    own = get_batch_on_this_cp_rank({"tokens": whole}, group)["tokens"]
    expected = get_batch_on_this_cp_rank({"tokens": roll_tensor(whole)[0]}, group)["tokens"]
    return torch.equal(roll_tensor(own, cp_group=group)[0], expected)


def test_parts_of_sequences_are_rolled_across_ranks() -> None:
    assert run_ranks(2, _rolled_parts) == [True, True]


@pytest.mark.parametrize(
    ("layout", "wide", "tied", "untied"),
    [("Ett|mmL", {}, (0, -1), (0, -1)), ("Et|t|mm|L", {"wide_from": 3, "width": 3}, (0, 2, -1), (0, 2))],
)
def test_who_has_the_embedding_and_who_gets_wide_messages(
    layout: str, wide: dict[str, int], tied: tuple[int, ...], untied: tuple[int, ...]
) -> None:
    ranks = 2 if layout.count("|") == 1 else 4
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=ranks,
        pipeline_model_parallel_layout=layout,
        **MTP,
    )
    assert wide_messages(config) == wide
    assert (embedding_ranks(config, ties=True), embedding_ranks(config, ties=False)) == (tied, untied)
    normed = [stage.has_final_norm for stage in stages_of(config)]
    assert normed.count(True) == 1 and stages_of(config)[normed.index(True)].decoder.stop == 2


def test_operations_of_the_further_layers_are_counted() -> None:
    def count(**fields: Any) -> int:
        config = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=4, **fields)
        return flops_per_sample(config, seq_length=8, vocab_size=VOCAB_SIZE)

    per_layer = (count() - 6 * 8 * 16 * VOCAB_SIZE) // 3
    assert count(**MTP) - count() == DEPTH * (per_layer + 6 * 8 * 16 * (VOCAB_SIZE + 2 * 16))


def test_no_layers_are_no_multi_token_prediction() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, mtp_num_layers=0)
    assert config.mtp_num_layers is None
    assert get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), False) is None
    model = build_gpt(mtp_num_layers=0)
    assert not any("mtp" in name for name, _ in model.named_modules())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="mtp_block_spec must be given"):
        build_gpt(**MTP)
    with pytest.raises(ValueError, match="mtp_num_layers must not be negative"):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, mtp_num_layers=-1)
    with pytest.raises(NotImplementedError, match="mtp_detach_heads"):
        fields: dict[str, Any] = {"mtp_num_layers": 1, "mtp_detach_heads": True}
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **fields)
    spec = get_gpt_mtp_block_spec(
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **MTP), get_gpt_layer_local_spec(), False
    )
    with pytest.raises(ValueError, match="mtp_block_spec must be given"):
        build_gpt({"mtp_block_spec": spec})
    with pytest.raises(ValueError, match="must hold mtp_num_layers"):
        build_gpt({"mtp_block_spec": spec}, mtp_num_layers=1)


class _Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)


def test_callers_read_the_losses_where_no_training_loop_records_them() -> None:
    model = build()
    tokens, positions, labels = random_tokens()
    MTPLossLoggingHelper.tracker.clear()  # of other tests in this process
    for _ in range(2):
        model(tokens, positions, None, labels=labels)
    values = MTPLossLoggingHelper.tracker["values"].clone()
    writer, totals = _Writer(), {"mtp_2 loss": torch.tensor(1.0)}
    MTPLossLoggingHelper.track_mtp_metrics(0.5, 3, writer, None, totals)
    torch.testing.assert_close(totals, {"mtp_2 loss": 1.0 + values[1] / 2, "mtp_1 loss": values[0] / 2})
    assert writer.scalars == {"mtp_1 loss": float(values[0] / 2), "mtp_2 loss": float(values[1] / 2)}
    assert not MTPLossLoggingHelper.tracker["values"].any()
    record = record_auxiliary_losses(model, model.config)
    assert record is not None
    model(tokens, positions, None, labels=labels)
    torch.testing.assert_close(record.take(torch.device("cpu")).float(), values / 2)
    assert not MTPLossLoggingHelper.tracker["values"].any()
    MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(1.0), None, DEPTH)
    assert not MTPLossLoggingHelper.tracker["values"].any()


def _tracked() -> list[float]:
    group, loss = dist.group.WORLD, torch.tensor(1.0 + dist.get_rank())
    MTPLossLoggingHelper.save_loss_to_tracker(loss, 1, DEPTH, reduce_group=group, avg_group=group)
    MTPLossLoggingHelper.reduce_loss_in_tracker()
    values: list[float] = MTPLossLoggingHelper.tracker["values"].tolist()
    return values


def test_losses_of_callers_are_summed_and_averaged_over_their_groups() -> None:
    assert run_ranks(2, _tracked) == [[0.0, 3.0]] * 2


def test_a_loss_of_a_caller_enters_backward_with_the_scale_of_the_step() -> None:
    states, loss = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    MTPLossAutoScaler.set_loss_scale(torch.tensor([0.25]))
    try:
        joined: Any = MTPLossAutoScaler.apply(states, loss)
        grads = torch.autograd.grad(joined.sum() * 3, (states, loss))
    finally:
        MTPLossAutoScaler.main_loss_backward_scale = None
    torch.testing.assert_close(grads, (torch.full((3,), 3.0), torch.full((2,), 0.25)))
