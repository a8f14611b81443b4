"""Flags of data; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``DataConfig``."""
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", nargs="*", help="a prefix of .bin and .idx, or weights and prefixes in turn")
    group.add_argument("--train-data-path", nargs="*", help="as --data-path, for training alone")
    group.add_argument("--valid-data-path", nargs="*", help="as --data-path, for validation alone")
    group.add_argument("--test-data-path", nargs="*", help="as --data-path, for the test alone")
    group.add_argument("--split", type=unquoted, help="parts for training, validation and test (default: 969,30,1)")
    group.add_argument("--data-cache-path", help="folder of the index cache (default: beside the data)")
    group.add_argument("--mock-data", action="store_true", help="use generated samples instead of --data-path")
    group.add_argument("--seq-length", type=int, help="tokens of a sample")
    group.add_argument("--num-workers", type=int, default=2, help="loader processes of a rank (default: 2)")
    group.add_argument(
        "--no-mmap-bin-files",
        dest="mmap_bin_files",
        action="store_false",
        help="read .bin files instead of mapping them",
    )
    group.add_argument(
        "--allow-gaps-in-corpora",
        action="store_true",
        help="accept .idx files whose sequences do not follow each other in the .bin, such as selections (ours)",
    )
    group.add_argument(
        "--eod-mask-loss", action="store_true", help="leave the prediction after an end of document out of the loss"
    )
    group.add_argument(
        "--allow-ambiguous-pad-tokens",
        action="store_true",
        help="leave padding out of the loss also where its id is that of another special token",
    )


def unquoted(text: str) -> str:
    """Strip quotes, which launch scripts pass on when they keep flags in an array of strings."""
    return text.strip("'\"")
