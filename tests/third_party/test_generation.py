"""``generate`` of sharded models of ``transformers``: the tokens of the unsharded model, and all ranks end together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained
from tests.support.rank_checks import RankChecks

transformers = pytest.importorskip("transformers")

CHECKS = RankChecks(__name__)


def _model(**fields: Any) -> Any:
    warnings.simplefilter("default")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        **fields,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _prompt() -> torch.Tensor:
    return torch.arange(5 + 3 * dist.get_rank()).view(1, -1) + dist.get_rank()


@CHECKS.on(2)
def ranks_that_generate_unequal_numbers_of_tokens_end_together() -> None:
    """The rank that is done runs along: its weights are the other's too."""
    for ties in (False, True):
        plain = _model(tie_word_embeddings=ties)
        by_policy, by_hand = (_model(tie_word_embeddings=ties) for _ in range(2))
        fully_shard_pretrained(by_policy)
        for layer in by_hand.model.layers:
            fully_shard(layer)
        fully_shard(by_hand)
        for settings in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}, {"do_sample": True, "top_k": 5}):
            limit = {"max_new_tokens": 3 + 9 * dist.get_rank(), **settings}
            torch.manual_seed(9)
            expected = plain.generate(_prompt(), **limit)
            for model in (by_policy, by_hand):
                torch.manual_seed(9)
                assert torch.equal(model.generate(_prompt(), **limit), expected)
        # Training goes on.
        loss = by_policy(_prompt(), labels=_prompt()).loss
        loss.backward()
        assert all(p.grad is not None for p in by_policy.parameters())


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_generation(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
