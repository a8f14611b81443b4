"""Samples that are packed into one row give what they give one by one: losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams, flatten_batch_for_packed_sequences
from tests.support.tiny_gpt import build_gpt

LENGTHS = (5, 1, 9, 3)
STARTS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)


def _tokens(num: int) -> torch.Tensor:
    return torch.randint(0, 30, (1, num + 1), generator=torch.Generator().manual_seed(3))


def _model(position_embedding: str = "rope", **fields: Any) -> torch.nn.Module:
    return build_gpt({"position_embedding_type": position_embedding, "max_sequence_length": 32}, **fields).eval()


def _positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def _one_by_one(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    losses, start = [], 0
    for length in LENGTHS:
        inputs, labels = tokens[:, start : start + length], tokens[:, start + 1 : start + length + 1]
        losses.append(model(inputs, _positions((length,)), None, labels=labels))
        start += length
    return torch.cat(losses, dim=1)


@pytest.mark.parametrize(
    ("position_embedding", "fields"),
    [
        ("rope", {}),
        ("learned_absolute", {}),
        ("rope", {"num_query_groups": 2, "apply_rope_fusion": True}),
        ("rope", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("rope", {"recompute_granularity": "selective"}),
    ],
)
def test_a_pack_gives_what_its_samples_give_one_by_one(position_embedding: str, fields: dict[str, Any]) -> None:
    model, tokens = _model(position_embedding, hidden_dropout=0.0, attention_dropout=0.0, **fields).train(), _tokens(18)
    expected = _one_by_one(model, tokens)
    expected.sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=STARTS, cu_seqlens_kv=STARTS, max_seqlen_q=9)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    losses = model(inputs, _positions(LENGTHS), None, labels=labels, packed_seq_params=packed)
    # Scores of a row of the mask are summed in another order than those of a short sample.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-5)
    whole = model(inputs, _positions((18,)), None, labels=labels)
    assert not torch.allclose(whole, expected, rtol=1e-3), "without the samples' starts attention sees all of the row"


def test_padding_between_samples_changes_nothing_of_them() -> None:
    model, tokens = _model(), _tokens(18)
    expected = _one_by_one(model, tokens)
    padded_starts = torch.tensor([0, 8, 10, 20, 24], dtype=torch.int32)
    rows, labels, own = torch.zeros(2, 26, dtype=torch.long), torch.zeros(1, 26, dtype=torch.long), torch.zeros(26)
    for start, padded, length in zip(STARTS.tolist(), padded_starts.tolist(), LENGTHS, strict=False):
        rows[0, padded : padded + length] = tokens[0, start : start + length]
        labels[0, padded : padded + length] = tokens[0, start + 1 : start + length + 1]
        own[padded : padded + length] = 1
    packed = PackedSeqParams("thd", STARTS, STARTS, padded_starts, padded_starts)
    losses = model(rows[:1], None, None, labels=labels, packed_seq_params=packed)
    torch.testing.assert_close(losses[0, own.bool()], expected[0], rtol=1e-5, atol=1e-5)


def test_the_index_of_each_tokens_sample_is_as_in_megatron_core() -> None:
    packed = PackedSeqParams("thd", torch.tensor([0, 5, 7, 11]), total_tokens=16)
    assert packed.seq_idx is not None and packed.seq_idx.dtype is torch.int32
    assert packed.seq_idx.tolist() == [[0] * 5 + [1] * 2 + [2] * 4 + [3] * 5]
    assert packed.positions(16).tolist() == [*range(5), *range(2), *range(4), *range(5)]


def test_a_batch_of_packs_becomes_one_pack() -> None:
    batch = {
        "tokens": torch.arange(12).view(2, 6),
        "labels": None,
        "cu_seqlens": torch.tensor([[0, 2, 6, 6], [0, 1, 4, 6]]),
        "max_seqlen": torch.tensor([4, 3]),
    }
    flat = flatten_batch_for_packed_sequences(batch)
    assert flat["tokens"].tolist() == [list(range(12))] and flat["labels"] is None
    assert flat["cu_seqlens"].tolist() == [[0, 2, 6, 7, 10, 12]] and flat["max_seqlen"].tolist() == [4]
    assert flatten_batch_for_packed_sequences({"tokens": 1}) == {"tokens": 1}


@pytest.mark.parametrize(
    ("packed", "rows", "error", "message"),
    [
        (PackedSeqParams("thd", STARTS), 2, ValueError, "a pack must be a batch of one row, got 2"),
        (PackedSeqParams("thd"), 1, ValueError, "cu_seqlens_q must be given with qkv_format 'thd', got None"),
        (PackedSeqParams("packed", STARTS), 1, ValueError, "qkv_format must be 'thd' or 'sbhd', got 'packed'"),
        (PackedSeqParams("thd", STARTS, local_cp_size=2), 1, NotImplementedError, "must not be split over context"),
        (PackedSeqParams("thd", STARTS, STARTS[:3]), 1, NotImplementedError, "cu_seqlens_kv must be cu_seqlens_q"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    packed: PackedSeqParams, rows: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _model()(torch.zeros(rows, 18, dtype=torch.long), None, None, packed_seq_params=packed)


def test_without_packing_nothing_changes() -> None:
    model, tokens = _model(), _tokens(18)[:, :-1]
    assert torch.equal(model(tokens, None, None, packed_seq_params=PackedSeqParams("sbhd")), model(tokens, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_the_flash_kernel_keeps_samples_apart(groups: int) -> None:
    fields: dict[str, Any] = {"num_query_groups": groups, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"kv_channels": 16, "bf16": True, "params_dtype": torch.bfloat16}
    with torch.device("cuda"):
        model = _model(**fields)
    tokens, starts = _tokens(18).cuda(), STARTS.cuda()
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=9)
    losses = model(tokens[:, :-1], None, None, labels=tokens[:, 1:], packed_seq_params=packed)
    by_mask = model(
        tokens[:, :-1], None, None, labels=tokens[:, 1:], packed_seq_params=PackedSeqParams("thd", starts, starts)
    )
    torch.testing.assert_close(losses, by_mask, rtol=2e-2, atol=2e-2)  # bf16 kernels round in other places
    losses.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
