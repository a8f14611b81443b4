"""Check a launch line of ``pretrain_gpt.py`` without GPUs, ranks or data: each flag's fate, and what would be computed.

    python tools/check_launch.py --ranks 8 -- --num-layers 32 --hidden-size 4096 ...

Paths need not exist, and packages need not be installed: what the run needs is listed. The exit status is 0 where the line
would start, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.datasets.index_size import BLEND_NBYTES, DOCUMENT_NBYTES, MOCK_TOKENS, in_gib, index_nbytes
from megatron.core.rank_grid import RankGrid
from megatron.training.arguments import CheckedLine, Settings, check_command_line
from megatron.training.cli.flag_parser import FATES
from megatron.training.formats.architecture import sizes_of
from megatron.training.launch.packages import missing_packages
from megatron.training.launch.samples import num_samples

_GROUPS = {
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "data": "dp",
    "experts": "ep",
    "tensor of experts": "expt_tp",
    "data of experts": "expt_dp",
}


def report(line: CheckedLine) -> str:
    """Format the fate of each flag, what would be computed, and the verdict."""
    parts = [_fates(line)]
    if line.settings is not None:
        parts.append(_computed(line.settings))
    if line.said_once:
        parts.append(_section("said once", list(line.said_once)))
    if line.faults:
        number = "one reason" if len(line.faults) == 1 else f"{len(line.faults)} reasons"
        parts.append(_section(f"the run would not start, for {number}", line.faults))
    else:
        parts.append("the run would start")
    return "\n\n".join(parts)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join((f"{title}:", *(f"  {line}" for line in lines)))


def _fates(line: CheckedLine) -> str:
    rows = []
    for kind in FATES:
        of_kind = [fate for fate in line.fates if fate.kind == kind]
        given = [" ".join((fate.flag, *fate.values)).strip() for fate in of_kind]
        if kind in ("always so", "no effect"):
            rows += [f"{kind + ':':<11} {flag} ({fate.words})" for flag, fate in zip(given, of_kind, strict=True)]
        else:
            rows += [f"{kind + ':':<11} {flag}" for flag in given]
    return _section("flags", rows)


def _computed(settings: Settings) -> str:
    grid, batch, data, loop = settings.grid, settings.batch, settings.data, settings.loop
    sizes = {name: grid.size(axis) for name, axis in _GROUPS.items()}
    product = " * ".join(f"{name} {sizes[name]}" for name in ("tensor", "context", "pipeline", "data"))
    rows = [f"ranks: {grid.world_size} = {product}; in the order {grid.order}"]
    rows += [
        f"group of {name}: {size} ranks, the first one {_first(grid, name)}" for name, size in sizes.items() if size > 1
    ]
    strategy = settings.ddp.data_parallel_sharding_strategy
    rows.append(f"sharding: {strategy}, over {grid.size('intra_dp_cp')} ranks")
    rows.append(
        f"global batch: {batch.global_batch_size} samples = {batch.num_microbatches} microbatches * "
        f"{batch.data_parallel_size} ranks * {batch.micro_batch_size}; {batch.global_batch_size * data.seq_length:,} tokens"
    )
    rows += [f"  {size} samples from sample {start:,} on" for start, size in batch.schedule]
    rows.append(f"length: {loop.train_iters} iterations, {batch.consumed_after(loop.train_iters):,} samples")
    rows.append(f"model: {_parameters(settings)}")
    rows.append(f"dtype: {str(settings.model.transformer.params_dtype).removeprefix('torch.')}")
    rows.append(f"index of the training data: {_index(settings)}")
    needed = missing_packages(settings, "cuda" if settings.distributed.backend != "gloo" else "cpu")
    rows += [f"needs {package}, which is not usable here: {reason}" for package, reason in needed.items()]
    return _section("computed", rows)


def _index(settings: Settings) -> str:
    """Describe the memory and the disk that the order of the training samples takes."""
    data, count = settings.data, num_samples(settings)[0]
    if data.sft:
        return f"16 bytes for each line of conversations, in {data.cache_path or 'a folder cache beside the files'}"
    blend = get_blend_from_list(data.data_path or data.train_data_path)
    documents = count * data.seq_length // MOCK_TOKENS if data.mock_data else 0
    nbytes = index_nbytes(count, documents)
    if blend is not None and (len(blend[0]) > 1 or blend[1] is not None):
        nbytes += count * BLEND_NBYTES
    size = f"about {in_gib(nbytes)}" if data.mock_data else f"at least {in_gib(nbytes)}"
    if data.mock_data and data.cache_path is None:
        return f"{size} of memory for each rank; with --data-cache-path one of a host builds it for all"
    more = "" if data.mock_data else f", and {DOCUMENT_NBYTES} bytes for each document of each epoch,"
    where = f"in {data.cache_path}" if data.cache_path else "beside the corpora"
    return f"{size}{more} of memory for one rank of each host while it is built, and of disk {where}"


def _first(grid: RankGrid, name: str) -> str:
    ranks = grid.groups(_GROUPS[name])[0].tolist()
    return " ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"


def _parameters(settings: Settings) -> str:
    """Count the parameters of the whole model; an id of a tokenizer that is not read costs so many of them."""
    config = settings.model

    def count(padded: int) -> int:
        parameters, _ = sizes_of(replace(config, model_vocab_size=padded).architecture(padded))
        return sum(size.numel() for size in parameters.values())

    vocab_size = config.model_vocab_size or settings.tokenizer.vocab_size
    if vocab_size is not None:
        padded, there = config.padded_vocab_size(vocab_size), config.upstream_vocab_size(vocab_size)
        more = "" if there == padded else f"; Megatron-LM pads to {there}, as --padded-vocab-size {there} does"
        return f"{count(padded):,} parameters with {padded} ids, {vocab_size} padded{more}"
    ranks = config.transformer.tensor_model_parallel_size
    step = ranks if config.make_vocab_size_divisible_by is None else config.padded_vocab_size(1)
    of_one, of_two = count(step), count(2 * step)
    of_id = (of_two - of_one) // step
    return f"{of_one - of_id * step:,} parameters, and {of_id:,} for each id of the tokenizer, padded to a multiple of {step}"


def main(argv: Sequence[str]) -> int:
    """Print the report; return the exit status."""
    own, flags = (
        (list(argv), []) if "--" not in argv else (list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :]))
    )
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="-- separates the flags of the launch line"
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks of the run")
    ranks = parser.parse_args(own).ranks
    line = check_command_line(flags, world_size=ranks, paths_exist=False)
    print(report(line))
    return 1 if line.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
