"""Conversion of checkpoints between programs; needs no GPU and no other ranks.

Example::

    python tools/checkpoint/convert.py models/Qwen3-8B runs/qwen                      # Hugging Face -> this framework
    python tools/checkpoint/convert.py runs/qwen models/tuned --to huggingface --dtype bfloat16
    python tools/checkpoint/convert.py models/Qwen3-8B --print-flags                  # the launch flags of the model
    python tools/checkpoint/convert.py megatron_lm/run runs/own -- --num-layers 32 --hidden-size 4096 ...

The source is recognised by what lies in it: a folder with ``config.json`` and safetensors files is a Hugging Face model, a
folder with ``latest_checkpointed_iteration.txt`` a run, ours or Megatron-LM's. Of Megatron-LM's the flags of the model are given after ``--``:
a launch line, or the part of it that says what the model is. Tensors are copied a few rows at a time. The target
appears when it is complete. ``pretrain_gpt.py --load`` reads the same folders without a conversion.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Works without an installed package. The tool's own folder must go: a file in it would hide the standard ``inspect``.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, ForeignLayout, TensorReader
from megatron.training.arguments import parse_settings
from megatron.training.formats.copying import (
    CONVERTED_FROM,
    is_weight,
    memory_nbytes,
    tensors_of,
    write_huggingface,
    write_own,
)
from megatron.training.formats.flags import flags_of
from megatron.training.formats.huggingface_config import KINDS_OF_IDS
from megatron.training.formats.megatron_lm import SavedRun, args_to_save, in_our_names, layout_of
from megatron.training.formats.recognise import find_foreign
from megatron.training.formats.resume import converted_run, goes_on
from megatron.training.formats.value_kinds import ARCHITECTURE, checked_entry
from megatron.training.run_folder import TRACKER, checkpoint_path, read_tracker, write_tracker

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A launch line needs them.
_NOT_OF_THE_MODEL = (
    ("--micro-batch-size", "1"),
    ("--train-iters", "1"),
    ("--lr", "1"),
    ("--seq-length", "1"),
    ("--tokenizer-type", "NullTokenizer"),
    ("--vocab-size", "1"),
    ("--mock-data",),
)
_OF_A_RUN = ("state", "scheduler", "samples", "rng", "args")
_ARCHITECTURE = f"{EXTRA_STATE}architecture"
_TOKEN_IDS = f"{EXTRA_STATE}token_ids"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is converted: our weights of a model, and what is known of it.

    Args:
        reader: of weights, and of the optimizer's state if ``run`` is not {}.
        run: what a run goes on from, by our names; {} where there are weights alone.
        without: why there are weights alone.
        token_ids: entries of Hugging Face's ``config.json`` that name special tokens, where they are known.
    """

    reader: TensorReader
    kind: str
    path: Path
    architecture: dict[str, Any]
    iteration: int
    run: dict[str, Any] = field(default_factory=dict)
    without: str = ""
    token_ids: dict[str, Any] = field(default_factory=dict)


def open_source(
    folder: Path,
    *,
    step: int | None,
    padded_vocab_size: int | None,
    flags: Sequence[str] = (),
    weights_alone: bool = True,
) -> Source:
    """Open a checkpoint of any program.

    Args:
        weights_alone: leave out what a run goes on from.
        flags: of the model, where the checkpoint does not say what it is.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: it cannot be read; says why.
    """
    found = find_foreign(folder, step)
    if found is not None:
        if not found.architecture and not flags:
            raise ValueError(
                f"{found.path} ({found.kind}) does not say what model it is of: give the model's flags after --, such as those of "
                "the launch line that trained it"
            )
        changed = {} if padded_vocab_size is None else {"padded_vocab_size": padded_vocab_size}
        architecture = {**(found.architecture or _architecture_of(flags, found.num_ids)), **changed}
        known: dict[str, Any] = {"kind": found.kind, "path": found.path, "architecture": architecture}
        known["token_ids"] = dict(found.token_ids)
        without = "as asked for" if weights_alone else "it is no run that goes on"
        if not weights_alone and goes_on(found, finetune=False):
            assert found.run is not None
            try:
                state, whole = converted_run(found), found.reader(architecture, state_keys=("exp_avg", "exp_avg_sq"))
                return Source(**known, reader=whole, iteration=found.run.iteration or 0, run=state)
            except ValueError as error:
                without = str(error)
        return Source(**known, reader=found.reader(architecture), iteration=0, without=without)
    path, iteration = folder, 0
    if (folder / TRACKER).is_file() or step is not None:
        iteration = step if step is not None else read_tracker(folder / TRACKER) or 0
        path = checkpoint_path(folder, iteration)
    stored = CheckpointReader(path)
    if _ARCHITECTURE not in stored.entries:
        raise ValueError(f"{path} must be a checkpoint of a training run, which says what model it is of, got none")
    architecture = checked_entry(stored, _ARCHITECTURE, ARCHITECTURE)
    reader: TensorReader = in_our_names(stored, architecture)
    run: dict[str, Any] = {}
    saved = [name for name in _OF_A_RUN if f"{EXTRA_STATE}{name}" in stored.entries]
    if not weights_alone and "scheduler" in saved and "optimizer.param_groups" in stored.entries:
        run = {name: stored.values([f"{EXTRA_STATE}{name}"])[f"{EXTRA_STATE}{name}"] for name in saved}
    token_ids = checked_entry(stored, _TOKEN_IDS, KINDS_OF_IDS)
    return Source(
        token_ids=token_ids,
        reader=reader,
        kind="own",
        path=path,
        architecture=architecture,
        iteration=iteration,
        run=run,
        without="as asked for" if weights_alone else "it holds no optimizer",
    )


