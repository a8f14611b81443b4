"""Runs cells on their ranks: all of one number of ranks in one launch, and a new one after a cell that fails."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from tests.parity.cells import Cell, Reference
from tests.parity.outcomes import Outcome, train
from tests.support.launch import run_ranks

_CELLS_OF_A_LAUNCH = 24
_START_S, _SECONDS_OF_A_CELL = 120.0, 20.0

Ran = list[Outcome] | str
"""[ranks] what a cell led to, or why it did not."""


def run_cells(cells: Sequence[Cell], mutation: str | None = None) -> dict[str, Ran]:
    """What the cells led to, by name. One that fails takes no other with it.

    Args:
        mutation: of ``mutations.MUTATIONS``, in force on all ranks.
    """
    results: dict[str, Ran] = {}
    for ranks in sorted({cell.ranks for cell in cells}):
        jobs = {cell.name: cell.argv for cell in cells if cell.ranks == ranks}
        results |= _run(ranks, jobs, mutation)
    return results


_REFERENCES: dict[Reference, Outcome] = {}


def run_references(references: Sequence[Reference]) -> dict[Reference, Outcome]:
    """What one process comes to; each is run once in the life of this one.

    Raises:
        RuntimeError: one failed.
    """
    missing = [reference for reference in dict.fromkeys(references) if reference not in _REFERENCES]
    results = _run(1, {str(reference): reference.argv for reference in missing}, None)
    for reference in missing:
        ran = results[str(reference)]
        if isinstance(ran, str):
            raise RuntimeError(f"{reference} failed:\n{ran}")
        _REFERENCES[reference] = ran[0]
    return {reference: _REFERENCES[reference] for reference in references}


def _run(ranks: int, jobs: dict[str, list[str]], mutation: str | None) -> dict[str, Ran]:
    results: dict[str, Ran] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting := [name for name in jobs if name not in results]:
            numbered = {name: list(jobs).index(name) for name in waiting[:_CELLS_OF_A_LAUNCH]}
            limit_s = _START_S + _SECONDS_OF_A_CELL * len(numbered)
            try:
                run_ranks(
                    ranks,
                    _on_rank,
                    folder,
                    [(index, jobs[name]) for name, index in numbered.items()],
                    mutation,
                    timeout_s=limit_s,
                )
                failure = ""
            except AssertionError as error:
                failure = str(error)
            for name, index in numbered.items():
                results[name] = _result(Path(folder), index, ranks, failure)
                if isinstance(results[name], str):
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


def _on_rank(folder: str, jobs: list[tuple[int, list[str]]], mutation: str | None) -> None:
    from tests.parity.mutations import MUTATIONS

    scope: Callable[[], object] = MUTATIONS[mutation].scope if mutation else nullcontext
    for index, argv in jobs:
        path = Path(folder) / f"{index}.{dist.get_rank()}"
        try:
            with scope():  # type: ignore[attr-defined]
                outcome = train(argv)
        except Exception:
            path.with_suffix(f"{path.suffix}.error").write_text(traceback.format_exc())
            raise
        unfinished = path.with_suffix(f"{path.suffix}.part")
        unfinished.write_bytes(pickle.dumps(outcome))
        unfinished.rename(path.with_suffix(f"{path.suffix}.result"))
