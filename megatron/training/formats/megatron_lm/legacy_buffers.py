"""The optimizer's state in Megatron-LM's archives of ``--ckpt-format torch`` with ``--use-distributed-optimizer``: ``distrib_optim.pt``.

[Note: joined buckets] Beside each archive of a model lies one of the optimizer, with a number for each buffer of gradients: one buffer for
each stage of the rank and dtype of its weights. Of a buffer there is a tensor in fp32 for each key, ``param`` (the main weights) among
them, in which its buckets follow each other without the padding at their ends. In a bucket the weights lie in the reverse order of the
modules, as in [Note: buckets]. Where buckets end is not stored: it follows from the saved arguments, and the length tells whether
they were followed. Where it was another order, main weights are not the weights, which is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import ArchivedTensor, read_archive
from megatron.training.formats.megatron_lm.legacy_optimizer import MAIN, WITHOUT
from megatron.training.formats.megatron_lm.names import EMBEDDING, OUTPUT

FILE = "distrib_optim.pt"
_NUMEL = "numel_unpadded"
_ALIGNMENTS = (64, 1)  # of a weight in its bucket, in elements; Megatron-Core had none before 0.9
_MIN_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK = 40_000_000, 1_000_000

_Named = tuple[str, ArchivedTensor]


def joined_state(
    chunks: Sequence[Sequence[_Named]], folder: Path, rank: str, args: Mapping[str, Any], *, is_first_stage: bool
) -> Iterator[tuple[str, str, ArchivedTensor]]:
    """Yield (key, name of the weight, tensor) of the state in a rank's ``distrib_optim.pt``; the key of main weights is ``MAIN``.

    Args:
        chunks: the weights of each stage of the rank, in the order of its modules.
        rank: name of the rank's folder in ``folder``.
        args: Megatron-LM's.
        is_first_stage: the rank is of the first pipeline stage; the others have one bucket.

    Raises:
        ValueError: it is in another form or of other weights; says what.
    """
    where = folder / rank / FILE
    buffers = _buffers(read_archive(where, file=f"{rank}/{FILE}"), where)
    stages = [(number, members) for number, chunk in enumerate(chunks) for members in _by_dtype(chunk)]
    kinds = [members[0][1].dtype for _, members in stages]
    if [dtype for dtype, _ in buffers] != kinds:
        got = " and ".join(f"a buffer of {dtype}" for dtype, _ in buffers) or "no buffer"
        raise ValueError(
            f"{where} must have a buffer for each stage of its rank and dtype of its weights ({', '.join(map(str, kinds))}), got {got}: "
            f"save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable, or {WITHOUT}"
        )
    bucket_numels = _bucket_numels(chunks, args)
    for (number, members), (_, buffer) in zip(stages, buffers, strict=True):
        lengths = bucket_numels if is_first_stage and number == 0 else [None]
        begins = _begins(members, lengths, buffer[_NUMEL], args, where)
        for (key, tensor), ((name, weight), begin) in product(
            [item for item in buffer.items() if item[0] != _NUMEL], zip(members, begins, strict=True)
        ):
            yield MAIN if key == "param" else key, name, _piece(tensor, begin, weight.size)


def _buffers(saved: Any, where: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Return the dtype of the weights, and the tensors by key with their length, of each buffer."""
    states = [state for state in saved if state is not None] if isinstance(saved, list) else [saved]
    if len(states) != 1:
        raise _not_read(
            where, f"state of {len(states)} optimizers (experts of their own ranks, or stages updated one by one)"
        )
    (state,) = states
    if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
        raise _not_read(where, "no buckets_coalesced, which Megatron-LM writes since February 2024")
    found = []
    for number in range(len(state) - 1):
        by_dtype = state.get(number)
        if not isinstance(by_dtype, Mapping) or len(by_dtype) != 1:
            raise _not_read(where, f"no single dtype of buffer {number}")
        ((dtype, buffer),) = by_dtype.items()
        numel = buffer.get(_NUMEL) if isinstance(buffer, Mapping) else None
        tensors = {key: value for key, value in buffer.items() if key != _NUMEL} if isinstance(buffer, Mapping) else {}
        for key, tensor in tensors.items():
            if not (isinstance(tensor, ArchivedTensor) and tensor.is_contiguous and tensor.size == (numel,)):
                raise _not_read(where, f"no tensor of {numel} elements as {key} of buffer {number}")
        if "param" not in tensors:
            raise _not_read(where, f"no main weights in buffer {number}")
        found.append((dtype[0] if isinstance(dtype, tuple) and dtype else dtype, dict(buffer)))
    return found


