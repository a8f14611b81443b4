"""Checkpoints of training loops that are written for Megatron-LM: saved and loaded as the arguments of the run say."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.served_arguments import ANY, Served, check_arguments
from megatron.training.checkpointing import Checkpointer
from megatron.training.formats.recognise import RELEASE
from megatron.training.library.flags import settings_of
from megatron.training.library.state import get_args, get_tokenizer
from megatron.training.loop.train_state import TrainState
from megatron.training.run_folder import TRACKER, checkpoint_path

_GROUP_ARGUMENTS: Served = dict.fromkeys(
    ("tp_group", "pp_group", "dp_cp_group", "dp_group", "expt_dp_group"),
    (ANY, "the model's parameters know their groups"),
)
_RANK_ARGUMENTS: Served = dict.fromkeys(
    ("pipeline_rank", "expert_rank", "tensor_rank", "pipeline_parallel", "expert_parallel"),
    ((None,), "each rank writes what it holds"),
)
_SAVE: Served = {
    **_GROUP_ARGUMENTS,
    **_RANK_ARGUMENTS,
    "checkpointing_context": (ANY, "nothing is kept from one save to the next"),
    "non_persistent_ckpt": ((False,), "checkpoints are saved where --save says"),
    "train_data_iterator": (ANY, "the samples consumed say where data go on"),
    "preprocess_common_state_dict_fn": (ANY, "plain values are those of rank 0"),
    "release": ((False,), "a checkpoint is of an iteration"),
    "rng_state_key_prefix": (("",), "there is one state of random generators"),
}
_LOAD: Served = {
    **_GROUP_ARGUMENTS,
    "strict": ((True,), "missing and extra names are errors"),
    "checkpointing_context": (ANY, "nothing is kept from one load to the next"),
    "skip_load_to_model_and_opt": ((False,), "the model is loaded in place"),
    "rng_state_key_prefix": (("",), "there is one state of random generators"),
}


_pending: list[Checkpointer] = []
"""What writes a checkpoint during training; at most one."""


class _Nothing:
    """In place of an optimizer or a schedule that is not saved or loaded."""

    optimizer = None

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {}


def save_checkpoint(
    iteration: int,
    model: Sequence[torch.nn.Module] | torch.nn.Module,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    **others: Any,
) -> None:
    """Save a run to ``--save``, in ``--ckpt-format``; the counters of samples are those of the arguments.

    With ``--async-save`` the checkpoint is complete after ``maybe_finalize_async_save(blocking=True)``, the next save, or a load.

    Args:
        model: as ``get_model`` returns it.
        optimizer, opt_param_scheduler: None: weights alone.
        num_floating_point_operations_so_far: accepted; logs count anew.
        others: Megatron-LM's further arguments, at values that ask for nothing else.

    Raises:
        ValueError: ``--save`` is not given.
        NotImplementedError: another argument asks for what is not served.

    Ranks: all; blocks.
    """
    check_arguments("save_checkpoint", others, _SAVE)
    maybe_finalize_async_save(blocking=True)
    args = get_args()
    checkpointer = _checkpointer(model, optimizer, opt_param_scheduler, loads=None)
    if checkpointer.config.save is None:
        raise ValueError("--save must be given for save_checkpoint, got none")
    checkpointer.check_save()
    checkpointer.save(
        TrainState(
            iteration=iteration,
            consumed_train_samples=getattr(args, "consumed_train_samples", 0) or 0,
            consumed_valid_samples=getattr(args, "consumed_valid_samples", 0) or 0,
        )
    )
    _pending.append(checkpointer)
    maybe_finalize_async_save(blocking=not checkpointer.config.async_save)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Name the checkpoint that ``save_checkpoint`` writes during training in the tracker, if it is written.

    Args:
        blocking: wait until it is.
        terminate: accepted; a save ends its thread.

    Ranks: all; without ``blocking`` each on its own.
    """
    for checkpointer in _pending:
        checkpointer.poll()
        if blocking:
            checkpointer.finish()
    if blocking:
        _pending.clear()


def get_checkpoint_tracker_filename(checkpoints_path: str | os.PathLike[str]) -> str:
    """Return the path of the file that names the latest checkpoint of a folder."""
    return os.path.join(checkpoints_path, TRACKER)


