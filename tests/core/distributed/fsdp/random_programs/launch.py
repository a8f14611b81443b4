"""Runs programs on ranks. Programs share a launch; after a program that did not end "equal", there is a new process group."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.core.distributed.fsdp.random_programs.draw import Program
from tests.core.distributed.fsdp.random_programs.execute import execute
from tests.support.launch import run_ranks

PATIENCE_S = 20.0
"""Time-out of collectives."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome on all ranks: "equal", "refused", "wrong", "crash", "hang", or "uneven" if ranks differ."""

    word: str
    detail: str = ""


def run_programs(
    programs: Sequence[Program], report: Callable[[Program, Outcome], None] = lambda program, outcome: None
) -> list[Outcome]:
    """Run programs for the same number of ranks and return their outcomes; start a new launch if one dies."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(programs):
        rest = list(programs[len(outcomes) :])
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(rest[0].num_ranks, _run_on_rank, rest, folder, timeout_s=3600.0)
                died = ""
            except AssertionError as error:
                died = str(error)
            ended = [
                [json.loads(line) for line in path.read_text().splitlines()]
                for path in sorted(Path(folder).glob("rank*.jsonl"))
            ]
        num_ended = min(map(len, ended), default=0)
        new = [_outcome([of_rank[at] for of_rank in ended]) for at in range(num_ended)]
        if num_ended < len(rest):
            if died:
                words = [of_rank[num_ended] for of_rank in ended if len(of_rank) > num_ended]
                new.append(Outcome("died", f"{died} {words}"))
            elif not new or new[-1].word in ("equal",):
                raise AssertionError("a launch ended early")
        for program, outcome in zip(rest, new, strict=False):
            report(program, outcome)
        outcomes += new
    return outcomes


def _outcome(results: list[tuple[str, str]]) -> Outcome:
    words = [word for word, _ in results]
    if "wrong" in words:
        return Outcome("wrong", next(detail for word, detail in results if word == "wrong"))
    if any("Timed out" in detail or "timeout" in detail.lower() for _, detail in results):
        return Outcome("hang", str(results))
    if len({(word, detail.split("]")[0]) for word, detail in results}) > 1:
        return Outcome("uneven", str(results))
    return Outcome(*results[0])


def _run_on_rank(programs: Sequence[Program], folder: str) -> None:
    """Run programs and write their outcomes to this rank's file."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    needs_group = True
    dist.barrier()  # otherwise a rank could leave the group while another one still connects to it
    logging.disable(logging.WARNING)  # most programs trigger a warning about speed
    gc.collect()
    gc.freeze()
    for number, program in enumerate(programs):
        if needs_group:
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/store{number}", num_ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=PATIENCE_S)
            )
        try:
            result = execute(program)
        except BaseException:
            result = ("crash", traceback.format_exc())
        gc.collect()
        with open(f"{folder}/rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(result) + "\n")
        needs_group = result[0] != "equal"
        meeting = dist.PrefixStore(f"end {number}", store)
        meeting.set(str(rank), result[0])
        words = []
        for other in range(num_ranks):
            meeting.wait([str(other)], timedelta(seconds=4 * PATIENCE_S))
            words.append(meeting.get(str(other)))
        needs_group = any(word != b"equal" for word in words)
    if needs_group:  # run_ranks destroys it
        return
