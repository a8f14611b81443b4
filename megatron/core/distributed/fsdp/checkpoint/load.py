"""``load_checkpoint``: compare everything by name before the first weight changes, then read in place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint.agreement import agree, check_initialized, digest_of, firsts
from megatron.core.distributed.fsdp.checkpoint.chunks import local_chunks
from megatron.core.distributed.fsdp.checkpoint.description import Entries, StoredTensor
from megatron.core.distributed.fsdp.checkpoint.optimizer import (
    EXECUTION,
    KIND,
    PARAM_GROUPS,
    STATE,
    OptimizerLoad,
    prepare_load,
    torch_optimizer,
)
from megatron.core.distributed.fsdp.checkpoint.reader import CheckpointReader, TensorReader
from megatron.core.distributed.fsdp.checkpoint.state import (
    EXTRA_STATE,
    OPTIMIZER,
    OPTIONAL_STATE,
    PER_RANK,
    Model,
    NamedTensor,
    Problems,
    former_module_states,
    is_split,
    model_tensors,
    module_states,
    optional_states,
    roots_of,
    units_of,
)
from megatron.core.distributed.fsdp.checkpoint.views import ViewReader, identity

_MODEL = "model."
_GROUP = re.compile(rf"{re.escape(PARAM_GROUPS)}\.(?P<group>.+)\.(?P<key>[a-z_]+)")
_OF_SCHEDULES = ("initial_lr", "params", "param_names")


def load_checkpoint(
    model: Model,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    load_optimizer: bool = True,
    verify: bool = True,
    reader: TensorReader | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into model and optimizer, whatever number of ranks and strategy it was saved with.

    Main weights are written in place, and the next forward sees them. Optimizer state is matched by the names of the
    parameters; state that the optimizer does not have yet is made. Its hyperparameters become the saved ones, except
    for ``capturable``, ``differentiable``, ``foreach`` and ``fused``, which say how this process computes. Values of
    one floating dtype are converted to another where model and checkpoint differ; other dtypes must be equal.

    Args:
        model: as in ``save_checkpoint``.
        optimizer: as in ``save_checkpoint``; None loads the model alone.
        path: the folder. If a save was killed while it replaced that folder, what it left next to it is loaded. It may be one that DCP
            saved from ``{"model": ..., "optimizer": ...}``, as Megatron-FSDP's version 2 does.
        load_optimizer: False leaves the optimizer as it is.
        verify: compare what is read with its checksums before anything changes. False trusts the files, which saves
            reading them twice.
        reader: reads the checkpoint, of another program, under the names and in the layouts of ours; ``path`` then only
            names it in messages. None: ``path`` is a checkpoint of ours.

    Returns:
        The saved ``extra_state``. Its ``"per_rank"`` is what this rank gave, and is absent if fewer ranks saved the
        checkpoint. Tensors in it are on the CPU.

    Raises:
        FileNotFoundError: nothing is at ``path``, or it is incomplete; a file in it is missing or cut short.
        ValueError: missing, extra or mis-shaped entries, by name, of the model and the optimizer; a file that is not what
            was written.
        TypeError: ``model`` is no module.
        RuntimeError: torch.distributed is not initialised; a unit is unsharded; reading failed midway.

    What one rank raises, all ranks raise. Nothing has changed then, except where reading failed midway.

    Ranks: all of the default process group; blocks until all have read. Each rank reads what it holds. Two rounds of
    one gather and one broadcast, and a third where ranks hold different parts of the model.
    Source: the format is that of torch.distributed.checkpoint.
    """
    check_initialized("load_checkpoint")
    loads: list[Load] = []

    def prepare() -> str | None:
        own = optimizer if load_optimizer else None
        loads.append(Load(model, own, path, rank=dist.get_rank(), verify=verify, reader=reader))
        return digest_of(loads[0].unclaimed) if loads[0].is_split and loads[0].unclaimed else None

    # Ranks that hold the same part lack the same entries; one rank of each part lists them, if every rank lacks some.
    speakers = agree(prepare, lambda digests: [] if None in digests else firsts(digests))
    (load,) = loads
    if speakers:
        agree(
            lambda: load.unclaimed if dist.get_rank() in speakers else None,
            lambda found: load.refuse_unclaimed([names for names in found if names is not None]),
        )
    agree(load.read, lambda _: None)
    load.install()
    return load.extra_state


