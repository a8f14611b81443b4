"""``save`` and ``load`` of sharded state dicts, in PyTorch's DCP format with Megatron-Core's ``metadata.json``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.core import (
    BACKEND,
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    encode_config,
)
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_items_iter,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    judge_keys,
    parse_strict_flag,
    verify_checkpoint,
)
from megatron.core.distributed.fsdp.checkpoint import (
    CheckpointReader,
    Chunk,
    NamedTensor,
    StoredTensor,
    begin_parts,
    chunks_to_write,
    local_chunks,
    write_parts,
)

_COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key
COMMON_STATE_FNAME = "common.pt"
_CONTENT_METADATA = "content_metadata"


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
) -> AsyncRequest | None:
    """Save a sharded state dict: main replicas of what is sharded, and rank 0's plain values.

    Args:
        checkpoint_dir: files of an earlier checkpoint in it are replaced.
        sharded_strategy: accepted; each rank writes what it is the main replica of, and replicas of a DTensor share it.
        validate_access_integrity: accepted; each element of a tensor must always be written by one rank.
        async_sharded_save: copy what is saved to host memory, and return a request that writes the copy.
        async_strategy: accepted; a request is run by any ``AsyncCallsQueue``.
        preprocess_common_before_consistancy_check: accepted; plain values are those of rank 0.
        content_metadata: plain values that ``load_content_metadata`` returns.
        verify_integrity: accepted; checksums are always written.

    Returns:
        With ``async_sharded_save`` the request, for ``AsyncCallsQueue.schedule_async_request``: the checkpoint is complete when
        its last function has run on all ranks.

    Raises:
        RuntimeError: an element of a tensor is written by no rank, or by several; on all ranks.

    Ranks: all; blocks.
    Source: Megatron-Core's function of this name; the format on disk is that of ``torch_dist``.
    """
    rest, sharded = _prepared(sharded_state_dict)
    common: Any = extract_matching_values(rest, lambda x: not isinstance(x, LocalNonpersistentObject))[0]
    if content_metadata is not None:
        common[_CONTENT_METADATA] = content_metadata
    values = {_COMMON: [common]} if dist.get_rank() == 0 else {}
    chunks: list[Chunk] = []
    distributed: list[NamedTensor] = []
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedObject):
            values |= {leaf.unique_key: [leaf.data]} if is_main_replica(leaf.replica_id) else {}
        elif isinstance(leaf.data, DTensor):
            distributed.append(NamedTensor((leaf.key,), leaf.data, is_copy=not is_main_replica(leaf.replica_id)))
        elif is_main_replica(leaf.replica_id):
            chunks.append(_chunk(leaf))
    files = {CONFIG_FNAME: encode_config(CheckpointingConfig(BACKEND))}
    parts = [*chunks, *chunks_to_write(distributed)]
    if not async_sharded_save:
        write_parts(Path(checkpoint_dir), parts, values, files=files)
        return None
    copies = [replace(part, local=part.local.detach().to("cpu", copy=True)) for part in parts]
    write, complete = begin_parts(Path(checkpoint_dir), copies, deepcopy(values), files=files)
    written: Future[Any] = Future()

    def run() -> None:
        try:
            written.set_result(write())
        except BaseException as error:
            written.set_exception(error)

    return AsyncRequest(run, (), [lambda: complete(written.result)])


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load what a sharded state dict asks for, and all plain values of the checkpoint.

    Tensors are read into the memory of their ``data``, which is returned; without data, into new memory on the CPU.

    Args:
        sharded_strategy, validate_access_integrity, process_group: accepted; each rank reads what it asks for.
        strict: see ``StrictHandling``.
        verify_integrity: accepted; what is read is always compared with its checksum, where there is one.

    Returns:
        The state dict; with ``RETURN_...`` the state dict, missing and unexpected keys.

    Raises:
        CheckpointingException: the folder is no distributed checkpoint, or a key, shape or dtype does not fit.
        ValueError: what is there is not what was written; names the file.

    Ranks: each on its own; blocks.
    """
    verify_checkpoint(checkpoint_dir)
    handling = parse_strict_flag(strict)
    reader = CheckpointReader(Path(checkpoint_dir))
    nonpersistent, _ = extract_nonpersistent(sharded_state_dict)
    factories, _ = extract_matching_values(
        sharded_state_dict, lambda x: isinstance(x, ShardedTensorFactory), return_lists_as_dicts=True
    )
    _, sharded = _prepared(sharded_state_dict)
    asked = {_name(leaf) for leaf in nested_values(sharded)}
    missing, unexpected = asked - set(reader.entries), set(reader.entries) - asked - {_COMMON}
    judge_keys(handling, missing, unexpected)
    if missing:
        sharded, _ = extract_matching_values(sharded, lambda leaf: _name(leaf) not in missing)
    loaded = _read(reader, sharded)
    result = load_common_state_dict(checkpoint_dir)
    merge(result, dict_list_map_outplace(lambda one: one.unwrap(), nonpersistent))
    merge(result, loaded)
    apply_factory_merges(result, factories)
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return result, missing if handling is StrictHandling.RETURN_ALL else set(), unexpected
    return result


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Load the plain values of a checkpoint. Ranks: each on its own."""
    verify_checkpoint(checkpoint_dir)
    folder = Path(checkpoint_dir)
    if (folder / COMMON_STATE_FNAME).is_file():
        older: StateDict = torch.load(folder / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)
        return older
    reader = CheckpointReader(folder)
    common: StateDict = reader.values([_COMMON])[_COMMON][0] if _COMMON in reader.entries else {}
    return common


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return what ``save`` was given as ``content_metadata``; None where it was given nothing.

    Raises:
        ValueError: neither a folder nor a loaded state dict is given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("checkpoint_dir or preloaded_state_dict must be given, got None for both")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT_METADATA)


def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None
) -> dict[str, ShardedTensor]:
    """Return the whole tensors of a checkpoint by key, without data. Ranks: each on its own."""
    verify_checkpoint(checkpoint_dir)
    found = {}
    for name, stored in CheckpointReader(Path(checkpoint_dir)).entries.items():
        if isinstance(stored, StoredTensor):
            shape = tuple(stored.size)
            found[name] = ShardedTensor(name, None, stored.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))
    return found


def load_plain_tensors(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Load all tensors of a checkpoint whole, on the CPU, by key. Ranks: each on its own."""
    reader = CheckpointReader(Path(checkpoint_dir))
    return {name: reader.tensor(name) for name in load_tensors_metadata(checkpoint_dir)}


