"""The ``Trainer`` of ``transformers`` over sharded models, against itself over DDP, on two ranks."""

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
pytest.importorskip("accelerate")

CHECKS = RankChecks(__name__)


def _model() -> Any:
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
    )
    return transformers.LlamaForCausalLM(config)


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(1, 64, (40, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _arguments(folder: Path, **fields: Any) -> Any:
    # What torchrun sets: accelerate asks for it.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
    }
    settings |= {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "seed": 3,
        "max_steps": 5,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**settings, **fields})


def _losses(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@CHECKS.on(2)
def losses_and_norms_are_those_of_ddp() -> None:
    """With two microbatches, clipping and a schedule; then the model is saved, and plain transformers has its losses."""
    from megatron.core.distributed.fsdp.huggingface import FullyShardedTrainer

    with shared_folder() as folder:
        plain = transformers.Trainer(_model(), _arguments(Path(folder) / "ddp"), train_dataset=_data())
        plain.train()
        ours = FullyShardedTrainer(
            _model(), _arguments(Path(folder) / "ours"), train_dataset=_data(), eval_dataset=_data()[:8]
        )
        ours.train()
        expected, found = torch.tensor(_losses(plain)), torch.tensor(_losses(ours))
        assert expected.shape == (5, 2) and torch.allclose(found, expected, rtol=1e-4), (expected, found)
        loss = ours.evaluate()["eval_loss"]
        ours.save_model()
        again = transformers.LlamaForCausalLM.from_pretrained(Path(folder) / "ours").eval()
        rows = torch.stack([row["input_ids"] for row in _data()[:8]])
        with torch.no_grad():
            assert again(rows, labels=rows).loss.item() == pytest.approx(loss, rel=1e-5)


@CHECKS.on(2)
def training_resumes_where_it_was() -> None:
    from megatron.core.distributed.fsdp.huggingface import FullyShardedTrainer

    with shared_folder() as folder:
        whole = FullyShardedTrainer(_model(), _arguments(Path(folder) / "whole"), train_dataset=_data())
        whole.train()
        saves = {"save_strategy": "steps", "save_steps": 3}
        first = FullyShardedTrainer(_model(), _arguments(Path(folder) / "cut", **saves), train_dataset=_data())
        first.train()
        second = FullyShardedTrainer(_model(), _arguments(Path(folder) / "cut", **saves), train_dataset=_data())
        second.train(resume_from_checkpoint=str(Path(folder) / "cut" / "checkpoint-3"))
        assert _losses(second) == _losses(whole)
        for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_trainer(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
