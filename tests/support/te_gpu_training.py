"""Nets of transformer-engine's layers on GPUs: their recipes and losses, and checks of many recipes in one launch."""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HIDDEN, ROWS = 256, 512, 128
RECIPES = ("delayed", "tensorwise", "blockwise")


def make_recipe(name: str, amax_history_len: int) -> Any:
    """Make the recipe of this name; delayed scaling has this length and a margin of 1."""
    from megatron.core.extensions.transformer_engine_layers import recipes

    if name == "delayed":
        return recipes.DelayedScaling(amax_history_len=amax_history_len, amax_compute_algo="max", margin=1)
    return recipes.Float8CurrentScaling() if name == "tensorwise" else recipes.Float8BlockScaling()


def reset_fp8() -> None:
    """Let transformer-engine forget the scales and histories of nets before."""
    importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager.reset()


def loss_of(net: nn.Module, recipe: Any, step: int) -> torch.Tensor:
    """Return the loss for this rank's rows of the step."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(ROWS, WIDTH, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=dist.group.WORLD):
        return net(x).float().pow(2).mean()


def failures_by_recipe(checks: Mapping[str, Callable[[str], None]]) -> dict[str, str]:
    """Run each check with each recipe; return what failed as ``<recipe>-<check>`` and its traceback."""
    os.environ["NVTE_FRAMEWORK"] = "pytorch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformer-engine, about its other extensions
        importlib.import_module("transformer_engine.pytorch")
        found = {}
        for name in RECIPES:
            for kind, check in checks.items():
                try:
                    check(name)
                except Exception:
                    found[f"{name}-{kind}"] = traceback.format_exc()
        return found
