"""Runs that are saved under one layout and go on under another: the same full tensors, and the loss that would have come."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.parity.cells import FAMILIES, LAYOUTS, MICRO_BATCH, MODELS, STEPS, STRATEGIES, Cell, Reference
from tests.parity.comparison import TOLERANCE
from tests.parity.launches import Ran, run_command_lines, run_references
from tests.support.whole_tensors import whole_tensors

_MICROBATCHES = 8
"""Of all data-parallel ranks together, so that one process has the same."""
_SAVED_AT = 1


@dataclass(frozen=True)
class Pair:
    """A model that is saved by one cell's ranks and loaded by another's."""

    model: str
    first: Cell
    second: Cell

    @property
    def name(self) -> str:
        ways = [f"{one.layout_name}-{one.strategy}" for one in (self.first, self.second)]
        return f"{self.model}: {ways[0]} to {ways[1]}"


def _pairs(number: int) -> list[Pair]:
    """Random pairs, the same in each run; no layout is followed by itself, nor by one that is for another number of layers."""
    draw = random.Random(11)
    made = []
    for index in range(number):
        model = list(MODELS)[index % len(MODELS)]
        family = next(name for name, models in FAMILIES.items() if model in models)
        by_layers: dict[int, list[str]] = {}
        for name, layout in LAYOUTS[family].items():
            if not layout.takes_turns:
                by_layers.setdefault(layout.layers, []).append(name)
        names = draw.sample(max(by_layers.values(), key=len), 2)
        cells = [
            Cell(
                family=family,
                layout_name=name,
                strategy=draw.choice(list(STRATEGIES)),
                microbatches=1,
                per_token=False,
            )
            for name in names
        ]
        made.append(Pair(model, *cells))
    return made


def _cell(family: str, layout: str, strategy: str) -> Cell:
    return Cell(family=family, layout_name=layout, strategy=strategy, microbatches=1, per_token=False)


_OF_STAGES = [
    Pair("llama", _cell("gpt", "tp2+pp2+layout", "optim_grads_params"), _cell("gpt", "cp2", "hsdp")),
    Pair("moe", _cell("moe", "ep2", "optim"), _cell("moe", "cp2+pp2+vp2", "optim_grads_params")),
]
"""Ranks with several stages, of which one has no layers, before and after others."""

RANDOM, OF_STAGES = _pairs(len(MODELS)), [pair.name for pair in _OF_STAGES]
PAIRS = {pair.name: pair for pair in (*RANDOM, *_OF_STAGES)}
IN_CI = [name for name, pair in PAIRS.items() if pair.first.ranks == pair.second.ranks == 4][:2]


def _command_line(pair: Pair, cell: Cell, added: str) -> tuple[int, list[str]]:
    flags = f"--global-batch-size {_MICROBATCHES * MICRO_BATCH} --lr-decay-iters {STEPS} {cell.flags} {added}"
    return cell.ranks, f"{MODELS[pair.model]} {flags}".split()


def _run(names: list[str], folder: Path) -> dict[str, Ran]:
    """Saves by all first layouts; then loads by all second ones, once to save again and once to go on."""
    saves, loads = {}, {}
    for index, name in enumerate(names):
        pair, saved = PAIRS[name], folder / f"{index}"
        saves[f"{name}: save"] = _command_line(pair, pair.first, f"--save {saved} --exit-interval {_SAVED_AT}")
        again = f"--load {saved} --save {folder / f'{index}_again'} --train-iters {_SAVED_AT} --use-checkpoint-opt-param-scheduler"
        loads[f"{name}: save again"] = _command_line(pair, pair.second, again)
        loads[f"{name}: go on"] = _command_line(pair, pair.second, f"--load {saved} --exit-on-missing-checkpoint")
    return run_command_lines(saves) | run_command_lines(loads)


def _check(names: list[str], folder: Path) -> None:
    ran = _run(names, folder)
    failures = [f"{name} failed:\n{one}" for name, one in ran.items() if isinstance(one, str)]
    assert not failures, "\n".join(failures)
    references = {
        name: Reference(model=pair.model, microbatches=_MICROBATCHES, per_token=False, layers=pair.first.layout.layers)
        for name, pair in PAIRS.items()
        if name in names
    }
    expected = run_references(list(references.values()))
    for index, name in enumerate(names):
        at = f"iter_{_SAVED_AT:07d}"
        first, second = whole_tensors(folder / f"{index}" / at), whole_tensors(folder / f"{index}_again" / at)
        assert first.keys() == second.keys() and len(first) > 30, name
        unequal = [key for key, tensor in first.items() if not torch.equal(tensor, second[key])]
        assert not unequal, f"{name}: {unequal}"
        whole, went_on = expected[references[name]], ran[f"{name}: go on"]
        assert not isinstance(went_on, str)
        for one in went_on:
            assert one.losses == pytest.approx(whole.losses[_SAVED_AT:], rel=TOLERANCE), name
            assert one.norms == pytest.approx(whole.norms[_SAVED_AT:], rel=TOLERANCE), name


def test_a_run_goes_on_under_another_layout(tmp_path: Path) -> None:
    """Two of the pairs: on four ranks, so that saves share a launch, and loads another."""
    assert len(IN_CI) == 2
    _check(IN_CI, tmp_path)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_random_pair_of_layouts_for_each_model(tmp_path: Path) -> None:
    """Losses and norms of the two steps after a load are those of a run in one process that was never saved."""
    assert len(RANDOM) == len(MODELS)
    _check([pair.name for pair in RANDOM], tmp_path)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_run_enter_root_other_stages(tmp_path: Path) -> None:
    _check(OF_STAGES, tmp_path)
