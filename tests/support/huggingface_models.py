"""Tiny Hugging Face models, with the logits that transformers computes: see fixtures/huggingface/make.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron.core.distributed.fsdp.checkpoint import TensorReader
from megatron.training.formats.architecture import build_model

FOLDER = Path(__file__).parent / "fixtures" / "huggingface"
WITH_GRADIENTS = (
    "deepseek_v3",
    "deepseek_v3_dense",
    "gpt_oss",
    "gemma3_text",
    "qwen3_moe",
    "qwen3_windows",
    "qwen3_next",
)
NAMES = (*WITH_GRADIENTS, "gpt2", "llama", "llama3", "mixtral", "qwen2", "qwen3")
VOCAB_SIZE = 40


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def expected(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [2, 16], and the logits [2, 16, 40] of transformers."""
    tensors = load_file(FOLDER / f"{name}.safetensors")
    return tensors["tokens"], tensors["logits"]


def expected_gradients(name: str) -> dict[str, torch.Tensor]:
    """Gradients of transformers' mean cross entropy of the next token, by the names of its files."""
    tensors = load_file(FOLDER / f"{name}.safetensors")
    return {key.removeprefix("grad."): value for key, value in tensors.items() if key.startswith("grad.")}


def logits_of(reader: TensorReader, architecture: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Our model's logits of the ids that are no padding, with the weights that a reader has."""
    # Megatron-LM's fused GELU is the tanh form, which is GPT-2's.
    model = build_model(architecture, bias_activation_fusion=architecture["activation_func"] == "gelu").eval()
    weights = {name: reader.tensor(name) for name in model.state_dict()}
    model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return logits[..., :VOCAB_SIZE]