def _architecture_of(flags: Sequence[str], num_ids: int) -> dict[str, Any]:
    """Return our settings of the model of a launch line; what is not the model's is not looked at."""
    given = {*flags, *(flag.split("=")[0] for flag in flags)}
    defaults = (words for words in _NOT_OF_THE_MODEL if words[0] not in given)
    settings = parse_settings([*flags, *(word for words in defaults for word in words)])
    return settings.model.architecture(num_ids)


def convert(source: Source, args: argparse.Namespace) -> str:
    """Write the source's weights to ``args.target``; return what was written, in words."""
    dtype = None if args.dtype is None else _DTYPES[args.dtype]
    buffer_nbytes = args.buffer_mib << 20
    if args.to == "huggingface":
        kind = write_huggingface(
            source.reader,
            args.target,
            source.architecture,
            buffer_nbytes=buffer_nbytes,
            shard_nbytes=int(args.max_shard_gb * 1e9),
            vocab_size=args.vocab_size,
            dtype=dtype,
            token_ids=source.token_ids,
        )
        return f"{args.target} (Hugging Face, {kind})"
    if (args.target / TRACKER).exists():
        raise FileExistsError(f"{args.target} must be a new run's folder, got one with {TRACKER}; give another one")
    path = checkpoint_path(args.target, source.iteration)
    values: dict[str, Any] = {_ARCHITECTURE: source.architecture}
    values |= {f"{EXTRA_STATE}{name}": value for name, value in source.run.items()}
    plain = [name for name in ("optimizer.param_groups", "optimizer.kind") if source.run]
    values |= source.reader.values(plain)
    if not source.run:
        values[CONVERTED_FROM] = f"{source.path} ({source.kind})"
    if source.token_ids:
        values[_TOKEN_IDS] = source.token_ids
    write_own(
        source.reader,
        path,
        values,
        names=_names(source),
        buffer_nbytes=buffer_nbytes,
        dtype=dtype,
        layout=None if args.to == "own" else _layout(source, args.to),
    )
    write_tracker(args.target, source.iteration)
    return str(path)


def _names(source: Source) -> list[str]:
    """Return the tensors to write: weights, and with a run the optimizer's state."""
    return [
        name for name in tensors_of(source.reader) if is_weight(name) or (source.run and name.startswith("optimizer."))
    ]


def _layout(source: Source, kind: str) -> ForeignLayout:
    if not source.run:
        return layout_of(kind, source.architecture, iteration=source.iteration)
    steps = {int(source.reader.tensor(name)) for name in _names(source) if name.endswith(".step")}
    args = args_to_save(source.run.get("args", {}), source.architecture, source.run["state"], save_optim=True)
    run = SavedRun(args=args, schedule=source.run["scheduler"], steps=sorted(steps))
    return layout_of(kind, source.architecture, iteration=source.iteration, run=run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert, or print flags; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint of another program to this framework's, or back.",
        epilog="exit status: 0; 2 if it cannot be converted",
    )
    parser.add_argument("source", type=Path, help="folder of a Hugging Face model or of a run")
    parser.add_argument("target", type=Path, nargs="?", help="folder to write, which is not there yet")
    parser.add_argument(
        "--to",
        choices=("own", "huggingface", "torch_dist", "fsdp_dtensor"),
        default="own",
        help="format to write (default: own)",
    )
    parser.add_argument("--print-flags", action="store_true", help="print the launch flags of the model alone")
    parser.add_argument("--ckpt-step", type=int, help="iteration of the run (default: the latest)")
    parser.add_argument("--padded-vocab-size", type=int, help="ids of the model to write, with padding (to own)")
    parser.add_argument("--vocab-size", type=int, help="ids to write, without padding (to huggingface; default: all)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="dtype of the weights to write (default: as they are)")
    parser.add_argument("--weights-only", action="store_true", help="leave out what a run goes on from")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a safetensors file (default: 5)")
    parser.add_argument("--buffer-mib", type=int, default=256, help="rows that are copied at once (default: 256 MiB)")
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, given = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args = parser.parse_args(own)
    try:
        source = open_source(
            args.source,
            step=args.ckpt_step,
            padded_vocab_size=args.padded_vocab_size,
            flags=given,
            weights_alone=args.to == "huggingface" or args.dtype is not None or args.weights_only,
        )
        flags = shlex.join(flags_of(source.architecture))
        if args.print_flags:
            print(flags)
            return 0
        if args.target is None:
            raise ValueError("a target must be given; give the folder to write, or --print-flags")
        found = tensors_of(source.reader)
        tensors = {name: found[name] for name in _names(source)}
        nbytes = sum(entry.numel * entry.dtype.itemsize for entry in tensors.values())
        bound = memory_nbytes(source.reader, list(tensors), buffer_nbytes=args.buffer_mib << 20)
        print(f"{source.path} ({source.kind}): {len(tensors)} tensors of {nbytes:,} bytes")
        print(f"at most {bound:,} bytes of tensors are in memory at once")
        print(f"wrote {convert(source, args)}")
        if source.run:
            print(f"with the optimizer's state: a run goes on after iteration {source.iteration}")
        elif args.to != "huggingface":
            print(f"weights alone: {source.without}; training begins at iteration 0")
        print(f"flags of the model: {flags}")
        return 0
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
