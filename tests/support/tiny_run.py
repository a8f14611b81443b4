"""Training runs of a second: the whole command line on a few gloo ranks, with what it printed."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

from tests.support.launch import run_ranks

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --log-interval 1 --eval-iters 0 --num-workers 0 --distributed-backend gloo"
)
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


@dataclass
class Run:
    """What a run printed on rank 0, and what it ended with."""

    output: str
    error: str | None = None
    losses: dict[int, float] = field(default_factory=dict)
    """By iteration."""
    grad_norms: dict[int, float] = field(default_factory=dict)
    auxiliary: dict[int, dict[str, float]] = field(default_factory=dict)
    """Auxiliary losses of experts by iteration and name."""

    def __post_init__(self) -> None:
        for line in self.output.splitlines():
            found = re.search(r"iteration +(\d+)/.*exact loss: (\S+) .*exact norm: (\S+) ", line)
            if found:
                self.losses[int(found[1])] = float(found[2])
                self.grad_norms[int(found[1])] = float(found[3])
                named = re.findall(r"exact (\w*(?:load_balancing|z)_loss): (\S+) ", line)
                self.auxiliary[int(found[1])] = {name: float(value) for name, value in named}


def train_all(ranks: int, flags: Mapping[str, str], *, base: str = TINY) -> dict[str, Run]:
    """Train by name with ``base`` and these flags (later flags win), one after the other in one launch of ranks.

    An exception of a run is in its ``error``.
    """
    runs = run_ranks(ranks, _train_on_rank, {name: f"{base} {added}".split() for name, added in flags.items()})
    by_name: dict[str, Run] = runs[0]
    return by_name


def _train_on_rank(argv_by_name: dict[str, list[str]]) -> dict[str, Run]:
    return {name: train_one(argv) for name, argv in argv_by_name.items()}


def train_one(argv: list[str], stream: TextIO | None = None) -> Run:
    """Train with these flags on this rank of a process group that exists; print into ``stream`` if given. Ranks: all."""
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from megatron.training.arguments import parse_settings
    from megatron.training.launch.pretrain import pretrain
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    MockGPTLowLevelDataset.size = 100  # the index of its 100,000 documents would take most of the time
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(stream or printed):
        try:
            pretrain(
                parse_settings(argv),
                model_provider=model_provider,
                datasets_provider=datasets_provider,
                forward_step=forward_step,
            )
        except (RuntimeError, ValueError, OSError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Run(printed.getvalue(), error)