def get_checkpoint_name(
    checkpoints_path: str | os.PathLike[str],
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int | None = None,
    pipeline_rank: int | None = None,
    expert_parallel: bool | None = None,
    expert_rank: int | None = None,
    return_base_dir: bool = False,
    basename: str = "model_optim_rng.pt",
) -> str:
    """Return the folder of an iteration's checkpoint, or the file in it that a rank has in Megatron-LM's legacy format.

    Args:
        release: the folder is that of a converted model, which is of no iteration.
        pipeline_parallel, expert_parallel: whether files are of pipeline stages and expert ranks.
        tensor_rank, pipeline_rank, expert_rank: None, as for the two above: those of ``initialize_model_parallel``.
        return_base_dir: return the folder.
        basename: of the file.
    """
    base = Path(checkpoints_path) / RELEASE if release else checkpoint_path(Path(checkpoints_path), iteration)
    if return_base_dir:
        return str(base)
    state = parallel_state
    if pipeline_parallel is None:
        pipeline_parallel = state.get_pipeline_model_parallel_world_size() > 1
    if expert_parallel is None:
        expert_parallel = state.get_expert_model_parallel_world_size() > 1
    name = f"mp_rank_{state.get_tensor_model_parallel_rank() if tensor_rank is None else tensor_rank:02d}"
    if pipeline_parallel:
        name += f"_{state.get_pipeline_model_parallel_rank() if pipeline_rank is None else pipeline_rank:03d}"
    if expert_parallel:
        name += f"_{state.get_expert_model_parallel_rank() if expert_rank is None else expert_rank:03d}"
    return str(base / name / basename)


def read_metadata(tracker_filename: str | os.PathLike[str]) -> tuple[int, bool]:
    """Return the iteration that a tracker file names, the latest that any rank finds, and whether it names a converted model.

    Raises:
        ValueError: it holds neither a number nor "release".

    Ranks: all, where there are several.
    """
    text = Path(tracker_filename).read_text().strip()
    is_release = text == RELEASE
    if not is_release and not text.isdecimal():
        raise ValueError(f"{tracker_filename} must hold the number of an iteration or {RELEASE!r}, got {text[:40]!r}")
    iteration = 0 if is_release else int(text)
    if dist.is_initialized():
        found = torch.tensor(iteration, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        iteration = int(found)
    return iteration, is_release


def get_load_checkpoint_path_by_args(args: Namespace, load_arg: str = "load") -> str:
    """Return the folder of the checkpoint that an argument names: of its tracker, or of ``ckpt_step``.

    Ranks: as ``read_metadata``.
    """
    folder, (iteration, is_release) = getattr(args, load_arg), (-1, False)
    tracker = get_checkpoint_tracker_filename(folder)
    if os.path.isfile(tracker):
        iteration, is_release = read_metadata(tracker)
    return get_checkpoint_name(folder, getattr(args, "ckpt_step", None) or iteration, is_release, return_base_dir=True)


def load_checkpoint(
    ddp_model: Sequence[torch.nn.Module] | torch.nn.Module,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    **others: Any,
) -> tuple[int, int]:
    """Load the checkpoint that an argument names, of any program that ``--load`` reads, and set the counters of samples.

    Args:
        ddp_model: as ``get_model`` returns it.
        optimizer, opt_param_scheduler: None: weights alone.
        load_arg: name of the argument that has the folder.
        others: Megatron-LM's further arguments, at values that ask for nothing else.

    Returns:
        The iteration, 0 where there is no checkpoint or with ``--finetune``; and 0, since logs count operations anew.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as ``--load`` would; names what does not fit.

    Ranks: all; blocks.
    """
    check_arguments("load_checkpoint", others, _LOAD)
    maybe_finalize_async_save(blocking=True)
    args = get_args()
    state = _checkpointer(ddp_model, optimizer, opt_param_scheduler, loads=getattr(args, load_arg)).load()
    args.iteration = state.iteration
    args.consumed_train_samples, args.consumed_valid_samples = (
        state.consumed_train_samples,
        state.consumed_valid_samples,
    )
    return state.iteration, 0


def _checkpointer(model: Any, optimizer: Any, scheduler: Any, *, loads: str | None) -> Checkpointer:
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    if len(models) != 1:
        raise NotImplementedError(f"model must be one part of a model on each rank, got {len(models)}; use pretrain()")
    args, settings = get_args(), settings_of(get_args())
    vocab_size = 1 if settings.model.model_vocab_size is not None else get_tokenizer().vocab_size
    has_optimizer = optimizer is not None and scheduler is not None
    config = replace(
        settings.checkpoint,
        load=loads,
        save_optim=settings.checkpoint.save_optim and has_optimizer,
        load_optim=settings.checkpoint.load_optim and has_optimizer,
    )
    architecture = settings.model.architecture(vocab_size)
    nothing: Any = _Nothing()
    plain = {name: v for name, v in vars(args).items() if v is None or isinstance(v, (bool, int, float, str))}
    return Checkpointer(
        config,
        models[0],
        optimizer if has_optimizer else nothing,
        scheduler if has_optimizer else nothing,
        architecture=architecture,
        seed=settings.loop.seed,
        samples={"seq_length": settings.data.seq_length},
        megatron_lm_args={
            **plain,
            **settings.megatron_lm.values,
            "padded_vocab_size": architecture["padded_vocab_size"],
        },
    )
