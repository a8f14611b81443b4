"""Trainers of ``trl`` over sharded models, against themselves over DDP, on two ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

CHECKS = RankChecks(__name__)


def _model(**fields: Any) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(num_key_value_heads=2, vocab_size=64, pad_token_id=0, **sizes, **fields)
    return transformers.LlamaForCausalLM(config)


def _tokenizer() -> Any:
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *map(str, range(62))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def _texts(num_rows: int, seed: int) -> list[str]:
    rows = torch.randint(0, 62, (num_rows, 7), generator=torch.Generator().manual_seed(seed))
    return [" ".join(str(int(word)) for word in row[: 4 + index % 4]) for index, row in enumerate(rows)]


def _settings(folder: str, name: str) -> dict[str, Any]:
    # What torchrun sets: accelerate asks for it.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2", HF_HUB_OFFLINE="1")
    os.environ.update(HF_DATASETS_CACHE=f"{folder}/cache")
    return {
        "output_dir": str(Path(folder) / name),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "seed": 3,
        "max_steps": 4,
        "gradient_checkpointing": False,
    }


def _lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def _logged(trainer: Any, *names: str) -> torch.Tensor:
    return torch.tensor(
        [[entry[name] for name in names] for entry in trainer.state.log_history if "grad_norm" in entry]
    )


@CHECKS.on(2)
def supervised_tuning_has_the_numbers_of_ddp() -> None:
    """All weights, of models with and without ties, and LoRA."""
    from megatron.core.distributed.fsdp.huggingface import FullyShardedTrainer

    class Tuner(FullyShardedTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    with shared_folder() as folder:
        rows = datasets.Dataset.from_dict({"text": _texts(40, 4)})
        for ties, adapts in ((False, False), (True, False), (False, True)):
            runs = []
            for kind in (trl.SFTTrainer, Tuner):
                trainer = kind(
                    _model(tie_word_embeddings=ties),
                    trl.SFTConfig(**_settings(folder, f"{kind.__name__}{ties}{adapts}"), max_length=16),
                    train_dataset=rows,
                    processing_class=_tokenizer(),
                    peft_config=_lora() if adapts else None,
                )
                trainer.train()
                runs.append(trainer)
            plain, ours = runs
            expected, found = (_logged(run, "loss", "grad_norm", "mean_token_accuracy") for run in runs)
            assert expected.shape == (4, 3)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            ours.save_model()
            tokens = torch.arange(2, 14).view(1, -1)
            where = ours.args.output_dir
            again = transformers.LlamaForCausalLM.from_pretrained(where) if not adapts else _model()
            again = peft.PeftModel.from_pretrained(again, where) if adapts else again
            with torch.no_grad():
                logits = plain.accelerator.unwrap_model(plain.model)(tokens).logits
                torch.testing.assert_close(again(tokens).logits, logits, rtol=1e-3, atol=1e-3)


@CHECKS.on(2)
def the_reference_of_preferences_is_the_model_without_adapters() -> None:
    from megatron.core.distributed.fsdp.huggingface import FullyShardedTrainer

    class Tuner(FullyShardedTrainer, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen")
    with shared_folder() as folder:
        columns = {"prompt": _texts(40, 1), "chosen": _texts(40, 2), "rejected": _texts(40, 3)}
        rows = datasets.Dataset.from_dict(columns)
        runs = []
        for kind in (trl.DPOTrainer, Tuner):
            trainer = kind(
                _model(),
                args=trl.DPOConfig(**_settings(folder, kind.__name__), max_length=16),
                train_dataset=rows,
                processing_class=_tokenizer(),
                peft_config=_lora(),
            )
            trainer.train()
            runs.append(trainer)
        expected, found = (_logged(run, *names) for run in runs)
        assert expected.shape == (4, 5) and expected[-1, 2].abs() > 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        with pytest.raises(NotImplementedError, match="precompute_ref_log_probs must be False"):
            arguments = trl.DPOConfig(**_settings(folder, "early"), precompute_ref_log_probs=True)
            Tuner(_model(), args=arguments, train_dataset=rows, processing_class=_tokenizer(), peft_config=_lora())
        model, tokens = runs[1].model.eval(), torch.arange(2, 14).view(1, -1)
        with torch.no_grad():
            expected = _model().eval()(tokens).logits
            assert not torch.allclose(model(tokens).logits, expected)
            with model.disable_adapter():
                torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_trl(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