def _prepared(sharded_state_dict: ShardedStateDict) -> tuple[Any, Any]:
    """Return (plain values, what is sharded, built by its factories); the caller's dict is not changed."""
    sharded, rest = extract_sharded_base(sharded_state_dict)
    built = dict_list_map_outplace(lambda one: one.build() if isinstance(one, ShardedTensorFactory) else one, sharded)
    return rest, built


def _name(leaf: ShardedBase) -> str:
    return leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key


def _chunk(leaf: ShardedTensor) -> Chunk:
    assert leaf.data is not None
    local = leaf.data.detach().view(leaf.box_shape)
    return Chunk(leaf.key, torch.Size(leaf.global_shape), torch.Size(leaf.global_offset), local)


def _read(reader: CheckpointReader, sharded: Any) -> Any:
    """Read what is asked for; return it in the structure of ``sharded``."""
    chunks: list[Chunk] = []
    names = [_name(leaf) for leaf in nested_values(sharded) if isinstance(leaf, ShardedObject)]
    objects: Mapping[str, Any] = reader.values(names)
    result: Any = dict_list_map_outplace(lambda leaf: leaf, sharded)
    for container, key, leaf in list(nested_items_iter(result)):
        if isinstance(leaf, ShardedObject):
            container[key] = objects[leaf.unique_key][0]
        else:
            chunks += _chunks_to_read(leaf, reader)
            container[key] = leaf.data
    plan = reader.plan_parts(chunks)
    plan.verify()
    plan.read()
    return result


def _chunks_to_read(leaf: ShardedTensor, reader: CheckpointReader) -> Iterable[Chunk]:
    stored = reader.entries[leaf.key]
    leaf.init_data("cpu")
    assert leaf.data is not None
    if not isinstance(stored, StoredTensor):
        raise CheckpointingException(f"{leaf.key} must be a tensor in the checkpoint, got a plain value")
    if tuple(stored.size) == tuple(leaf.global_shape):
        return local_chunks(leaf.key, leaf.data) if isinstance(leaf.data, DTensor) else [_chunk(leaf)]
    if not leaf.allow_shape_mismatch or isinstance(leaf.data, DTensor) or len(stored.size) != len(leaf.global_shape):
        raise CheckpointingException(
            f"{leaf.key} must have the shape {list(leaf.global_shape)} in the checkpoint, got {list(stored.size)}"
        )
    chunk = _chunk(leaf)
    local = chunk.local
    for dim, (begin, end) in enumerate(zip(chunk.offsets, stored.size, strict=True)):
        local = local.narrow(dim, 0, max(0, min(local.shape[dim], end - begin)))
    return [Chunk(chunk.name, stored.size, chunk.offsets, local)]


def get_default_save_sharded_strategy(backend: str = BACKEND) -> Any:
    """Return the strategy of a format, of which there is one."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy(backend)


def get_default_load_sharded_strategy(checkpoint_dir: str | os.PathLike[str] | None = None) -> Any:
    """Return the strategy that loads the one format."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    return TorchDistLoadShardedStrategy()
