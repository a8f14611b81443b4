"""What the engine takes from ``transformers``, ``accelerate`` and ``peft``, imported here alone, and only when it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_OLDEST = "5.20"


def library() -> Any:
    """Return what is used of ``transformers``: ``mapping`` and ``loading``, its modules of these purposes.

    Raises:
        ImportError: it is not installed, or older than version 5, whose models say themselves how their files are read.
    """
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        raise ImportError(
            f"Hugging Face models need transformers {_OLDEST} or newer, got: {error}; pip install 'transformers>={_OLDEST}'"
        ) from error
    return SimpleNamespace(mapping=conversion_mapping, loading=core_model_loading)


def trainer_class() -> Any:
    """Return the ``Trainer`` of ``transformers``."""
    from transformers import Trainer

    return Trainer


def accelerator_class() -> Any:
    """Return the ``Accelerator`` of ``accelerate``."""
    from accelerate import Accelerator

    return Accelerator


def tokenizer_class() -> Any:
    """Return ``AutoTokenizer`` of ``transformers``.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"a tokenizer's own chat template is applied by transformers, got: {error}; pip install transformers, or use another "
            "--sft-tokenizer-prompt-format than default"
        ) from error
    return AutoTokenizer


def adapter_library() -> Any:
    """Return ``peft``."""
    import peft

    return peft
