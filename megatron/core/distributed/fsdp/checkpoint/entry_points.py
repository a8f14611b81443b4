"""``save_checkpoint`` and ``load_checkpoint``: DCP folders that any number of ranks and any strategy can load.

In a folder are:

- ``<name in the unwrapped model>``: a main weight or persistent buffer, whole, whatever ranks it was split between (data,
  tensor, expert parallelism, pipeline stages); tied ones once, under their first name
- ``optimizer.state.<parameter>.<key>``: optimizer state
- ``optimizer.param_groups``, ``optimizer.kind``: hyperparameters, by the names of the parameters that they are for
- ``extra_state.<key>``: what the caller gave, from rank 0
- ``extra_state.per_rank.<rank>``: what each rank gave as ``extra_state["per_rank"]``
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.checkpoint.agreement import agree, digest_of, firsts
from megatron.core.distributed.fsdp.checkpoint.load import Load
from megatron.core.distributed.fsdp.checkpoint.save import AsyncSave, LocalState, Save, host_copy, local_state


def save_checkpoint(
    model: nn.Module,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    extra_state: Mapping[str, Any] | None = None,
    async_save: bool = False,
) -> AsyncSave | None:
    """Afterwards (or, asynchronously, after ``wait``) the training state is on disk at ``path``, complete.

    A checkpoint that was at ``path`` is replaced; a kill at any moment leaves it or the new one. What killed saves left
    in the same folder is removed.

    Args:
        model: a sharded module, a module that holds some, or their ``FullyShardedDataParallel``.
        optimizer: a ``torch.optim`` optimizer over its parameters, something that holds one as ``.optimizer``, or None.
        path: the folder to write; all ranks must see it.
        extra_state: plain values and tensors (nested in lists, tuples and dicts) by name; those of rank 0 are kept.
            Under ``"per_rank"`` each rank gives its own, such as states of random number generators, and gets it back
            as the same rank.
        async_save: copy the state to host memory, then return; what is saved are the values of now. A thread of this
            process writes them while training goes on, and talks to the other ranks over a gloo group of its own. Wait for
            it before another save to the same path.

    Returns:
        The save that is under way; None when it is done.

    Raises:
        FileExistsError: at ``path`` is something that is no checkpoint.
        TypeError: a value in ``extra_state`` or the optimizer's state that is not plain.
        ValueError: a parameter of the optimizer that is not the model's; ranks that give different paths.
        OSError: a rank could not write. What was at ``path`` is still there.
        RuntimeError: torch.distributed is not initialised; the ranks do not hold one model.

    What one rank raises, all raise, with the rank's number.

    Ranks: all of the default group; blocks until all have written (or copied). Who writes what follows from the layout:
    no communication per tensor, but two agreements of one gather and one broadcast each; three, where ranks hold
    different parts of the model, of which one rank of each kind says what is in it.
    Source: the format is that of torch.distributed.checkpoint.
    """
    _check_initialized("save_checkpoint")
    group = dist.new_group(backend="gloo") if async_save else None
    save = Save(path, group=group)

    def collect() -> LocalState:
        state = local_state(model, optimizer, extra_state or {}, rank=dist.get_rank())
        return host_copy(state) if async_save else state

    try:
        save.prepare(collect)
    except BaseException:
        if group is not None:
            dist.destroy_process_group(group)
        raise
    if group is not None:
        return AsyncSave(save, group)
    save.write()
    return None


def load_checkpoint(
    model: nn.Module, optimizer: Any, path: str | os.PathLike[str], *, load_optimizer: bool = True
) -> dict[str, Any]:
    """Afterwards model and optimizer are as they were saved, whatever the ranks and the strategy were then.

    Main weights are written in place, and the next forward sees them. Optimizer state is matched by the names of the
    parameters; state that the optimizer does not have yet is made. Its hyperparameters become the saved ones, but for
    ``capturable``, ``differentiable``, ``foreach`` and ``fused``, which say how this process computes. Values of one
    floating dtype are converted to another where model and checkpoint differ in it; other dtypes must be equal.

    Args:
        model: as in ``save_checkpoint``.
        optimizer: as in ``save_checkpoint``; with None the model is loaded alone.
        path: the folder. If a save was killed just while it replaced that folder, what it left beside it is loaded.
        load_optimizer: False leaves the optimizer as it is.

    Returns:
        The ``extra_state`` that was saved; its ``"per_rank"`` is what this rank gave, and absent if the checkpoint was
        saved by fewer ranks. Tensors in it are on the CPU.

    Raises:
        FileNotFoundError: nothing is at ``path``, or it is not complete; a file of it is gone or cut short.
        ValueError: missing, extra or mis-shaped entries, by name, for the model and the optimizer.
        RuntimeError: torch.distributed is not initialised; a unit is unsharded; reading failed midway.

    What one rank raises, all raise. Before the last of these nothing has been changed.

    Ranks: all of the default group; blocks until all have read. Each reads what it holds, and what all find is agreed
    upon twice, by one gather and one broadcast; three times where ranks hold different parts of the model.
    """
    _check_initialized("load_checkpoint")
    loads: list[Load] = []

    def prepare() -> str | None:
        loads.append(Load(model, optimizer if load_optimizer else None, path, rank=dist.get_rank()))
        return digest_of(loads[0].unclaimed) if loads[0].is_split and loads[0].unclaimed else None

    # Ranks that hold the same part miss the same; one of each kind says what, if all miss something.
    speakers = agree(prepare, lambda digests: [] if None in digests else firsts(digests))
    (load,) = loads
    if speakers:
        agree(
            lambda: load.unclaimed if dist.get_rank() in speakers else None,
            lambda found: load.refuse_unclaimed([names for names in found if names is not None]),
        )
    agree(load.read, _nothing)
    load.install()
    return load.extra_state


def _nothing(_: list[None]) -> None:
    pass


def _check_initialized(caller: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"torch.distributed must be initialised before {caller}; call torch.distributed.init_process_group() in a "
            "program started with torchrun"
        )
