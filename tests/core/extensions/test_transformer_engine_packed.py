"""Packed samples through transformer-engine's attention give what the local one gives, padded or with tokens behind them.

The package is a stand-in here, which leaves rows of no sample unwritten (NaN) and takes no sample longer than it was told.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.data.documents import WithDocuments, collate, documents_of
from tests.support.fake_transformer_engine import fake_transformer_engine  # noqa: F401

pytestmark = pytest.mark.usefixtures("fake_transformer_engine")
STARTS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)
PADDED = torch.tensor([0, 8, 10, 20, 24], dtype=torch.int64)
NUM_TOKENS = 24


def _gpt(*, te: bool) -> GPTModel:
    fields: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(**fields, hidden_dropout=0.0, attention_dropout=0.0)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
    return GPTModel(config, spec, 40, 32, position_embedding_type="rope", pg_collection=None)


def _losses_and_gradients(model: GPTModel, packed: PackedSeqParams, own: torch.Tensor) -> tuple[torch.Tensor, Any]:
    tokens = torch.randint(0, 40, (1, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(3))
    losses = model(tokens[:, :-1], None, None, labels=tokens[:, 1:], packed_seq_params=packed)
    (losses[0] * own).sum().backward()
    return losses[0][own.bool()], [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("packed", "own"),
    [
        (lambda: PackedSeqParams("thd", PADDED, PADDED), [1] * NUM_TOKENS),
        (lambda: PackedSeqParams("thd", STARTS, STARTS, max_seqlen_q=9, max_seqlen_kv=9), [1] * 18 + [0] * 6),
        (
            # The longest sample has 9 tokens, 10 with its padding.
            lambda: PackedSeqParams("thd", STARTS, STARTS, PADDED, PADDED, 9, 9),
            [1] * 5 + [0] * 3 + [1, 0] + [1] * 9 + [0] + [1] * 3 + [0],
        ),
        (lambda: PackedSeqParams("thd", STARTS[None], STARTS[None], total_tokens=NUM_TOKENS), [1] * 18 + [0] * 6),
    ],
    ids=["whole", "tokens behind", "padded", "in a row of a batch"],
)
def test_a_pack_gives_what_the_local_attention_gives(packed: Any, own: list[int]) -> None:
    mask = torch.tensor(own, dtype=torch.float32)
    expected, gradients = _losses_and_gradients(_gpt(te=False), packed(), mask)
    losses, own_gradients = _losses_and_gradients(_gpt(te=True), packed(), mask)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert sum(float(gradient.norm()) for gradient in own_gradients) == pytest.approx(
        sum(float(gradient.norm()) for gradient in gradients), rel=1e-4
    )


def test_documents_of_rows_give_what_the_local_attention_gives() -> None:
    """Each of two rows has its own; the package gets all rows as one pack."""
    samples = WithDocuments([{"tokens": row} for row in torch.randint(0, 4, (2, 13))], 3)
    batch = collate([samples[0], samples[1]])
    results = []
    for te in (False, True):
        model = _gpt(te=te)
        labels = batch["tokens"].roll(-1, 1)
        losses = model(batch["tokens"], None, None, labels=labels, packed_seq_params=documents_of(batch))
        losses.sum().backward()
        norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
        results.append((losses.detach(), norms.sum()))
    (expected, norm), (given, own_norm) = results
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_norm, norm, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("starts", [[0, 5, 3], [1, 5], [0, NUM_TOKENS + 1]])
def test_starts_that_no_pack_has_are_named(starts: list[int]) -> None:
    packed = PackedSeqParams("thd", torch.tensor(starts), torch.tensor(starts))
    with pytest.raises(ValueError, match=f"must grow from 0 to at most the {NUM_TOKENS} tokens of the pack, got"):
        _losses_and_gradients(_gpt(te=True), packed, torch.ones(NUM_TOKENS))
