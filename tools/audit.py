"""Audit of a launch line: train a few steps as it says and unsharded in one process, and name the first number that differs.

Example::

    python tools/audit.py -- torchrun --nproc-per-node 2 pretrain_gpt.py --use-megatron-fsdp ...
    python tools/audit.py --add "--num-layers 2 --hidden-size 256" -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

Each rank compares its parts of initial weights, losses, gradients and updated weights with those of the plain model, which
the first rank of each host trains by itself before: it must fit there, so shrink it by flags (``--add``). The plain model
has the launch line's seed, data, batches and dtypes, and neither the engine nor any split. Checkpoints are neither loaded
nor saved, and steps are not captured. Exit status: 0 if all agrees; 1 if something differs; 2 if it cannot be audited.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Works without an installed package. The tool's own folder must go: tools are no modules of each other.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import importlib.util
import math
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.child_process import end_with_parent
from megatron.core.distributed.fsdp import AuditReport, FlatAdamW
from megatron.core.distributed.fsdp.self_audit import Comparison, Reference
from megatron.core.module_names import named_parameters
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import rng_tracker_of, seed_streams
from megatron.core.transformer.moe.router import set_num_microbatches
from megatron.training.arguments import Settings, build_parser, parse_settings
from megatron.training.cli.flag_parser import FlagError
from megatron.training.cli.megatron_lm_args import with_values
from megatron.training.data.batches import SequentialBatchSampler
from megatron.training.data.data_loader import iterate_batches
from megatron.training.launch.distributed_init import initialize_distributed
from megatron.training.launch.failures import ending_together, refuse, run_script
from megatron.training.launch.pretrain import TrainingSetup, set_up
from megatron.training.launch.refusals import StartRefusedError, refusing_together
from megatron.training.launch.rendezvous import meet
from megatron.training.launch.same_settings import compare_settings, values_to_compare
from megatron.training.launch.samples import data_rank, train_batches
from megatron.training.loop.dropout_seed import microbatch_seed, seed_everything
from megatron.training.loop.lr_schedule import build_scheduler
from megatron.training.loop.train_step import Batch, StepComputation, TrainStep

SCRIPT, REPORT = "pretrain_gpt.py", "report"
_POLL_S = 0.1

_ALONE = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cp_comm_type": ["p2p"],
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "microbatch_group_size_per_vp_stage": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_distributed_optimizer_instances": 1,
    "outer_dp_sharding_strategy": "no_shard",
    "init_model_with_meta_device": False,
    "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
    "eval_global_batch_size": None,
    "use_mp_args_from_checkpoint_args": False,
}
"""What the plain model is not: split, created unit by unit, or trained without whole main weights."""


# ---- the command ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the launch line's ranks with this file in the place of its script; return the exit status."""
    own, launch = _split(argv)
    options = _options(own)
    if options.on_rank is not None:
        return _main_of_rank(options, launch)
    at = next((at for at, word in enumerate(launch) if os.path.basename(word) == SCRIPT), None)
    if at is None:
        print(f"error: a launch line must name {SCRIPT}, got {shlex.join(launch)!r} behind --", file=sys.stderr)
        return 2
    launcher = launch[:at] or [sys.executable]
    problem = _problem(options, launcher[0])
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="audit-", dir=options.folder) as folder:
        passed_on = ["--on-rank", folder, "--script", launch[at], "--steps", str(options.steps)]
        if options.tolerance is not None:
            passed_on += ["--tolerance", str(options.tolerance)]
        flags = [*launch[at + 1 :], *shlex.split(options.add)]
        # A launcher that gets SIGTERM ends its ranks.
        ends = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        command = [*launcher, os.path.abspath(__file__), *passed_on, "--", *flags]
        done = subprocess.run(command, check=False, preexec_fn=ends)
        report = Path(folder) / REPORT
        if not report.exists():
            print(f"error: the run ended by itself, with status {done.returncode}: see its output", file=sys.stderr)
            return 2
        status, text = report.read_text().split("\n", 1)
        print(text)
        return int(status)