def _not_read(where: Path, got: str) -> ValueError:
    return ValueError(
        f"{where} must hold the buffers of one distributed optimizer, got {got}: save it with --ckpt-format torch_dist and "
        f"--dist-ckpt-optim-fully-reshardable, or {WITHOUT}"
    )


def _by_dtype(chunk: Sequence[_Named]) -> list[list[_Named]]:
    found: dict[torch.dtype, list[_Named]] = {}
    for name, weight in chunk:
        found.setdefault(weight.dtype, []).append((name, weight))
    return list(found.values())


def _bucket_numels(chunks: Sequence[Sequence[_Named]], args: Mapping[str, Any]) -> list[int | None]:
    """Return after how many elements buckets end, as the arguments say and as older versions had it; None stands for one bucket."""
    if not args.get("overlap_grad_reduce") or args.get("overlap_param_gather_with_optimizer_step"):
        return [None]
    if args.get("ddp_num_buckets"):
        numel = sum(weight.size.numel() for chunk in chunks for _, weight in chunk)
        return [numel // int(args["ddp_num_buckets"]), None]
    ranks = int(args.get("data_parallel_size") or 1) * int(args.get("context_parallel_size") or 1)
    usual = max(_MIN_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * ranks)
    return [int(args.get("ddp_bucket_size") or usual), _MIN_BUCKET_NUMEL, None]


def _begins(
    members: Sequence[_Named], bucket_numels: Sequence[int | None], numel: int, args: Mapping[str, Any], where: Path
) -> list[int]:
    """Return where each weight begins: see [Note: joined buckets]."""
    is_tied = not args.get("untie_embeddings_and_output_weights") or args.get("mtp_num_layers")
    has_copies = is_tied and int(args.get("pipeline_model_parallel_size") or 1) > 1
    shared = (EMBEDDING, OUTPUT) if has_copies else ()
    sizes = [(weight.size.numel(), name.endswith(tuple(f": {own}" for own in shared))) for name, weight in members]
    lengths = []
    for bucket_numel, alignment in product(bucket_numels, _ALIGNMENTS):
        begins, length = _lay_out(sizes[::-1], bucket_numel, alignment)
        if length == numel:
            return begins[::-1]
        lengths.append(length)
    raise ValueError(
        f"{where} must have {' or '.join(map(str, sorted(set(lengths))))} elements in the buffer of {len(members)} weights, as its "
        f"arguments say, got {numel}: save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable, or {WITHOUT}"
    )


def _lay_out(sizes: Sequence[tuple[int, bool]], bucket_numel: int | None, alignment: int) -> tuple[list[int], int]:
    """Lay out weights, of which some have a bucket of their own; return where they begin, and the length of all."""
    begins, closed, end = [], 0, 0
    for numel, is_alone in sizes:
        end = math.ceil(end / alignment) * alignment
        begins.append(closed + end)
        end += numel
        if is_alone or (bucket_numel is not None and end >= bucket_numel):
            closed, end = closed + end, 0
    return begins, closed + end


def _piece(tensor: ArchivedTensor, begin: int, size: torch.Size) -> ArchivedTensor:
    """Return the elements of a flat tensor from ``begin`` on as a tensor of a size."""
    itemsize = tensor.dtype.itemsize
    place = tensor.place._replace(offset=tensor.place.offset + begin * itemsize, nbytes=size.numel() * itemsize)
    return replace(tensor, size=size, place=place)
