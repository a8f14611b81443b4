"""Checkpoints of a run: folders ``<save>/iter_0000010/`` and a tracker file that names the latest complete one.

The engine writes a folder beside its final name and renames it when it is complete. Then the tracker is replaced, in
one step. So whenever processes are killed, the tracker names a complete checkpoint, or there is none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import load_checkpoint as load_folder
from megatron.core.distributed.fsdp import save_checkpoint as save_folder
from megatron.core.distributed.fsdp.checkpoint import (
    EXTRA_STATE,
    CheckpointReader,
    ForeignLayout,
    TensorReader,
    agree,
    begin_deletion,
    delete_folder,
    delete_leftovers,
    planned_nbytes,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import check_scale_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_mla_down_proj_in_state_dict,
    handle_mtp_in_state_dict,
    handle_parts_in_state_dict,
)
from megatron.training.folder_lock import FolderLock
from megatron.training.formats.architecture import Differences, differences
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.megatron_lm import SavedRun, args_to_save, in_our_names, layout_of, optimizer_steps
from megatron.training.formats.recognise import find_foreign
from megatron.training.formats.resume import ResumedRun, goes_on, resumed_run, state_keys
from megatron.training.loop.dropout_seed import check_rng_state, rng_state, set_rng_state
from megatron.training.loop.train_state import TrainState
from megatron.training.run_folder import (
    TRACKER,
    check_space,
    checkpoint_path,
    latest_iteration,
    make_folder,
    newest_iteration,
    read_tracker,
    try_to_write,
    write_tracker,
)

_SAVED = ("architecture", "samples", "state", "scheduler", "rng", "grad_scaler", "token_ids")
_CONVERTED_FROM = "converted_from"  # tools/checkpoint/convert.py writes it: such checkpoints hold weights alone


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and when checkpoints are saved, and what is loaded at the start."""

    save: str | None = None
    """Folder of this run's checkpoints; None saves nothing."""

    save_interval: int | None = None
    """Iterations between saves; None saves only at the end of training."""

    save_retain_interval: int | None = None
    """Keep checkpoints of iterations that this divides; others are deleted when the next one is complete. None keeps all."""

    save_optim: bool = True
    save_rng: bool = True

    async_save: bool = False
    """Write while training goes on; costs a copy of the state in host memory."""

    ckpt_format: str | None = None
    """Checkpoints have Megatron-LM's names and layouts: "torch_dist" or "fsdp_dtensor"; None: ours. Either loads under any
    split."""

    load: str | None = None
    """Folder whose latest checkpoint is loaded; None starts from scratch."""

    load_step: int | None = None
    """Iteration to load instead of the latest."""

    exit_on_missing: bool = False
    """Raise if the folder has no checkpoint, instead of starting from scratch."""

    load_optim: bool = True
    load_rng: bool = True

    finetune: bool = False
    """Load only weights, and start at iteration 0."""

    verify: bool = True
    """Compare what is loaded with its checksums, before anything changes."""

    def __post_init__(self) -> None:
        for name in ("save", "load"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(
                    f"--{name} must be the path of a folder, got an empty text; leave the flag out or fill it in"
                )


class SaveObserver(Protocol):
    """What is told of checkpoints, on rank 0."""

    def saved(self, iteration: int, consumed_samples: int, *, is_async: bool) -> None:
        """Take a save that has ended, or begins in the background."""

    def async_saved(self, iteration: int) -> None:
        """Take the end of a save in the background."""

    def deleted(self, iteration: int) -> None:
        """Take a checkpoint that has been deleted."""


class Checkpointer:
    """Saves a run and loads it.

    Args:
        config: where, when and what.
        architecture: plain values, under names that a user knows, which a checkpoint must have in common with the
            model.
        seed: seed of dropout and of the order of samples, saved with the state of random numbers.
        samples: plain values, under names that a user knows, on which it depends which data a sample holds.
        megatron_lm_args: plain values, the run's arguments by Megatron-LM's names, which checkpoints hold too.
        lock: the lock on ``save``, on the rank that has it.
        before_announcing: is called on rank 0 with an iteration that is written, before the tracker names it.

    Ranks: all make the same calls in the same order.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: torch.nn.Module,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        *,
        architecture: Mapping[str, Any],
        seed: int,
        samples: Mapping[str, Any] | None = None,
        megatron_lm_args: Mapping[str, Any] | None = None,
        lock: FolderLock | None = None,
        before_announcing: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.config, self.model, self.optimizer, self.scheduler = config, model, optimizer, scheduler
        self.architecture, self.seed, self.samples = dict(architecture), seed, dict(samples or {})
        self.megatron_lm_args = dict(megatron_lm_args or {})
        self.token_ids: dict[str, Any] = {}
        """Ids of special tokens by Hugging Face's names, where the run began with a model that has some: for conversions."""
        self.lock, self.before_announcing = lock, before_announcing
        self.observers: list[SaveObserver] = []
        self.last_saved_iteration: int | None = None
        self._deleting: list[threading.Thread] = []
        self._pending: tuple[Any, int] | None = None

    def is_due(self, iteration: int) -> bool:
        """Return whether ``--save-interval`` asks for a checkpoint after this iteration."""
        interval = self.config.save_interval
        return self.config.save is not None and interval is not None and iteration % interval == 0

    def check_save(self) -> None:
        """Check that all ranks can write to ``save``, and that a checkpoint fits there; delete what killed deletions left.

        Does nothing without ``save``.

        Raises:
            OSError: a rank cannot write there, or there is too little space; names the folder.

        Ranks: all; blocks.
        """
        if self.config.save is None:
            return
        folder = Path(self.config.save)

        def first(_: object) -> None:
            self._check_lock()
            make_folder(folder)
            self._delete_beside(delete_leftovers, folder)

        agree(lambda: None, first)
        optimizer = self.optimizer if self.config.save_optim else None

        def local() -> int:
            try_to_write(folder)
            return planned_nbytes(self.model, optimizer)

        agree(local, lambda nbytes: check_space(folder, sum(nbytes)))

    def save(self, state: TrainState) -> None:
        """Save the run, so that it can continue from here; with ``async_save``, complete when ``finish`` has returned.

        Raises:
            OSError: a rank could not write; names the file and the iteration.

        Ranks: all; blocks until the checkpoint is written, with ``async_save`` until the state is copied.
        """
        if self.config.save is None or self.last_saved_iteration == state.iteration:
            return
        self.finish()
        path = checkpoint_path(self.config.save, state.iteration)
        extra: dict[str, Any] = {
            "architecture": self.architecture,
            "samples": self.samples,
            "state": state.as_dict(),
            "scheduler": self.scheduler.state_dict(),
            "args": self.megatron_lm_args,
        }
        if self.token_ids:
            extra["token_ids"] = self.token_ids
        if self.config.save_rng:
            extra["rng"] = rng_state(self.seed)
        if self.config.save_optim and self.optimizer.grad_scaler is not None:
            extra["grad_scaler"] = self.optimizer.grad_scaler.state_dict()
        with _naming_iteration(state.iteration):
            agree(lambda: None, lambda _: self._check_lock())
            handle = save_folder(
                self.model,
                self.optimizer if self.config.save_optim else None,
                path,
                extra_state=extra,
                async_save=self.config.async_save,
                layout=self._layout(state),
            )
        self.last_saved_iteration = state.iteration
        for observer in self.observers:
            observer.saved(state.iteration, state.consumed_train_samples, is_async=handle is not None)
        if handle is None:
            # Rank 0 writes the tracker; no rank goes on before it has, and all raise if it cannot.
            with _naming_iteration(state.iteration):
                agree(lambda: None, lambda _: self._announce(state.iteration))
        else:
            self._pending = (handle, state.iteration)

    def _layout(self, state: TrainState) -> ForeignLayout | None:
        if self.config.ckpt_format is None:
            return None
        run = SavedRun(
            args=args_to_save(
                self.megatron_lm_args, self.architecture, state.as_dict(), save_optim=self.config.save_optim
            ),
            schedule=self.scheduler.state_dict(),
            steps=optimizer_steps(self.optimizer.optimizer) if self.config.save_optim else (),
        )
        return layout_of(self.config.ckpt_format, self.architecture, iteration=state.iteration, run=run)

    def poll(self) -> None:
        """Name the pending asynchronous save in the tracker if it is written. Ranks: each alone; does not block."""
        if self._pending is not None and self._pending[0].done():
            self._finish_pending()

    def finish(self) -> None:
        """Wait for the pending asynchronous save and name it in the tracker. Ranks: all; blocks."""
        while self._deleting:
            self._deleting.pop().join()
        if not self.config.async_save:
            return
        if self._pending is not None:
            self._finish_pending()
        # No rank may exit, or start the next save, before the tracker names this one.
        dist.barrier()

    def _finish_pending(self) -> None:
        assert self._pending is not None
        handle, iteration = self._pending
        self._pending = None
        with _naming_iteration(iteration):
            handle.wait()
        if dist.get_rank() == 0:
            self._announce(iteration)
            for observer in self.observers:
                observer.async_saved(iteration)

    def load(self) -> TrainState:
        """Load model, optimizer, scheduler and random numbers, and return the state of training.

        Without ``load``, or without a checkpoint there, nothing changes and training starts from scratch.

        Raises:
            FileNotFoundError: the checkpoint that ``load_step`` or the tracker names is missing.
            ValueError: the checkpoint is of another model or schedule; names what differs.

        Ranks: all; blocks.
        """
        if self.config.load is None:
            return TrainState()
        others: list[ForeignCheckpoint | None] = []

        def find() -> None:
            folder, step = Path(self.config.load or ""), self.config.load_step
            others.append(find_foreign(folder, step, verify=self.config.verify))

        agree(find, lambda _: None)
        if others[0] is not None:
            return self._load_foreign(others[0])
        iterations: list[int | None] = []
        agree(lambda: iterations.append(self._iteration_to_load(Path(self.config.load or ""))), lambda _: None)
        (iteration,) = iterations
        if iteration is None:
            return TrainState()
        path = checkpoint_path(self.config.load, iteration)
        # All that may be refused is looked at before the model changes.
        found: list[dict[str, Any]] = []
        agree(lambda: found.append(self._check_extra(path, iteration)), lambda _: None)
        (saved,) = found
        self.token_ids = dict(saved.get("token_ids", {}))
        weights_alone = self.config.finetune or _CONVERTED_FROM in saved
        readers: list[TensorReader] = []

        def open_own() -> None:
            stored = CheckpointReader(path, verify=self.config.verify)
            readers.append(in_our_names(stored, self.architecture))

        agree(open_own, lambda _: None)
        self._load_into_model(path, with_optimizer=self.config.load_optim and not weights_alone, reader=readers[0])
        if weights_alone:
            print_rank_0(f" loaded the weights of {path}; training starts at iteration 0")
            _say(differences(saved["architecture"], self.architecture, finetune=True))
            return TrainState()
        if self.config.load_optim:
            self.scheduler.load_state_dict(saved["scheduler"])
            self._load_loss_scale(saved.get("grad_scaler"), path)
        else:
            print_rank_0(
                " --no-load-optim: the optimizer and the schedule of its rates start afresh, as in Megatron-LM"
            )
        if self.config.load_rng:
            self.seed = set_rng_state(saved["rng"])
        print_rank_0(f" loaded {path}; training continues after iteration {iteration}")
        self._say_other_samples(saved.get("samples", {}))
        if self.config.save is not None and os.path.realpath(self.config.save) == os.path.realpath(self.config.load):
            self.last_saved_iteration = iteration
        return TrainState(**saved["state"])

    def _load_loss_scale(self, saved: Mapping[str, Any] | None, path: Path) -> None:
        scaler = self.optimizer.grad_scaler
        if scaler is None or not scaler.state_dict():
            return
        if saved:
            scaler.load_state_dict(saved)
        else:
            print_rank_0(f" {path} holds no loss scale: it starts at {float(scaler.scale):.1f}")

    def _load_into_model(self, path: Path, *, with_optimizer: bool, reader: TensorReader | None = None) -> None:
        # Loading replaces hyperparameters by the saved ones, but those of the command line must stay in effect.
        given = [_hyperparameters(group) for group in self.optimizer.param_groups]
        load_folder(
            self.model,
            self.optimizer,
            path,
            load_optimizer=with_optimizer,
            verify=self.config.verify,
            reader=reader,
        )
        for group, hyperparameters in zip(self.optimizer.param_groups, given, strict=True):
            group.update(hyperparameters)

    def _load_foreign(self, found: ForeignCheckpoint) -> TrainState:
        """Load what another program saved, and continue its run where it has saved all that this needs; say what was taken."""
        prepared: list[tuple[ResumedRun | None, TensorReader]] = []

        def prepare() -> None:
            resumed = None
            if goes_on(found, finetune=self.config.finetune):
                resumed = resumed_run(
                    found.run, self.scheduler.state_dict(), seed=self.seed if self.config.load_rng else None
                )
            with_optimizer = resumed is not None and self.config.load_optim
            keys = state_keys(self.optimizer.config, found.path) if with_optimizer else None
            if resumed is not None and with_optimizer:
                self.scheduler.check_state_dict(resumed.schedule)
            prepared.append((resumed, found.reader(self.architecture, state_keys=keys, finetune=self.config.finetune)))

        agree(prepare, lambda _: None)
        ((resumed, reader),) = prepared
        self.token_ids = dict(found.token_ids)
        with_optimizer = resumed is not None and self.config.load_optim
        self._load_into_model(found.path, with_optimizer=with_optimizer, reader=reader)
        if resumed is None:
            print_rank_0(
                f" loaded the weights of {found.path} ({found.kind}); the optimizer starts afresh, and training at iteration 0"
            )
            _say(found.differences(self.architecture, finetune=True))
            return TrainState()
        if with_optimizer:
            self.scheduler.load_state_dict(resumed.schedule)
        print_rank_0(resumed.described(found.kind, with_optimizer=with_optimizer))
        self._say_other_samples(resumed.samples)
        return resumed.state

    def _say_other_samples(self, saved: Mapping[str, Any]) -> None:
        """Say what changes the samples, of which the counters count on; a longer context in mid-training is lawful."""
        other = [
            f"{name}: now {now}, saved {saved[name]}"
            for name, now in self.samples.items()
            if now != saved.get(name, now)
        ]
        if other:
            print_rank_0(
                f" WARNING: samples are not those of the checkpoint ({', '.join(other)}): they are cut from the data anew, and "
                "the count of those consumed goes on, so some data will be drawn twice and some never"
            )

    def _check_extra(self, path: Path, iteration: int) -> dict[str, Any]:
        """Read what the checkpoint holds beside tensors, and check what will be used of it. Ranks: each on its own."""
        reader = CheckpointReader(path, verify=self.config.verify)
        names = [name for name in (*_SAVED, _CONVERTED_FROM) if EXTRA_STATE + name in reader.entries]
        values = reader.values([EXTRA_STATE + name for name in names])
        saved = {name: values[EXTRA_STATE + name] for name in names}
        _check_architecture(
            _dict_of(saved, "architecture", path), self.architecture, path, finetune=self.config.finetune
        )
        if "token_ids" in saved:
            _dict_of(saved, "token_ids", path)
        if self.config.finetune or _CONVERTED_FROM in saved:
            return saved
        try:
            state = TrainState(**_dict_of(saved, "state", path)).as_dict()
            if any(type(count) is not int or count < 0 for count in state.values()):
                raise ValueError(f"counters must be whole numbers, got {state}")
            if self.config.load_optim:
                self.scheduler.check_state_dict(_dict_of(saved, "scheduler", path))
            if self.config.load_rng and "rng" in saved:
                check_rng_state(saved["rng"])
            check_scale_state(saved.get("grad_scaler", {}))
            if not isinstance(saved.get("samples", {}), dict):
                raise ValueError(f"what samples depend on must be a dict, got {saved['samples']!r}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        if state["iteration"] != iteration:
            raise ValueError(
                f"{path} must hold iteration {iteration}, got a checkpoint of iteration {state['iteration']}: the folder "
                "was renamed or copied; restore its name, or load it by another --ckpt-step"
            )
        if self.config.load_rng and "rng" not in saved:
            raise ValueError(f"{path} must hold the state of random numbers, got none; load it with --no-load-rng")
        if self.config.load_rng and saved["rng"]["seed"] != self.seed:
            raise ValueError(
                f"the seed must be that of the checkpoint {path}, got seed: now {self.seed}, saved {saved['rng']['seed']}: it "
                f"orders the samples, and some would be drawn twice and others never; give --seed {saved['rng']['seed']}, or "
                "--no-load-rng to go on with another order"
            )
        return saved

    def _iteration_to_load(self, folder: Path) -> int | None:
        if self.config.load_step is not None:
            return self.config.load_step
        iteration = latest_iteration(folder)
        if iteration is None:
            if self.config.exit_on_missing:
                raise FileNotFoundError(f"--load {folder} must have a checkpoint, got no {TRACKER} there")
            newest = newest_iteration(folder)
            left = f"; the folder has a complete checkpoint of iteration {newest}: use --ckpt-step {newest} to load it"
            print_rank_0(
                f" no checkpoint in {folder} (no {TRACKER}): training starts from scratch{left if newest >= 0 else ''}"
            )
        elif (newest := newest_iteration(folder)) > iteration:
            # The tracker is Megatron-LM's, a number without a checksum: one that names an older checkpoint may be damaged.
            print_rank_0(
                f" {folder / TRACKER} names iteration {iteration}, which is loaded; iteration {newest}, which is complete too, is left. "
                f"If the tracker was damaged, give --ckpt-step {newest}"
            )
        return iteration

    def _check_lock(self) -> None:
        """Raise an OSError if another run has taken ``save`` over. Ranks: the one that has the lock."""
        if self.lock is not None:
            self.lock.check()

    def _announce(self, iteration: int) -> None:
        """Name an iteration, whose folder is complete, in the tracker. Ranks: 0."""
        assert self.config.save is not None
        self._check_lock()
        self.before_announcing(iteration)
        try:
            before = read_tracker(Path(self.config.save) / TRACKER)
        except ValueError as error:  # the tracker is rewritten, and no older checkpoint is deleted
            before = None
            print(f" WARNING: {error}; iteration {iteration} is written into it", flush=True)
        write_tracker(Path(self.config.save), iteration)
        print(_saved_line(iteration, self.config.save, self.model), flush=True)
        retained = self.config.save_retain_interval
        if retained is not None and before and before < iteration and before % retained != 0:
            self._delete(before)

    def _delete(self, iteration: int) -> None:
        """Delete a checkpoint that another one has followed, in the background, unless it is a link. Ranks: 0."""
        assert self.config.save is not None
        path = checkpoint_path(self.config.save, iteration)
        if path.is_symlink() or not path.is_dir():
            return
        try:
            doomed = begin_deletion(path)
        except OSError as error:
            print(f" {path} was not deleted: {error}", flush=True)
            return
        print(f" deleted iteration {iteration}, which --save-retain-interval does not keep", flush=True)
        for observer in self.observers:
            observer.deleted(iteration)
        self._delete_beside(delete_folder, doomed)

    def _delete_beside(self, delete: Callable[[Path], None], folder: Path) -> None:
        """Delete in a thread while training continues: deleting large files is slow."""
        thread = threading.Thread(target=delete, args=(folder,))
        thread.start()
        self._deleting.append(thread)


def _saved_line(iteration: int, folder: str, model: torch.nn.Module) -> str:
    """Format the line that Megatron-LM prints after a save."""
    groups = getattr(model, "pg_collection", None) or ProcessGroupCollection()
    return (
        f"  [{datetime.now().strftime('%Y-%m-%d %H:%M:%S.%f')}] successfully saved checkpoint from iteration {iteration:7d} to "
        f"{folder} [ t 1/{group_size(groups.tp)}, p 1/{group_size(groups.pp)} ]"
    )


@contextlib.contextmanager
def _naming_iteration(iteration: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"iteration {iteration} was not saved: {error}") from error


def _dict_of(saved: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = saved.get(name)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        got = "none" if value is None else f"a {type(value).__name__}"
        raise ValueError(
            f"{path} must be a checkpoint of a training run, which has {EXTRA_STATE}{name}, got {got}; weights that were "
            "saved by a library can be loaded with megatron.core.distributed.fsdp.load_checkpoint"
        )
    return value


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _say(found: Differences) -> None:
    if found.said:
        print_rank_0(found.said)


def print_rank_0(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _check_architecture(
    saved: Mapping[str, Any], architecture: Mapping[str, Any], path: Path, *, finetune: bool
) -> None:
    found = differences(saved, architecture, finetune=finetune)
    if found.refused:
        raise ValueError(
            f"the model must be that of the checkpoint {path}, got {', '.join(found.refused)}; give the flags that the "
            f"checkpoint was trained with, or another --load{found.way_out}"
        )


def preprocess_fsdp_dtensor_state_dict(
    args: Any, raw_state_dict: dict[str, Any], model: torch.nn.Module
) -> dict[str, Any]:
    """Return a state dict for DCP with Megatron-LM's names on disk; its DTensors are views of those in ``raw_state_dict``.

    Args:
        args: the run's arguments; ``swiglu`` and ``num_experts`` must be off.
        raw_state_dict: the state dicts ``model`` and, optionally, ``optimizer``.
        model: the wrapped model, whose modules determine what is fused.

    Raises:
        NotImplementedError: the model has gated layers or experts, whose weights Megatron-LM stores separately.

    Ranks: all of the model.
    """
    if args.swiglu or args.num_experts:
        raise NotImplementedError(
            f"swiglu and num_experts must be off, got {args.swiglu} and {args.num_experts}: fsdp_dtensor checkpoints store gates and "
            "experts separately; use save_checkpoint, whose folders load into any split of the model"
        )
    state = dict(raw_state_dict)
    for handle in (handle_mla_down_proj_in_state_dict, handle_mtp_in_state_dict, handle_parts_in_state_dict):
        state["model"], optimizer = handle(model, state["model"], state.get("optimizer"))
        if optimizer is not None:
            state["optimizer"] = optimizer
    return state