class Load:
    """A checkpoint that has been matched with a model and an optimizer, which have not changed yet.

    Args:
        optimizer: None to load the model alone.
        reader: as in ``load_checkpoint``.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
        ValueError: names, shapes or dtypes do not match; the message lists them. What this rank needs was damaged.

    Attributes:
        unclaimed: (part, name) of the checkpoint's entries that this rank lacks. Where the model is split between
            ranks, another rank may hold them; elsewhere they are an error.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Any,
        path: str | os.PathLike[str],
        *,
        rank: int,
        verify: bool = True,
        reader: TensorReader | None = None,
    ) -> None:
        self._model, self._path, self._rank = roots_of(model), path, rank
        for module in units_of(self._model):
            module._fsdp_unit.show_sharded()
        tensors = model_tensors(self._model)
        if reader is None:
            own = CheckpointReader(Path(os.path.abspath(path)), verify=verify)
            reader = _in_our_layout(own, [name for entry in tensors for name in entry.names])
        self._reader = reader
        self._saved: Entries = self._reader.entries
        self._optimizer: OptimizerLoad | None = None
        self.is_split = is_split(self._model)
        self.unclaimed: list[tuple[str, str]] = []
        self._tied: list[tuple[NamedTensor, str]] = []
        targets = self._match(tensors, None if optimizer is None else torch_optimizer(optimizer))
        optional = [name for name in optional_states(self._model) if name in self._saved]
        self._module_values = self._reader.values([*module_states(self._model), *optional])
        self.extra_state = self._read_extra_state()
        self._plan = self._reader.plan_parts(
            [chunk for entry in targets for chunk in local_chunks(entry.name, entry.tensor, writes=True)]
        )
        self._plan.verify()
        for entry, name in self._tied:
            self._check_tied(entry, name)

    def read(self) -> None:
        """Read the checkpoint into the main weights and the optimizer state to come.

        Raises:
            RuntimeError: reading failed midway.
        """
        try:
            self._plan.read()
        except Exception as error:
            raise RuntimeError(
                f"reading {self._path} failed midway ({error!r}): the model holds a mixture and must not be used; load again"
            ) from error

    @torch.no_grad()
    def install(self) -> None:
        """Give the optimizer its state, and make the next forward gather the new weights."""
        for group in (group for module in units_of(self._model) for group in module._fsdp_groups):
            group.weights.note_load()
        if self._optimizer is not None:
            self._optimizer.install()
        for name, module in module_states(self._model).items():
            module.set_extra_state(self._module_values[name])
        for name, module in optional_states(self._model).items():
            if name in self._module_values:
                module.set_optional_state(self._module_values[name])
        for unit in (module._fsdp_unit for module in units_of(self._model)):
            if unit.context is not None:
                unit.context.weights_changed()

    def _match(self, tensors: Sequence[NamedTensor], optimizer: torch.optim.Optimizer | None) -> list[NamedTensor]:
        """Return the tensors to read into, each under its name in the checkpoint.

        Raises:
            ValueError: something does not match.
        """
        parts = [Problems(part, is_partial=self.is_split) for part in ("model", "optimizer")]
        targets = self._match_model(tensors, parts[0])
        self._check_dtypes(targets, parts[0])
        if optimizer is not None:
            self._optimizer = self._match_optimizer(optimizer, tensors, parts[1])
            self._check_dtypes(self._optimizer.tensors, parts[1])
            whole = self._optimizer.whole
            targets = [replace(entry, tensor=whole.get(entry.name, entry.tensor)) for entry in targets]
            targets += self._optimizer.tensors
        self._check(parts)
        self.unclaimed = [(problems.part, name) for problems in parts for name in problems.extra]
        return targets

    def _check_tied(self, entry: NamedTensor, name: str) -> None:
        """Check that a tied weight has the same values under another of its names.

        Raises:
            ValueError: it has others.
        """
        if not self._reader.are_equal(entry, name):
            raise ValueError(
                f"{self._path}: {entry.name} and {name}, which are one weight of the model, must have the same values, got "
                "others: the checkpoint is of a model whose weights are not tied; untie them here, or save the checkpoint "
                "with one of the two. Nothing was changed"
            )

    def _check(self, parts: Sequence[Problems]) -> None:
        if any(parts):
            found = " | ".join(str(part) for part in parts if part)
            raise ValueError(
                f"the checkpoint {self._path} must match what it is loaded into, got {found}. Nothing was changed"
            )

    def refuse_unclaimed(self, found: Sequence[Sequence[tuple[str, str]]]) -> None:
        """Check that each entry of the checkpoint is claimed by some rank.

        Args:
            found: ``unclaimed`` of one rank for each part of the model.

        Raises:
            ValueError: no rank claims an entry; lists the names.
        """
        nowhere = set(found[0]).intersection(*found[1:])
        extra = {
            part: [name for own, name in found[0] if own == part and (own, name) in nowhere]
            for part in ("model", "optimizer")
        }
        self._check([Problems(part, extra=names) for part, names in extra.items()])

    def _match_model(self, tensors: Sequence[NamedTensor], problems: Problems) -> list[NamedTensor]:
        """Return the model's tensors under their names in the checkpoint; add what does not match to ``problems``.

        Other tools write a tied weight under each of its names; it is read under the first.
        """
        targets = []
        for entry in tensors:
            names = [name for name in entry.names if name in self._saved]
            if not names:
                problems.missing.append(entry.name)
                continue
            targets.append(replace(entry, names=(names[0],)))
            self._tied += [(targets[-1], name) for name in names[1:]]
            for name in names:
                stored = self._saved[name]
                if not isinstance(stored, StoredTensor):
                    problems.mistyped.append(f"{name} (saved as a plain value)")
                elif stored.size != entry.tensor.shape:
                    problems.misshaped.append(f"{name} (saved {list(stored.size)}, model {list(entry.tensor.shape)})")
        states = module_states(self._model)
        problems.missing += [name for name in states if name not in self._saved]
        known = {entry.name for entry in targets} | {name for _, name in self._tied} | set(states)
        known.update(former_module_states(self._model))
        problems.extra += [
            name
            for name in self._saved
            if name not in known and not name.startswith((OPTIMIZER, EXTRA_STATE, OPTIONAL_STATE))
        ]
        return targets

    def _match_optimizer(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[NamedTensor], problems: Problems
    ) -> OptimizerLoad:
        absent = [name for name in (PARAM_GROUPS, KIND) if name not in self._saved]
        if absent:
            problems.missing += absent
            problems.other.append(
                "it was saved without an optimizer; pass load_optimizer=False to load the model alone"
            )
            return OptimizerLoad(optimizer)
        plain = [
            name
            for name, stored in self._saved.items()
            if name.startswith(OPTIMIZER) and not isinstance(stored, StoredTensor)
        ]
        values = self._reader.values(plain)
        try:
            return prepare_load(optimizer, tensors, self._saved, values, problems)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._path}: the optimizer's values must be those that save_checkpoint writes, got {error!r}; load "
                "another checkpoint, or the model alone with load_optimizer=False"
            ) from error

    def _check_dtypes(self, targets: Sequence[NamedTensor], problems: Problems) -> None:
        for entry in targets:
            stored, dtype = self._saved[entry.name], entry.tensor.dtype
            if not isinstance(stored, StoredTensor) or stored.dtype == dtype:
                continue
            if not (stored.dtype.is_floating_point and dtype.is_floating_point):
                problems.mistyped.append(f"{entry.name} (saved {stored.dtype}, here {dtype})")

    def _read_extra_state(self) -> dict[str, Any]:
        per_rank = f"{EXTRA_STATE}{PER_RANK}."
        common = [name for name in self._saved if name.startswith(EXTRA_STATE) and not name.startswith(per_rank)]
        own = [name for name in (f"{per_rank}{self._rank}",) if name in self._saved]
        values = self._reader.values(common + own)
        return {PER_RANK if name in own else name.removeprefix(EXTRA_STATE): value for name, value in values.items()}


def _in_our_layout(stored: CheckpointReader, weights: Iterable[str]) -> TensorReader:
    """Return a reader of a checkpoint under our names, which ``stored`` has itself unless ``dcp.save`` wrote it.

    ``dcp.save({"model": ..., "optimizer": ...})`` with the dicts that PyTorch's state dict functions return, as in Megatron-FSDP's
    version 2, gives weights the prefix ``model.``; state has the names of ours, and param groups an entry for each of their keys,
    by number or, flattened, by the name of the parameter.

    Args:
        weights: names of the model's tensors.
    """
    entries = stored.entries
    if (
        KIND in entries
        or any(name in entries for name in weights)
        or not any(_MODEL + name in entries for name in weights)
    ):
        return stored
    own = {name: name.removeprefix(_MODEL) for name in entries if name.startswith(_MODEL)}
    tensors = {full: entry for full, entry in entries.items() if full in own and isinstance(entry, StoredTensor)}
    views = {own[full]: identity(full, entry) for full, entry in tensors.items()}
    values = stored.values([name for name in own if name not in tensors])
    # States of modules that have none are None.
    plain = {own[full]: value for full, value in values.items() if value is not None}
    groups = _param_groups(stored)
    if groups:
        names = dict.fromkeys(key for group in groups for key in group if key not in (*_OF_SCHEDULES, *EXECUTION))
        plain[PARAM_GROUPS] = groups
        plain[KIND] = {"class": "", "hyperparameters": list(names), "scalar_state": sorted(_keys_of_numbers(entries))}
    kept = [name for name in entries if name not in own and not name.startswith(f"{PARAM_GROUPS}.")]
    return ViewReader(stored, views, plain, keeps=kept)


def _keys_of_numbers(entries: Entries) -> set[str]:
    """Return the keys of state that has one number for a whole parameter, such as ``step``."""
    found: set[str] = set()
    for full, entry in entries.items():
        name, _, key = full.removeprefix(STATE).rpartition(".")
        weight = entries.get(_MODEL + name)
        if full.startswith(STATE) and isinstance(entry, StoredTensor) and isinstance(weight, StoredTensor):
            found.update({key} if not entry.size and (weight.size or key == "step") else ())
    return found


def _param_groups(stored: CheckpointReader) -> list[dict[str, Any]]:
    """Return param groups as we store them; flattened ones each with one parameter."""
    found: dict[str, dict[str, Any]] = {}
    names = {name: match for name in stored.entries if (match := _GROUP.fullmatch(name)) is not None}
    tensors = {name: stored.tensor(name) for name in names if isinstance(stored.entries[name], StoredTensor)}
    values: Mapping[str, Any] = {**stored.values([name for name in names if name not in tensors]), **tensors}
    for name, match in names.items():
        if match["key"] not in EXECUTION and match["key"] != "initial_lr":
            found.setdefault(match["group"], {})[match["key"]] = values[name]
    return [{**group, "params": group.get("params", [key])} for key, group in found.items()]
