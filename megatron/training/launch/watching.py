"""What watches a run, made from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.training.loop.train_state import TrainState
from megatron.training.telemetry.watch.run_watch import RunWatch
from megatron.training.telemetry.watch.time_left import Pauses, TimeLeft

if TYPE_CHECKING:
    from megatron.training.launch.pretrain import TrainingSetup


def build_watch(setup: TrainingSetup, state: TrainState, *, evaluates: bool) -> RunWatch | None:
    """Build what watches a run that continues from ``state``; None on other ranks than 0, and where nothing is trained.

    Args:
        evaluates: there are held-out data.
    """
    if dist.get_rank() != 0 or setup.settings.validation.skip_train:
        return None
    return RunWatch(setup.settings.watch, _time_left(setup, state, evaluates=evaluates))


def _time_left(setup: TrainingSetup, state: TrainState, *, evaluates: bool) -> TimeLeft:
    settings = setup.settings
    loop, checkpoint = settings.loop, settings.checkpoint
    last = loop.last_iteration(state, settings.batch)
    pauses = {}
    if checkpoint.save is not None:
        pauses["save"] = Pauses(plural="saves", interval=checkpoint.save_interval, at_end="if not due")
    if evaluates:
        pauses["evaluation"] = Pauses(
            plural="evaluations",
            interval=loop.eval_interval,
            begins_at=loop.start_eval_at_iter or 0,
            at_end="always",
        )
    if loop.check_weight_hash_interval:
        pauses["check of replicas"] = Pauses(plural="checks of replicas", interval=loop.check_weight_hash_interval)
    return TimeLeft(
        iteration=state.iteration,
        consumed_samples=state.consumed_train_samples,
        last_iteration=last,
        last_samples=settings.batch.consumed_after(last - state.iteration, state.consumed_train_samples),
        pauses=pauses,
    )
