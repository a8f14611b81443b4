"""Runs situations on two ranks and says of each whether it came out right, was refused, came out wrong, or hangs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.core.distributed.fsdp.situations.kinds import ZERO3, Kind
from tests.support.launch import run_ranks

# The modules of this package that hold situations. Those of one tuple share launches: compilation takes a while.
EAGER = ("gradients", "views", "conversions", "transforms", "states", "plans")
COMPILED = ("compilation",)

# Seconds that a collective may wait: a hang is one that takes longer.
_PATIENCE_S = 60.0
# What a refusal may be. A KeyError or an AttributeError is an accident.
_REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """One row of the table.

    Args:
        name: of the function, with the strategy where there are several.
        run: (kind) -> what can be compared: tensors, numbers, strings, None, and lists and dicts of them.
        strategy: of ours.
        refuses: a pattern of our error, where we refuse what the row does; None: ours must be right.
    """

    name: str
    run: Callable[[Kind], Any]
    strategy: str
    refuses: str | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a row: "right", "refused", "wrong", "hang" or "crash", and the reason."""

    word: str
    reason: str = ""

    def assert_serves(self, row: Situation) -> None:
        """Fail unless this is right, or the refusal that the row announces."""
        if self.word == "refused" and row.refuses is not None:
            assert re.search(row.refuses, self.reason), f"refused with another message: {self.reason}"
        else:
            assert self.word == "right", f"{self.word}: {self.reason}"


_declared: list[Situation] = []


def situation(
    *, refuses: str | None = None, strategies: Sequence[str] = (ZERO3,)
) -> Callable[[Callable[[Kind], Any]], Callable[[Kind], Any]]:
    """Add the decorated function to the table, once for each strategy."""

    def declare(run: Callable[[Kind], Any]) -> Callable[[Kind], Any]:
        for strategy in strategies:
            name = run.__name__ if len(strategies) == 1 else f"{run.__name__} [{strategy}]"
            _declared.append(Situation(name=name, run=run, strategy=strategy, refuses=refuses))
        return run

    return declare


@functools.cache
def situations(modules: tuple[str, ...] = EAGER + COMPILED) -> dict[str, Situation]:
    """The rows of these modules by name."""
    for module in modules:
        importlib.import_module(f"{__package__}.{module}")
    assert len({row.name for row in _declared}) == len(_declared), "two situations have one name"
    return {row.name: row for row in _declared if row.run.__module__.rpartition(".")[2] in modules}


@functools.cache
def verdicts(name: str, modules: tuple[str, ...]) -> dict[str, Verdict]:
    """The verdict of each row of these modules for "fsdp2" or "ours"."""
    return run_rows(name, list(situations(modules)))


def run_rows(name: str, rows: Sequence[str]) -> dict[str, Verdict]:
    """Run these rows for "fsdp2" or "ours", with new ranks after each one that leaves collectives out of step."""
    found: dict[str, Verdict] = {}
    # Refused ones end launches: after all others, of which one launch then serves all.
    remaining = sorted(rows, key=lambda row: situations()[row].refuses is not None)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            failure = ""
            try:
                run_ranks(2, _run_rows, name, remaining, folder, timeout_s=900.0)
            except AssertionError as error:  # a rank died, or a row ended the launch
                failure = str(error)
            told = [_read(f"{folder}/told{rank}") for rank in range(2)]
        num_before = len(found)
        for row in remaining:
            if not any(row in of_rank for of_rank in told):
                break
            found[row] = _combine([of_rank.get(row) for of_rank in told], failure)
        if len(found) == num_before:
            raise AssertionError(f"the launch of {name} failed before its first row: {failure}")
        remaining = remaining[len(found) - num_before :]
    return found


def _read(path: str) -> dict[str, Verdict]:
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return {row: Verdict(word, reason) for row, word, reason in map(json.loads, file)}


def _combine(told: Sequence[Verdict | None], failure: str) -> Verdict:
    if any(verdict is None or verdict.word == "started" for verdict in told):
        if any(verdict is not None and verdict.word == "hang" for verdict in told) or "did not finish" in failure:
            return Verdict("hang", " | ".join(verdict.reason for verdict in told if verdict is not None))
        return Verdict("crash", failure)
    given = [verdict for verdict in told if verdict is not None]
    for word in ("hang", "wrong"):
        if any(verdict.word == word for verdict in given):
            return Verdict(word, " | ".join(f"{verdict.word}: {verdict.reason}" for verdict in given))
    if len({verdict.word for verdict in given}) > 1:
        return Verdict("wrong", f"ranks differ: {given}")
    return given[0]


