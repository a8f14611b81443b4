"""What watches a run, made from its settings."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from megatron.core import __version__
from megatron.core.distributed.fsdp import contexts_of
from megatron.training.launch.rendezvous import Rendezvous
from megatron.training.loop.train_state import TrainState
from megatron.training.telemetry.watch.peak_flops import peak_tflops
from megatron.training.telemetry.watch.rank_warnings import WarningBox, passing_on_warnings
from megatron.training.telemetry.watch.run_state import About
from megatron.training.telemetry.watch.run_watch import RunWatch, Scale, WatchConfig
from megatron.training.telemetry.watch.time_left import Pauses, TimeLeft

if TYPE_CHECKING:
    from megatron.training.launch.pretrain import TrainingSetup


def build_watch(setup: TrainingSetup, state: TrainState, report: str) -> RunWatch | None:
    """Build what watches a run that continues from ``state``; None on other ranks than 0, and where nothing is trained.

    Args:
        report: of the configuration in effect.

    Raises:
        OSError: a file that it shall write cannot be written.
    """
    settings = setup.settings
    if dist.get_rank() != 0 or settings.validation.skip_train:
        return None
    return RunWatch(
        settings.watch,
        _time_left(setup, state),
        scale=Scale(
            num_devices=dist.get_world_size(),
            tokens_per_sample=settings.data.seq_length,
            flops_per_sample=setup.flops_per_sample,
        ),
        about=_about(setup, report) if settings.watch.writes_files else None,
        engine_memory=partial(_engine_memory, setup),
    )


@contextmanager
def bringing_warnings(config: WatchConfig, rendezvous: Rendezvous, watch: RunWatch | None) -> Iterator[None]:
    """Bring the warnings of all ranks within the scope to rank 0's page, if there is one.

    Ranks: all; blocks for no other rank.
    """
    if not config.writes_files:
        yield
        return
    store = rendezvous.connection
    box = WarningBox(store, name=rendezvous.name) if isinstance(store, TCPStore) else None
    if watch is not None and box is not None:
        watch.follow_warnings(box.take)
    tell = watch.warn if watch is not None else box.put if box is not None else None
    with passing_on_warnings(rendezvous.rank, tell) if tell is not None else nullcontext():
        yield


def _about(setup: TrainingSetup, report: str) -> About:
    device = setup.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "this framework": __version__,
        "CUDA": torch.version.cuda if device.type == "cuda" else None,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
    }
    world_size, of_host = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
    hosts = f", {of_host} on each host" if 0 < of_host < world_size else ""
    return About(
        run=_name(setup),
        texts=(
            ("Launch line", shlex.join(sys.argv)),
            ("Versions", ", ".join(f"{what} {version}" for what, version in versions.items() if version)),
            ("Devices", f"{ranks}{hosts}; rank 0: {name}"),
            ("Configuration in effect", report),
        ),
        peak_tflops=peak_tflops(name),
    )


def _name(setup: TrainingSetup) -> str:
    """Return the name of the run: that of Weights & Biases, or the end of the path of its checkpoints, or of the page."""
    settings = setup.settings
    if settings.logging.wandb_exp_name:
        return settings.logging.wandb_exp_name
    if settings.checkpoint.save is not None:
        return "/".join(Path(os.path.abspath(settings.checkpoint.save)).parts[-2:])
    return Path(settings.watch.status_page or settings.watch.prometheus_file or "").stem


def _engine_memory(setup: TrainingSetup) -> dict[str, int]:
    """Return bytes of the engine on this rank by kind, over all its contexts."""
    reports = [context.describe() for context in contexts_of(setup.model)]
    kinds = {
        "main weights": "main_weights",
        "model weights": "model_weights",
        "optimizer state": "optimizer_state",
        "unsharded weights": "unsharded",
        "gradients before reduction": "reduce_scatter_inputs",
        "main gradients": "main_gradients",
        "partial gradients": "partial_gradients",
        "optimizer state on the host": "host_state",
    }
    nbytes = {kind: sum(getattr(report, name) for report in reports) for kind, name in kinds.items()}
    return {kind: number for kind, number in nbytes.items() if number}


def _time_left(setup: TrainingSetup, state: TrainState) -> TimeLeft:
    settings = setup.settings
    loop, checkpoint = settings.loop, settings.checkpoint
    last = loop.last_iteration(state, settings.batch)
    pauses = {}
    if checkpoint.save is not None:
        pauses["save"] = Pauses(plural="saves", interval=checkpoint.save_interval, at_end="if not due")
    if (loop.eval_iters > 0 or settings.validation.full) and setup.datasets.valid is not None:
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
