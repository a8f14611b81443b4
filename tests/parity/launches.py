"""Runs cells on their ranks: all of one number of ranks in one launch, and a new one after a cell that fails."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from tests.parity.cells import Cell, Reference
from tests.parity.outcomes import Outcome, train
from tests.support.launch import run_ranks

K = TypeVar("K", bound=Hashable)

_CELLS_OF_A_LAUNCH = 24
_START_S, _SECONDS_OF_A_CELL = 600.0, 60.0


@dataclass(frozen=True)
class _Job:
    argv: list[str]
    mutation: str | None = None


Ran = list[Outcome] | str
"""[ranks] what a cell led to, or why it did not."""


def run_cells(cells: Sequence[Cell]) -> dict[str, Ran]:
    """What the cells led to, by name. One that fails takes no other with it."""
    ran = run_mutated([(cell, None) for cell in cells])
    return {name: result for (name, _), result in ran.items()}


def run_mutated(jobs: Sequence[tuple[Cell, str | None]]) -> dict[tuple[str, str | None], Ran]:
    """What cells led to with a fault of ``mutations.MUTATIONS`` on all ranks, by the names of both; None: without."""
    return _run_all({(cell.name, fault): (cell.ranks, _Job(cell.argv, fault)) for cell, fault in jobs})


def run_command_lines(command_lines: Mapping[str, tuple[int, list[str]]]) -> dict[str, Ran]:
    """What (number of ranks, flags) led to, by the same names; where ranks are as many, in the given order."""
    return _run_all({name: (ranks, _Job(argv)) for name, (ranks, argv) in command_lines.items()})


def _run_all(jobs: Mapping[K, tuple[int, _Job]]) -> dict[K, Ran]:
    results: dict[K, Ran] = {}
    for ranks in sorted({ranks for ranks, _ in jobs.values()}):
        of_launch = {key: job for key, (of_job, job) in jobs.items() if of_job == ranks}
        results |= dict(zip(of_launch, _run(ranks, list(of_launch.values())), strict=True))
    return results


_REFERENCES: dict[Reference, Outcome] = {}


def run_references(references: Sequence[Reference]) -> dict[Reference, Outcome]:
    """What one process comes to; each is run once in the life of this one.

    Raises:
        RuntimeError: one failed.
    """
    missing = [reference for reference in dict.fromkeys(references) if reference not in _REFERENCES]
    for reference, ran in zip(missing, _run(1, [_Job(one.argv) for one in missing]), strict=True):
        if isinstance(ran, str):
            raise RuntimeError(f"{reference} failed:\n{ran}")
        _REFERENCES[reference] = ran[0]
    return {reference: _REFERENCES[reference] for reference in references}


def _run(ranks: int, jobs: list[_Job]) -> list[Ran]:
    results: list[Ran] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(results) < len(jobs):
            first = len(results)
            of_launch = jobs[first : first + _CELLS_OF_A_LAUNCH]
            limit_s = _START_S + _SECONDS_OF_A_CELL * len(of_launch)
            try:
                run_ranks(ranks, _on_rank, folder, first, of_launch, timeout_s=limit_s)
                failure = ""
            except AssertionError as error:
                failure = str(error)
            for index in range(first, first + len(of_launch)):
                results.append(_result(Path(folder), index, ranks, failure))
                if isinstance(results[-1], str):
                    break  # those after it have not run
    return results


def _result(folder: Path, index: int, ranks: int, failure: str) -> Ran:
    files = [folder / f"{index}.{rank}.result" for rank in range(ranks)]
    if all(file.exists() for file in files):
        return [pickle.loads(file.read_bytes()) for file in files]
    errors = [file.read_text() for file in sorted(folder.glob(f"{index}.*.error"))]
    # Ranks whose neighbour has ended say so; what ended it is the cause.
    errors.sort(key=lambda text: "onnection" in text.splitlines()[-1] or "imed out" in text)
    return errors[0] if errors else failure or "no rank wrote a result"


def _on_rank(folder: str, first: int, jobs: list[_Job]) -> None:
    from tests.parity.mutations import MUTATIONS

    for index, job in enumerate(jobs, first):
        path = Path(folder) / f"{index}.{dist.get_rank()}"
        try:
            with MUTATIONS[job.mutation].scope() if job.mutation else nullcontext():
                outcome = train(job.argv)
        except Exception:
            Path(f"{path}.error").write_text(traceback.format_exc())
            raise
        Path(f"{path}.part").write_bytes(pickle.dumps(outcome))
        Path(f"{path}.part").rename(f"{path}.result")