# ---- on a rank ------------------------------------------------------------------------------------------------------


def _run_rows(name: str, rows: Sequence[str], folder: str) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_PATIENCE_S))
    store = dist.distributed_c10d._get_default_store()
    with open(f"{folder}/told{dist.get_rank()}", "w") as told:
        for row in rows:
            _tell(told, row, Verdict("started"))
            own = f"{folder}/{rows.index(row)}"
            os.makedirs(own, exist_ok=True)
            begin = time.perf_counter()
            verdict = _judge(situations()[row], name, own)
            if os.environ.get("SITUATION_TIMES"):
                print(f"{row}: {time.perf_counter() - begin:.1f} s", flush=True)
            store.set(f"{row}/{dist.get_rank()}", verdict.word)
            places = [f"{row}/{rank}" for rank in range(dist.get_world_size())]
            try:
                store.wait(places, timedelta(seconds=2 * _PATIENCE_S))
                words = {store.get(place).decode() for place in places}
            except (dist.DistStoreError, RuntimeError):
                verdict, words = Verdict("hang", f"the other rank did not come; this one: {verdict}"), {"hang"}
            _tell(told, row, verdict)
            if not words <= {"right", "wrong"}:
                return  # collectives may be out of step: what remains needs new ranks


def _tell(file: Any, row: str, verdict: Verdict) -> None:
    file.write(json.dumps([row, verdict.word, verdict.reason]) + "\n")
    file.flush()


def _judge(row: Situation, name: str, folder: str) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, plain_error = _outcome(row, "plain", folder)
        got, error = _outcome(row, name, folder)
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        if re.search(r"tim(ed|e) ?out", text, re.IGNORECASE):
            return Verdict("hang", text)
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        if name == "ours" and not isinstance(error, _REFUSALS):
            return Verdict("wrong", f"an accident: {text}\n{where}")
        return Verdict("refused", text if name == "fsdp2" else f"{text}\n{where}")
    if plain_error is not None:
        return Verdict("wrong", f"the plain model refuses: {type(plain_error).__name__}: {plain_error}")
    difference = _difference(got, expected, "result")
    return Verdict("wrong", difference) if difference else Verdict("right")


def _outcome(row: Situation, name: str, folder: str) -> tuple[Any, Exception | None]:
    own = f"{folder}/{name}{dist.get_rank() if name == 'plain' else ''}"
    os.makedirs(own, exist_ok=True)
    torch.manual_seed(0)
    # The model that the others are compared with is not compiled: a fault of the compiler cannot hide in both.
    stance = "force_eager" if name == "plain" else "default"
    try:
        with torch.compiler.set_stance(stance):
            result = row.run(Kind(name=name, strategy=row.strategy, folder=own))
        return _gathered(result), None
    except Exception as error:
        return None, error


def _gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _gathered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_gathered(item) for item in value]
    return value


def _difference(got: Any, expected: Any, where: str) -> str:
    """Say where two results differ first; "" if they do not."""
    if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        try:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            return f"{where}: {error}"
        return ""
    if isinstance(got, dict) and isinstance(expected, dict):
        if list(got) != list(expected):
            return f"{where}: keys {list(got)}, not {list(expected)}"
        return next((d for key in got if (d := _difference(got[key], expected[key], f"{where}.{key}"))), "")
    if isinstance(got, list) and isinstance(expected, list):
        if len(got) != len(expected):
            return f"{where}: {len(got)} items, not {len(expected)}"
        pairs = enumerate(zip(got, expected, strict=True))
        return next((d for i, (g, e) in pairs if (d := _difference(g, e, f"{where}[{i}]"))), "")
    if isinstance(got, float) and isinstance(expected, float):
        return "" if math.isclose(got, expected, rel_tol=1e-4) else f"{where}: {got}, not {expected}"
    return "" if type(got) is type(expected) and got == expected else f"{where}: {got!r}, not {expected!r}"
