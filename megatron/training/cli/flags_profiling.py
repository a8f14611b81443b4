"""Flags of profiles and of the record of memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse


def add_profiling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``ProfilingConfig``."""
    group = parser.add_argument_group("profiles")
    group.add_argument(
        "--profile",
        action="store_true",
        help="profile steps: for an nsys around the process, or with --use-pytorch-profiler into a file and a summary",
    )
    group.add_argument(
        "--profile-step-start", type=int, default=10, help="profile the iterations after this one (default: 10)"
    )
    group.add_argument("--profile-step-end", type=int, default=12, help="the last of them (default: 12)")
    group.add_argument("--profile-ranks", nargs="+", type=int, default=[], help="ranks to profile (default: all)")
    group.add_argument(
        "--use-pytorch-profiler",
        action="store_true",
        help="write torch_profile/rank-N.json.gz and .txt beside --tensorboard-dir, or in --save",
    )
    group.add_argument("--pytorch-profiler-collect-shapes", action="store_true", help="with the shapes of inputs")
    group.add_argument("--pytorch-profiler-collect-callstack", action="store_true", help="with the lines of Python")
    group.add_argument(
        "--pytorch-profiler-collect-chakra", action="store_true", help="write torch's execution trace to chakra/ too"
    )
    group.add_argument(
        "--overlap-report",
        metavar="FOLDER",
        help="write a page, a picture and numbers of one iteration: for each unit compute, gathers, reductions and the time in which "
        "nothing computes, and the memory by kind",
    )
    group.add_argument(
        "--overlap-report-step",
        type=int,
        metavar="ITERATION",
        help="the iteration of --overlap-report (default: the twelfth of this run)",
    )
    group.add_argument("--nvtx-ranges", action="store_true", help="mark iterations for nsys; units are always marked")
    group.add_argument("--record-shapes", action="store_true", help="mark operators with their shapes for nsys")
    group.add_argument(
        "--record-memory-history",
        action="store_true",
        help="record allocations; write a snapshot and a summary after --profile-step-end, at the end of training if that is "
        "earlier, and where memory runs out",
    )
    group.add_argument(
        "--memory-snapshot-path",
        default="snapshot.pickle",
        help="file of the snapshot; the rank is put before its suffix (default: snapshot.pickle)",
    )
