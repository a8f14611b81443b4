"""Flags of profiles and of the record of memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

from megatron.training.cli.flag_rows import F, FlagGroup

PROFILING_FLAGS = FlagGroup(
    "profiles",
    F(
        "--profile",
        "profile steps: for an nsys around the process, or with --use-pytorch-profiler into a file and a summary",
    ),
    F("--profile-step-start", "profile the iterations after this one"),
    F("--profile-step-end", "the last of them"),
    F("--profile-ranks", "ranks to profile (default: all)"),
    F("--use-pytorch-profiler", "write torch_profile/rank-N.json.gz and .txt beside --tensorboard-dir, or in --save"),
    F("--pytorch-profiler-collect-shapes", "with the shapes of inputs"),
    F("--pytorch-profiler-collect-callstack", "with the lines of Python"),
    F("--pytorch-profiler-collect-chakra", "write torch's execution trace to chakra/ too"),
    F(
        "--overlap-report",
        "write a page, a picture and numbers of one iteration: for each unit compute, gathers, "
        "reductions and the time in which nothing computes, and the memory by kind",
        metavar="FOLDER",
        type=str,
    ),
    F(
        "--overlap-report-step",
        "the iteration of --overlap-report (default: the twelfth of this run)",
        type=int,
        metavar="ITERATION",
    ),
    F("--nvtx-ranges", "mark iterations for nsys; units are always marked"),
    F("--record-shapes", "mark operators with their shapes for nsys"),
    F(
        "--record-memory-history",
        "record allocations; write a snapshot and a summary after --profile-step-end, at the end of "
        "training if that is earlier, and where memory runs out",
    ),
    F("--memory-snapshot-path", "file of the snapshot; the rank is put before its suffix"),
)
