"""Documents in a sample are kept apart: each leads to the numbers that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.data.documents import WithDocuments, collate, documents_of

EOD, LENGTH = 9, 8
ROWS = [[1, 2, EOD, 3, 4, 5, EOD, 6], [EOD, 1, 2, 3, EOD, EOD, 4, 5]]
DOCUMENTS = [[(0, 3), (3, 7), (7, 8)], [(0, 1), (1, 5), (5, 6), (6, 8)]]


def _batch() -> dict[str, torch.Tensor]:
    samples = WithDocuments([{"tokens": torch.tensor(row)} for row in ROWS], EOD)
    assert len(samples) == 2
    return collate([samples[0], samples[1]])


def test_a_batch_says_where_documents_begin() -> None:
    """The end of a document belongs to it. Starts count over the rows, which begin documents too."""
    batch = _batch()
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 3, 3]]
    assert batch["document_starts"].tolist() == [0, 3, 7, 8, 9, 13, 14, 16]
    assert documents_of({"tokens": batch["tokens"]}) is None
    assert collate([{"tokens": torch.tensor([1])}]).keys() == {"tokens"}


def test_all_layers_share_what_kernels_are_told_of_the_documents() -> None:
    """What is found by reading a device would make the host wait in each layer. No document is longer than a row."""
    documents = documents_of(_batch())
    assert documents is not None and documents.as_pack() is documents.as_pack()
    starts, longest = documents.as_pack().covering(2 * LENGTH, torch.device("cpu"))
    assert starts is documents.cu_seqlens_q and longest == LENGTH


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"positions": "rope", "window_size": (1, 0), "softmax_type": "learnable"},
        {
            "positions": "rope",
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"attention_backend": "unfused", "recompute_granularity": "selective"},
    ],
    ids=str,
)
def test_documents_have_the_logits_and_gradients_that_they_have_alone(fields: dict[str, Any]) -> None:
    """Learned positions are reset by the data; rotary ones need not be. fp32: sums have another order."""
    fields = dict(fields)
    positions: Any = fields.pop("positions", "learned_absolute")
    base: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "init_method_std": 0.3}
    config = TransformerConfig(**{"hidden_dropout": 0.0, "attention_dropout": 0.0, **base, **fields})
    model = GPTModel(config, get_gpt_decoder_block_spec(config), 10, LENGTH, position_embedding_type=positions)
    batch = _batch()
    alone = [
        model(batch["tokens"][row : row + 1, begin:end], torch.arange(end - begin)[None], None)[0]
        for row in range(2)
        for begin, end in DOCUMENTS[row]
    ]
    position_ids = torch.cat([torch.arange(end - begin) for row in DOCUMENTS for begin, end in row]).view(2, LENGTH)
    together = model(batch["tokens"], position_ids, None, packed_seq_params=documents_of(batch))
    torch.testing.assert_close(together.flatten(0, 1), torch.cat(alone), rtol=1e-4, atol=1e-5)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(together.square().sum(), parameters)
    theirs = torch.autograd.grad(torch.cat(alone).square().sum(), parameters)
    for got, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-3, atol=1e-4 * float(true.abs().max()))


def test_tokens_of_the_next_document_are_not_predicted_ahead() -> None:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    batch = _batch()
    rolled, _ = roll_tensor(batch["tokens"], packed_seq_params=documents_of(batch))
    assert rolled.tolist() == [[2, EOD, 0, 4, 5, EOD, 0, 0], [0, 2, 3, EOD, 0, 0, 5, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"window_size": (20, 0), "softmax_type": "learnable"}], ids=str)
def test_flash_attention_keeps_documents_apart(fields: dict[str, Any]) -> None:
    """bf16 against all scores in memory in fp32."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    samples = [{"tokens": torch.randint(0, 40, (256,), generator=torch.Generator().manual_seed(i))} for i in range(3)]
    data = WithDocuments(samples, 7)
    batch = {key: value.cuda() for key, value in collate([data[i] for i in range(3)]).items()}
    results = []
    for dtype, backend in ((torch.bfloat16, "auto"), (torch.float32, "unfused")):
        base: dict[str, Any] = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
        config = TransformerConfig(**{**base, "attention_dropout": 0.0, "attention_backend": backend, **fields})
        with torch.device("cuda"):
            attention = DotProductAttention(config, 1)
        generator = torch.Generator().manual_seed(9)
        heads = [torch.randn(256, 3, n, 64, generator=generator).to("cuda", torch.bfloat16) for n in (4, 2, 2)]
        heads = [x.to(dtype).requires_grad_() for x in heads]
        context = attention(*heads, None, packed_seq_params=documents_of(batch))
        context.float().square().sum().backward()
        results.append([context, *(x.grad for x in heads)])
    for got, true in zip(*results, strict=True):
        assert (got.float() - true).abs().max() < 0.02 * true.abs().max()
