"""LoRA of ``peft`` over sharded models: built on the meta device, trained, saved, and loaded by plain ``peft``; on two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained, load_pretrained, save_pretrained
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CHECKS = RankChecks(__name__)
TOKENS = torch.arange(24).view(2, 12)


def _base(**fields: Any) -> Any:
    warnings.simplefilter("default")
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
    return transformers.LlamaForCausalLM(config)


def _adapted(model: Any, **fields: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **fields))


@CHECKS.on(2)
def what_comes_after_sharding_is_refused() -> None:
    """FSDP2 takes adapters that come afterwards, and each rank trains its own."""
    model = fully_shard_pretrained(_base())
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM must keep its rows.*call it before fully_shard"):
        model.resize_token_embeddings(72)
    adapted = _adapted(model)
    with pytest.raises(RuntimeError, match=r"lora_A.* was added to .* after fully_shard"):
        adapted(input_ids=TOKENS)


@CHECKS.on(2)
def adapters_are_trained_saved_and_loaded_by_peft() -> None:
    for ties in (False, True):
        torch.manual_seed(2)
        plain = _base(tie_word_embeddings=ties).eval()
        with shared_folder() as folder:
            if dist.get_rank() == 0:
                plain.save_pretrained(f"{folder}/base")
            dist.barrier()
            with torch.device("meta"):
                model = _adapted(_base(tie_word_embeddings=ties))
            torch.manual_seed(6)
            fully_shard_pretrained(model, initialize=False)
            load_pretrained(model, f"{folder}/base")
            model.eval()
            expected = plain(TOKENS).logits
            assert torch.equal(model(TOKENS).logits, expected)  # B is zero
            first = [p for name, p in model.named_parameters() if "lora_A" in name]
            assert all(p.full_tensor().std() > 0.01 for p in first)
            trained = [p for p in model.parameters() if p.requires_grad]
            assert len(trained) == 2 * 2 * 2
            optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.05))
            for _ in range(3):
                model(input_ids=TOKENS, labels=TOKENS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            tuned = model(TOKENS).logits.detach()
            assert not torch.allclose(tuned, expected)
            with model.disable_adapter():
                assert torch.equal(model(TOKENS).logits, expected)
            assert torch.equal(model(TOKENS).logits, tuned)
            save_pretrained(model, f"{folder}/adapter")
            again = peft.PeftModel.from_pretrained(
                transformers.LlamaForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter"
            ).eval()
            assert torch.equal(again(TOKENS).logits, tuned)
            prompt = TOKENS[:1, : 4 + dist.get_rank()]
            settings = {"max_new_tokens": 3 + 5 * dist.get_rank(), "do_sample": False}
            made = model.generate(input_ids=prompt, **settings)
            assert torch.equal(made, again.generate(input_ids=prompt, **settings))
            with pytest.raises(ValueError, match="is saved by its PeftModel"):
                save_pretrained(model.get_base_model(), f"{folder}/wrong")


@CHECKS.on(2)
def adapters_that_cannot_be_served_are_refused() -> None:
    with torch.device("meta"):
        model = _adapted(_base(), modules_to_save=["lm_head"])
    with shared_folder() as folder:
        fully_shard_pretrained(model, initialize=False)
        with pytest.raises(NotImplementedError, match="must be LoRA without modules_to_save"):
            save_pretrained(model, folder)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_adapters(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
