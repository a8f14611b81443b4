"""Go on with a run of another program: what of its state is taken, and what keeps it from going on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.foreign_run import ForeignRun
from megatron.training.loop.dropout_seed import fresh_rng_state
from megatron.training.loop.train_state import TrainState

_FRESH = "load it with --finetune to begin at iteration 0"
# Megatron-LM neither saves nor compares the rate at which the warm-up begins and the last phase of WSD.
_NOT_IN_SCHEDULE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """What a run takes of another program's, beside weights and the optimizer's state.

    Args:
        schedule: state of our scheduler.
        samples: plain values on which it depends which data a sample holds, as far as they are known.
    """

    run: ForeignRun
    state: TrainState
    schedule: dict[str, Any]
    samples: Mapping[str, Any]

    def described(self, kind: str, *, with_optimizer: bool) -> str:
        """Say what was loaded, and what was not."""
        taken = (
            "weights, optimizer and schedule"
            if with_optimizer
            else "weights; the optimizer and its schedule start afresh"
        )
        lines = [
            f" loaded {self.run.path} ({kind}): {taken}; training continues after iteration {self.state.iteration}"
        ]
        if self.run.not_taken:
            lines.append(f" not taken, since it has no counterpart here: {', '.join(self.run.not_taken)}")
        return "\n".join(lines)


def goes_on(found: ForeignCheckpoint, *, finetune: bool) -> bool:
    """Return whether a checkpoint is of a run that goes on, and not of weights with which one begins.

    Raises:
        ValueError: it holds optimizer state, but what says how far the run was is lost.
    """
    run = found.run
    if run is not None and run.has_state and run.iteration is None and not run.is_release and not finetune:
        raise ValueError(
            f"{run.file or run.path} must contain the iteration of the checkpoint, since there is optimizer state next to the "
            "weights, got nothing: restore the file, or load only the weights and begin at iteration 0 (--finetune; "
            "--weights-only of a conversion)"
        )
    return run is not None and not run.is_release and bool(run.iteration) and not finetune


def state_keys(config: OptimizerConfig, where: Path) -> tuple[str, ...]:
    """Return the keys of an optimizer's state that another program has under the same names.

    Raises:
        ValueError: this optimizer's state has no counterpart there.
    """
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum else ()
    raise ValueError(
        f"{where}: optimizer state of another program is read for adam and sgd, got --optimizer {config.optimizer}; load it with "
        "--no-load-optim"
    )


def converted_run(found: ForeignCheckpoint) -> dict[str, Any]:
    """Return what a checkpoint of ours says of another program's run, beside tensors: values by name.

    Raises:
        ValueError: the run did not save what going on needs.
    """
    run = found.run
    assert run is not None, "see goes_on"
    args = run.args
    wsd = args.get("lr_wsd_decay_samples") or (args.get("lr_wsd_decay_iters") or 0) * (
        args.get("global_batch_size") or 0
    )
    not_saved = {
        "init_lr": args.get("lr_warmup_init") or 0.0,
        "wsd_decay_steps": wsd or None,
        "lr_wsd_decay_style": args.get("lr_wsd_decay_style", "exponential"),
    }
    resumed = resumed_run(run, not_saved, seed=None)
    values = {"state": resumed.state.as_dict(), "scheduler": resumed.schedule, "samples": resumed.samples, "args": args}
    if args.get("seed") is not None:
        values["rng"] = fresh_rng_state(args["seed"])
    return values


def resumed_run(run: ForeignRun | None, own: Mapping[str, Any], *, seed: int | None) -> ResumedRun:
    """Return what goes on of a run of Megatron-LM.

    Args:
        own: state of our scheduler, for what Megatron-LM does not save.
        seed: of dropout and of the order of samples, which must be the saved one; None: it need not.

    Raises:
        ValueError: the run did not save what going on needs, or had another seed.
    """
    assert run is not None and run.iteration is not None, "see goes_on"
    args, where = run.args, run.path
    counters = {name: args.get(name) for name in ("consumed_train_samples", "consumed_valid_samples")}
    lacking = [name for name, value in counters.items() if type(value) is not int or value < 0]
    if "consumed_train_samples" in lacking:
        raise ValueError(
            f"{where} must say in its args how many samples iteration {run.iteration} had consumed, got "
            f"{counters['consumed_train_samples']!r}: {_FRESH}"
        )
    saved_seed = args.get("seed")
    if seed is not None and saved_seed is not None and saved_seed != seed:
        raise ValueError(
            f"the seed must be that of the checkpoint {where}, got seed: now {seed}, saved {saved_seed}: it orders the samples, and "
            f"some would be drawn twice and others never; give --seed {saved_seed}, or --no-load-rng to go on with another order"
        )
    valid = 0 if lacking else counters["consumed_valid_samples"]
    state = TrainState(
        iteration=run.iteration,
        consumed_train_samples=args["consumed_train_samples"],
        consumed_valid_samples=valid or 0,
    )
    schedule = {**{name: own[name] for name in _NOT_IN_SCHEDULE}, **{n: v for n, v in run.schedule.items()}}
    samples = {"seq_length": args["seq_length"]} if "seq_length" in args else {}
    return ResumedRun(run=run, state=state, schedule=schedule, samples=samples)
