"""Packages that the settings of a run cannot do without."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron.core.tokenizers.prompt_formats import OF_TOKENIZER
from megatron.training.launch.gpt_config import why_no_fp8

if TYPE_CHECKING:
    from megatron.training.arguments import Settings


def missing_packages(settings: Settings, device_type: str) -> dict[str, str]:
    """Return what to do about each package that is needed and cannot be used here, by the package's name.

    Ranks: each alone.
    """
    faults = {}
    if (reason := why_no_fp8(settings.model, device_type)) is not None:
        faults["transformer-engine"] = reason
    log = settings.logging
    for flag, is_given, package in (
        ("--tensorboard-dir", bool(log.tensorboard_dir), "tensorboard"),
        ("--wandb-project", bool(log.wandb_project), "wandb"),
    ):
        if is_given and find_spec(package) is None:
            faults[package] = f"{flag} needs the package {package}, which is not installed: pip install {package}"
    is_template = (
        settings.tokenizer.kind == "SFTTokenizer" and settings.tokenizer.sft_tokenizer_prompt_format == OF_TOKENIZER
    )
    if is_template and find_spec("transformers") is None:
        faults["transformers"] = (
            "--sft-tokenizer-prompt-format default needs the package transformers, which applies the tokenizer's own template and "
            "is not installed: pip install transformers"
        )
    return faults
