"""Random training programs: sharded, they give the results of the unsharded model or raise a clear error.

``python -m tests.core.distributed.fsdp.test_random_programs --count 100 --seed 0`` runs more of them and counts the outcomes;
``--show SEED`` prints a program, ``--minimise SEED`` removes everything that its outcome does not need.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pprint
import re
import sys
from collections.abc import Iterator

from tests.core.distributed.fsdp.random_programs.draw import Program, draw
from tests.core.distributed.fsdp.random_programs.execute import execute
from tests.core.distributed.fsdp.random_programs.launch import Outcome, run_programs
from tests.core.distributed.fsdp.random_programs.model import BlockSpec
from tests.support.launch import run_ranks

ANNOUNCED: dict[str, str] = {
    "FlatAdamW must be given all trainable parameters of a unit": "FlatAdamW: part of a unit was frozen after it was sharded",
}
"""Expected errors (patterns of their messages) and the page or docstring that documents them."""


def is_announced(outcome: Outcome) -> bool:
    return outcome.word == "refused" and any(re.search(pattern, outcome.detail) for pattern in ANNOUNCED)


def _assert_served(seed: int, count: int, num_ranks: int) -> None:
    programs = [draw(at, num_ranks) for at in range(seed, seed + count)]
    bad = [
        f"seed {program.seed}: {outcome.word} {outcome.detail}"
        for program, outcome in zip(programs, run_programs(programs), strict=True)
        if outcome.word != "equal" and not is_announced(outcome)
    ]
    assert not bad, "\n".join(bad)


def test_programs_on_one_rank() -> None:
    """Where backward writes the main gradient: no reduction, no sums of microbatches next to it."""
    _assert_served(0, 16, 1)


def test_programs_on_two_ranks() -> None:
    _assert_served(0, 34, 2)


def test_programs_with_hybrid_sharding() -> None:
    _assert_served(0, 6, 4)


def programs_that_amplify_rounding_are_equal() -> None:
    """See [Note: amplified rounding]: these programs deviate by 5e-5, and in double precision by 1e-13. Ranks: 2."""
    for seed in (700014, 710148):
        assert execute(draw(seed, 2)) == ("equal", "")


def test_programs_that_amplify_rounding() -> None:
    run_ranks(2, programs_that_amplify_rounding_are_equal)


def test_optimizer_state_of_other_shapes_is_not_loaded() -> None:
    """A parameter was frozen and another one inserted after the state was saved."""
    _assert_served(710346, 1, 2)


def _smaller(program: Program) -> Iterator[Program]:
    """Yield smaller programs, the largest cuts first."""
    size = len(program.operations)
    cut = size // 2
    while cut >= 1:
        for at in range(0, size, cut):
            yield dataclasses.replace(program, operations=program.operations[:at] + program.operations[at + cut :])
        cut //= 2
    model = program.model
    changes: list[dict[str, object]] = []
    for at, block in enumerate(model.blocks):
        for simpler in (BlockSpec("linear"), dataclasses.replace(block, checkpoint="none")):
            if simpler != block:
                changes.append({"blocks": (*model.blocks[:at], simpler, *model.blocks[at + 1 :])})
    if len(set(model.order)) < len(model.order) or len(model.order) > 1:
        changes += [{"order": (*model.order[:at], *model.order[at + 1 :])} for at in range(len(model.order))]
    if len(model.blocks) > 1 and len(model.blocks) - 1 not in model.order:
        changes.append({"blocks": model.blocks[:-1]})
    changes += [{"tied": False}, {"num_heads": 1, "pass_per_head": False}, {"pass_per_head": False}, {"joined": False}]
    for change in changes:
        smaller = dataclasses.replace(model, **change)  # type: ignore[arg-type]
        if smaller != model:
            yield dataclasses.replace(program, model=smaller)
    settings: list[dict[str, object]] = [
        {"optimizer": "sgd"},
        {"poisons": False},
        {"outer": None, "num_ranks": 2},
        {"strategy": "no_shard"},
    ]
    for change in settings:
        smaller_program = dataclasses.replace(program, **change)  # type: ignore[arg-type]
        if smaller_program != program:
            yield smaller_program


def _kind_of(outcome: Outcome) -> tuple[str, str]:
    """Return the outcome without details that a smaller program changes."""
    detail = re.sub(r"\[\d+ ", "[", outcome.detail)
    return outcome.word, re.sub(r"[\d.e+-]+|blocks\.\w*", "#", detail)[:90]


def minimise(program: Program) -> tuple[Program, Outcome]:
    """Shrink the program as long as its outcome stays the same."""
    outcome = run_programs([program])[0]
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            try:
                new = run_programs([smaller])[0]
            except Exception:
                continue
            if _kind_of(new) == _kind_of(outcome):
                program, outcome, found = smaller, new, True
                break
    return program, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--minimise", type=int, metavar="SEED")
    args = parser.parse_args()
    if args.show is not None:
        pprint.pprint(draw(args.show, args.ranks), width=120)
        return
    if args.minimise is not None:
        program, outcome = minimise(draw(args.minimise, args.ranks))
        pprint.pprint(program, width=120)
        print(outcome)
        return

    def report(program: Program, outcome: Outcome) -> None:
        if outcome.word != "equal":
            print(f"seed {program.seed}: {outcome.word} {outcome.detail[:600]}", flush=True)

    programs = [draw(seed, args.ranks) for seed in range(args.seed, args.seed + args.count)]
    outcomes: list[Outcome] = []
    for at in range(0, len(programs), 50):
        outcomes += run_programs(programs[at : at + 50], report)
    words = collections.Counter(
        outcome.word if not is_announced(outcome) else "refused as announced" for outcome in outcomes
    )
    print(", ".join(f"{number} {word}" for word, number in words.most_common()))
    sys.exit(0 if not set(words) - {"equal", "refused as announced"} else 1)


if __name__ == "__main__":
    main()