def _problem(options: Namespace, launcher: str) -> str | None:
    """Return why the call cannot be served, and make the folder that it asks for."""
    if options.steps < 1:
        return f"--steps must be at least 1, got {options.steps}: there would be nothing to compare"
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        return f"--tolerance must be a finite number, at least 0, got {options.tolerance}"
    if shutil.which(launcher) is None:
        return f"the launch line's {launcher!r} must be a program, and none was found; activate the environment that has it"
    if options.folder is not None:
        try:
            os.makedirs(options.folder, exist_ok=True)
        except OSError as error:
            return f"--folder must be a folder that can be written, got {options.folder!r}: {error.strerror}"
    return None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _options(argv: Sequence[str]) -> Namespace:
    parser = argparse.ArgumentParser(
        usage="python tools/audit.py [options] -- <a launch line of pretrain_gpt.py>",
        description="Train a few steps as a launch line says and unsharded, and name the first number that differs.",
        epilog="exit status: 0 if all agrees; 1 if something differs; 2 if it cannot be audited",
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="steps to train; the engine plans in the second (default: 3)"
    )
    parser.add_argument(
        "--add", default="", metavar="FLAGS", help="flags behind the launch line's, to shrink the model"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="of differences relative to the size of a tensor (default: 1e-5, or 2e-2 where a dtype is not fp32)",
    )
    parser.add_argument(
        "--folder",
        help="for the plain model's tensors, 8 bytes for each parameter and step (default: the temporary one)",
    )
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    parser.add_argument("--script", default=SCRIPT, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _main_of_rank(options: Namespace, flags: Sequence[str]) -> int:
    script = _load(options.script)
    try:
        report = audit_on_rank(script, flags, Path(options.on_rank), steps=options.steps, tolerance=options.tolerance)
    except FlagError as error:
        refuse(str(error), _report)
        return 2
    except StartRefusedError as error:
        error.report_once(_report)
        return 2
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        part = Path(options.on_rank) / f"{REPORT}.part"
        part.write_text(f"{int(not report.passed)}\n{report}")
        part.rename(part.with_suffix(""))
    dist.destroy_process_group()
    return 0


def _report(text: str) -> None:
    print("\n".join(f"{SCRIPT}: error: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _load(script: str) -> ModuleType:
    """Import the launch line's script, whose providers of model and data are used."""
    specification = importlib.util.spec_from_file_location("pretrain_gpt", script)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ---- on a rank --------------------------------------------------------------------------------------------------


def audit_on_rank(
    script: Any, flags: Sequence[str], folder: Path, *, steps: int = 3, tolerance: float | None = None
) -> AuditReport:
    """Train as the flags say, compare with the plain model, and return the report.

    Args:
        script: has ``model_provider``, ``datasets_provider`` and ``forward_step``.
        folder: of this host, empty; the first rank of the host writes the plain model's tensors there.

    Raises:
        FlagError: the flags are refused.
        StartRefusedError: the run cannot start, on all ranks.

    Ranks: all; blocks.
    """
    settings = parse_settings(flags)  # refuses as the run would
    if settings.optimizer.optimizer == "muon":
        raise FlagError("an audit steps the plain model with adam or sgd, got --optimizer muon; add --optimizer adam")
    if settings.model.transformer.fp16:
        raise FlagError(
            "an audit compares gradients that no loss scale has multiplied, got --fp16; give --bf16 instead"
        )
    changed: dict[str, Any] = {"loss_scale": None}  # it changes no result, and would multiply the gradients of one side
    if any(settings.grid.size(axis) > 1 for axis in ("tp", "pp", "cp")):
        # Ranks that split a model draw other dropout than one that has all of it.
        changed |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    settings = parse_settings(with_values(flags, changed, build_parser()))
    rendezvous = meet(settings.distributed.timeout)
    with ending_together(rendezvous):
        compare_settings(values_to_compare(settings), rendezvous, settings.distributed.timeout)
        device = initialize_distributed(settings.distributed, rendezvous)
        seed_everything(settings.loop.seed)
        with refusing_together(rendezvous):
            setup = set_up(settings, device, script.model_provider, script.datasets_provider)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            changed |= {**_ALONE, "global_batch_size": settings.batch.at(0).global_batch_size}
            alone = parse_settings(with_values(flags, changed, build_parser()), world_size=1)
            _train_plain(script, alone, setup, folder, steps)
        return _train_sharded(script, setup, folder, steps, tolerance)


def _train_plain(script: Any, settings: Settings, setup: TrainingSetup, folder: Path, steps: int) -> None:
    """Train the whole model in this process alone, and write what each step comes to."""
    device, count = setup.device, settings.batch.at(0).num_microbatches
    model = script.model_provider(settings, setup.vocab_size, device, ProcessGroupCollection())
    model.train()
    set_num_microbatches(model, count)
    main_dtype = settings.ddp.megatron_fsdp_main_params_dtype
    reference = Reference(model, {name: main_dtype or weight.dtype for name, weight in named_parameters(model)})
    optimizer = get_megatron_optimizer(settings.optimizer, [_Mains(reference)])
    scheduler = build_scheduler(settings.schedule, settings.optimizer, optimizer)
    batches = _batches_of_all(settings, setup)
    _write({"weights": _named(model, reference.weights()), "buffers": reference.buffers()}, folder, 0)
    for step in range(steps):
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for index in range(count):
            batch = next(batches)
            seed_streams(microbatch_seed(settings.loop.seed, step, index), rng_tracker_of(model))
            loss, tokens = script.forward_step(batch, model)
            scale = 1.0 if settings.model.transformer.calculate_per_token_loss else 1.0 / (tokens.clamp(min=1) * count)
            (loss * scale).backward()
            reference.accumulate()
            sums += torch.stack((loss.detach().double(), tokens.detach().double()))
        gradients = [grad for grad in reference.gradients().values() if grad is not None]
        if settings.model.transformer.calculate_per_token_loss:
            torch._foreach_mul_(gradients, (1.0 / sums[1].clamp(min=1.0)).float())
        written: dict[str, Any] = {"loss": (sums[0] / sums[1]).item()}
        written["gradients"] = {
            name: None if grad is None else grad.clone() for name, grad in _named(model, reference.gradients()).items()
        }
        result = optimizer.step()
        assert result.grad_norm is not None, "losses are not scaled, so no step is skipped"
        clip = settings.optimizer.clip_grad
        written["clip"] = min(1.0, clip / (result.grad_norm.item() + 1e-6)) if clip > 0 else 1.0
        optimizer.zero_grad()
        reference.publish()
        scheduler.step(settings.batch.at(0).global_batch_size)
        written |= {"weights": _named(model, reference.weights()), "buffers": reference.buffers()}
        _write(written, folder, step + 1)


class _Mains(torch.nn.Module):
    """The reference's main weights under their names, for an optimizer."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        self._reference = reference

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._reference.mains.items())


def _train_sharded(script: Any, setup: TrainingSetup, folder: Path, steps: int, tolerance: float | None) -> AuditReport:
    """Train as the launch line says, and compare each step. Ranks: all."""
    settings, model = setup.settings, setup.model
    comparison = Comparison(model.module, tolerance=tolerance)
    expected: dict[str, Any] = _read(folder, 0)
    has_all_layers = settings.grid.size("pp") == 1  # others give their buffers names of their own
    comparison.weights(expected["weights"])
    comparison.buffers(expected["buffers"] if has_all_layers else {})
    found = comparison.agree()
    computation = StepComputation(
        model,
        setup.optimizer,
        script.forward_step,
        num_microbatches=settings.batch.at(0).num_microbatches,
        per_token_loss=settings.model.transformer.calculate_per_token_loss,
        device=setup.device,
        stage=setup.stage,
    )
    step = TrainStep(computation, setup.scheduler, settings.batch.at(0), seed=settings.loop.seed, rank=data_rank(setup))
    inner = setup.optimizer.optimizer
    clips_in_place = not isinstance(inner, FlatAdamW)

    def before_update(*_: Any) -> None:
        gradients, factor = expected["gradients"], expected["clip"] if clips_in_place else 1.0
        comparison.gradients({name: grad if grad is None else grad * factor for name, grad in gradients.items()})

    inner.register_step_pre_hook(before_update)
    batches = train_batches(setup, 0)
    assert batches is not None
    model.train()
    while not found and comparison.step < steps:
        comparison.step += 1
        expected = _read(folder, comparison.step)
        with comparison.noting_order():
            record = step(batches, comparison.step - 1)
            setup.optimizer.synchronize()
            sums = record.loss_and_tokens.clone()
            dist.all_reduce(sums)  # ranks that share samples add the same to both
            comparison.losses([(sums[0] / sums[1]).item()], [expected["loss"]])
            comparison.weights(expected["weights"])
            comparison.buffers(expected["buffers"] if has_all_layers else {})
        found = comparison.agree()
    return AuditReport(num_steps=comparison.step, differences=found, largest=comparison.largest)


def _batches_of_all(settings: Settings, setup: TrainingSetup) -> Iterator[Batch]:
    """Iterate over all microbatches of the run, each whole."""
    data = setup.datasets.train
    sampler = SequentialBatchSampler(settings.batch.at(0), rank=0, total_samples=len(data))
    return iterate_batches(data, sampler, num_workers=0, device=setup.device)


def _named(model: torch.nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors under the names that parameters have in the whole model, whatever part of it a rank holds."""
    canonical = {name: getattr(weight, "canonical_name", name) for name, weight in named_parameters(model)}
    return {canonical[name]: tensor for name, tensor in tensors.items()}


# ---- the plain model's tensors ----------------------------------------------------------------------------------


def _write(tensors: dict[str, Any], folder: Path, step: int) -> None:
    part = folder / f"{step}.part"
    torch.save(tensors, part)
    part.rename(folder / str(step))


def _read(folder: Path, step: int) -> dict[str, Any]:
    """Read what the plain model came to; wait for it. A rank that fails meanwhile ends this one."""
    while not (folder / str(step)).exists():
        time.sleep(_POLL_S)
    tensors: dict[str, Any] = torch.load(folder / str(step), mmap=True, weights_only=True, map_location="cpu")
    return tensors


if __name__ == "__main__":
    run_script(main, sys.argv[1:])
