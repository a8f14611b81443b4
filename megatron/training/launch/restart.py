"""What a run loads after torchrun has restarted it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megatron.training.checkpointing import CheckpointConfig, latest_iteration, print_rank_0


def num_restarts() -> int:
    """Return how often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def after_restart(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration that continues from the run's own last checkpoint, if torchrun has restarted it.

    Without one, and at the first start, it is ``config``: the run starts as it did first.

    Ranks: all; blocks.
    """
    if num_restarts() == 0 or config.save is None or latest_iteration(Path(config.save)) is None:
        return config
    own = replace(
        config, load=config.save, load_step=None, finetune=False, load_optim=config.save_optim, load_rng=config.save_rng
    )
    if own != config:
        print_rank_0(f" restarted by torchrun ({num_restarts()} times): continues from {config.save}, not from --load")
    return own
