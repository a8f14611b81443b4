"""Plan a run without GPUs: whether a launch line of ``pretrain_gpt.py`` fits into memory, and how fast it is.

    python tools/plan.py --gpus 1024 --gpu h200 -- --num-layers 32 --hidden-size 4096 ...
    python tools/plan.py --gpus 1024 --search -- ...

The launch line may come first, too, with ``torchrun ... pretrain_gpt.py`` before its flags. The plan is made by the run's own
code, stepped without devices (docs/planning.md). The exit status is 0 where the run fits, 1 where it does not, and 2 where it
would not start, or this machine cannot plan it.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import Settings, check_command_line
from megatron.training.planner import Wish, describe, plan_run, rates_of, search, table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a launch line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="ranks of the run")
    parser.add_argument("--gpu", default="h200", help="kind of device, or a JSON file of tools/calibrate.py")
    parser.add_argument("--network", type=float, help="GB/s of each GPU's network adapter, each way")
    parser.add_argument("--gpus-of-host", type=int, help="GPUs that NVLink connects")
    parser.add_argument("--search", action="store_true", help="list the fastest splits that fit, too")
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    for flag, value in (
        ("--gpus", options.gpus),
        ("--network", options.network),
        ("--gpus-of-host", options.gpus_of_host),
    ):
        if value is not None and not 0 < value < math.inf:
            parser.error(f"{flag} must be a number greater than 0, got {value:g}")
    try:
        rates = rates_of(options.gpu)
    except (ValueError, OSError) as error:
        parser.error(f"--gpu {options.gpu}: {error}")
    if options.network is not None:
        rates = replace(rates, network_bandwidth=options.network * 1e9)
    if options.gpus_of_host is not None:
        rates = replace(rates, devices_of_host=options.gpus_of_host)
    flags = flags_of(rest)
    line = check_command_line(flags, world_size=options.gpus, paths_exist=False)
    if line.settings is None:
        print("the run would not start:", *line.faults, sep="\n  ")
        return 2
    try:
        vocab_size = vocab_size_of(line.settings)
    except (OSError, ValueError, ImportError) as error:
        print(f"how many ids the tokenizer has must be known: {error}\nadd --vocab-size N to plan without its files")
        return 2
    status = 2
    try:
        plan = plan_run(line.settings, rates, vocab_size=vocab_size)
        print(describe(plan))
        if line.said_once:
            print("\nwhat the run says of its flags", *line.said_once, sep="\n  ")
        status = 0 if plan.fits else 1
    except MemoryError as error:
        print(f"this machine cannot plan the run: {error}")
    if options.search:
        wish = Wish(flags=tuple(flags), world_size=options.gpus, vocab_size=vocab_size, rates=rates)
        found = search(wish)
        print("\nsplits that fit, fastest first" + ("" if found else ": none"), table(found), sep="\n")
    return status


def flags_of(line: Sequence[str]) -> list[str]:
    """Return the flags of a launch line, without ``torchrun`` and the script before them."""
    scripts = [at for at, word in enumerate(line) if word.endswith(".py")]
    return [word for word in line[scripts[0] + 1 if scripts else 0 :] if word != "--"]


def vocab_size_of(settings: Settings) -> int:
    """Return the number of ids of the run's tokenizer.

    Raises:
        OSError, ValueError, ImportError: the tokenizer cannot be built.
    """
    known = settings.tokenizer.vocab_size
    return known if known is not None else build_tokenizer(settings.tokenizer).vocab_size


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of ranks that do not exist
    sys.exit(main())
