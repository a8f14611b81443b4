"""The search: one choice after the other, its options beside the best settings so far, in turn.

Rank 0 searches; the others measure what it asks for and take what it has chosen. So clocks may differ between ranks,
decisions cannot.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed.fsdp.tuner.figures import Comparison, Measured, Settings, Visit

_FIRST_STEPS = 5
_FEWEST_STEPS, _MOST_STEPS = 5, 20
_SECONDS_OF_STEPS = 1.0
_MARGIN = 0.04
"""Share of a device's memory that a choice must leave where it takes more than the settings that were given: evaluations,
saves and uneven batches take more than these steps."""

OUT_OF_MEMORY = "out of memory"
"""What the fate of a candidate begins with that ran out of memory."""

_HOPELESS = 0.05
"""An option that loses more than this share of a step in its first round is not measured again."""

_ROUNDS = 3
"""The third one decides what two leave open."""

_LEAST_LIMIT_S, _PATIENCE = 120.0, 2
"""A candidate is lost if it takes so long, or so many times as long as the first one, with which processes began."""

_NO_TIME = "not measured: no time was left"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One question, and the answers that are measured beside the settings that stand."""

    name: str
    """What is chosen, for the log."""

    options: Sequence[Settings] | Callable[[Measured], Sequence[Settings]]
    """Settings of each answer; or a function of the best candidate so far, which knows its memory and facts."""

    stands: Callable[[Measured], Settings] = lambda best: {}
    """Names what the best candidate so far has anyway, so that a later run has the same; it is not measured again."""

    ascending: bool = False
    """Each answer takes more memory than the one before: after one that runs out of memory, no further one is measured."""

    renewing: tuple[str, ...] = ()
    """Names of settings of which each value is measured in processes of its own: compiled code depends on the shapes that a
    process has seen."""

    def options_beside(self, best: Measured) -> list[Settings]:
        """Return the answers, given what was measured of the best settings so far."""
        if callable(self.options):
            options = list(self.options(best)) if best.is_measured else []
            check_plain(self.name, options)
            return options
        return list(self.options)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What all ranks are to measure."""

    settings: Settings
    num_steps: int
    key: str
    """Processes measure only what has the same key; another one needs new processes."""

    limit_s: float


@dataclass(kw_only=True)
class Outcome:
    """What was chosen, and why."""

    settings: dict[str, Any]
    reason: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    """[(candidate, what became of it)], in the order in which they were measured."""

    num_late: int = 0
    """Candidates for which no time was left."""

    measured: bool = True
    """False: no candidate could be measured."""


def in_words(settings: Settings) -> str:
    """Describe settings by names and values."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as given"


def check_plain(choice: str, options: Sequence[Settings]) -> None:
    """Check that settings survive their way to other ranks, and into the file, as they are.

    Raises:
        ValueError: JSON does not give one back.
    """
    for option in options:
        for name, value in option.items():
            try:
                is_same = json.loads(json.dumps({name: value})) == {name: value}
            except (TypeError, ValueError):
                is_same = False
            if not is_same:
                raise ValueError(
                    f"settings of the choice {choice!r} must be plain JSON (texts, numbers, true or false, None, lists, and objects with "
                    f"texts as names), since they are kept in a file, got {name}={value!r}; give its name, say, and look it up where "
                    "the candidate is built"
                )


def choices_in_words(choices: Sequence[Choice]) -> str:
    """Describe choices, with the answers that are plain data; others follow from what is measured."""

    def value(of: Any) -> str:
        return json.dumps(of, skipkeys=True, default=lambda other: type(other).__name__)

    def option(of: Settings) -> str:
        return " ".join(f"{name}={value(of[name])}" for name in sorted(of))

    return "; ".join(
        one.name if callable(one.options) else f"{one.name} of {', '.join(option(each) for each in one.options)}"
        for one in choices
    )


class Search:
    """Finds the fastest settings, one choice at a time.

    Args:
        choices: in the order in which they are tried; what gains most comes first, since time may run out.
        visit: measures on all ranks; returns what was measured, or in words why the candidate is lost.
        seconds: when they are over, no further measurement begins.
        refuses: says why a candidate cannot be served, None if it can; saves the attempt.
        words: describes settings in the log.
        say: prints a line.

    Ranks: 0.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        visit: Callable[[Request], Visit | str],
        *,
        seconds: float,
        refuses: Callable[[Settings], str | None] = lambda settings: None,
        words: Callable[[Settings], str] = in_words,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choices, self.visit, self.refuses, self.words, self.say = choices, visit, refuses, words, say
        self._clock, self._deadline = clock, clock() + seconds
        self._renewing = {name for choice in choices for name in choice.renewing}
        self._num_steps = _FIRST_STEPS
        self._first_s: float | None = None
        self._longest_s = 0.0
        self._given = Measured(name="as given", settings={})
        self._tried: list[Measured] = []

    def run(self) -> Outcome:
        """Measure and choose."""
        best = given = self._given
        self._measure(given)
        changes: list[str] = []
        for choice in self.choices:
            best.settings |= choice.stands(best) if best.is_measured else {}
            taken = self._compare(choice, best)
            if taken is not best:
                gain = f" in place of {best.seconds * 1e3:.2f}" if best.is_measured else ""
                changes.append(f"{choice.name}: {taken.seconds * 1e3:.2f} ms a step{gain}")
                best = taken
        if best is not given and given.is_measured and best.is_measured:
            best = self._confirmed(given, best)
        return self._outcome(given, best, changes)

    def _confirmed(self, given: Measured, best: Measured) -> Measured:
        """Compare what was chosen with what was given once more: several small gains may have been noise."""
        comparison = Comparison()
        for number in range(_ROUNDS):
            if not self._has_time() or (number == _ROUNDS - 1 and comparison.is_clear):
                break
            self._round(given, {best: comparison}, number)
            if not (given.is_measured and best.is_measured):
                return best if best.is_measured else given
        if len(comparison.gains) > 1 and not comparison.is_clear:
            self.say(
                f"all changes together gain {comparison.gain:.1%}, with a noise of {comparison.noise:.1%}: none is made"
            )
            return given
        return best

    def _compare(self, choice: Choice, best: Measured) -> Measured:
        """Measure the options of a choice in rounds, next to the best so far; return the best of all."""
        found: dict[Measured, Comparison] = {}
        for option in choice.options_beside(best):
            settings = {**best.settings, **option}
            if settings != best.settings and settings not in [other.settings for other in found]:
                found[Measured(name=self.words(option), settings=settings)] = Comparison()
        tried = {option: comparison for option, comparison in found.items() if self._may_be_tried(option)}
        for number in range(_ROUNDS if best.is_measured else 1):
            if not tried or not self._has_time():
                break
            self._round(best, tried, number, ascending=choice.ascending)
            tried = {one: each for one, each in tried.items() if one.is_measured and self._is_open(each, number)}
        kept = [option for option in found if option.is_measured and self._leaves_enough(option, best)]
        if not best.is_measured:
            return min(kept, key=lambda option: option.seconds, default=best)
        clear = [option for option in kept if found[option].is_clear]
        return max(clear, key=lambda option: found[option].gain, default=best)

    def _round(
        self, standing: Measured, options: Mapping[Measured, Comparison], number: int, *, ascending: bool = False
    ) -> None:
        """Measure what stands, if that can be, and the options, one after the other; add what was measured to the comparisons."""
        candidates = [*([standing] if standing.is_measured else []), *options]
        visits: dict[Measured, Visit] = {}
        # In turn forward and backward: a machine that gets faster favors nobody.
        for one in candidates[:: 1 if number % 2 == 0 else -1]:
            if ascending and any(other.fate.startswith(OUT_OF_MEMORY) for other in candidates):
                if not one.visits:
                    self._leave_out(one, "not measured: less than it ran out of memory")
            elif self._has_time():
                if (visit := self._measure(one)) is not None:
                    visits[one] = visit
            elif not one.visits:
                self._leave_out(one, _NO_TIME)
        for option in options:
            if standing in visits and option in visits:
                options[option].add(visits[standing], visits[option])

    @staticmethod
    def _is_open(comparison: Comparison, number: int) -> bool:
        """Return whether an option is worth a further round: it is not hopeless, and then, it may gain and that is not clear."""
        if number + 1 < _ROUNDS - 1:
            return comparison.gain > -_HOPELESS
        return comparison.may_gain and not comparison.is_clear

    def _may_be_tried(self, option: Measured) -> bool:
        if (reason := self.refuses(option.settings)) is not None:
            self._leave_out(option, f"cannot be served: {reason}")
        elif not self._has_time():
            self._leave_out(option, _NO_TIME)
        else:
            return True
        return False

    def _leave_out(self, option: Measured, why: str) -> None:
        option.fate = why
        self._note(option)

    def _leaves_enough(self, option: Measured, best: Measured) -> bool:
        """Return whether an option that takes more memory leaves some."""
        if not best.is_measured or option.peak_nbytes <= best.peak_nbytes:
            return True
        margin = _MARGIN * option.last.total_nbytes
        if option.spare_nbytes >= margin:
            return True
        self.say(f"{option.name}: not taken, since it leaves less than {margin / 2**30:.2f} GiB")
        return False

    def _has_time(self) -> bool:
        return self._clock() + self._longest_s < self._deadline

    def _measure(self, candidate: Measured) -> Visit | None:
        """Visit a candidate on all ranks; return what was measured, None if it was lost."""
        began = self._clock()
        request = Request(
            settings=candidate.settings,
            num_steps=self._num_steps,
            key=repr(sorted((name, candidate.settings[name]) for name in self._renewing & set(candidate.settings))),
            limit_s=max(_LEAST_LIMIT_S, _PATIENCE * (self._first_s or self._deadline - began)),
        )
        found = self.visit(request)
        if isinstance(found, str):
            candidate.fate = found
        else:
            candidate.visits.append(found)
            took = self._clock() - began
            if self._first_s is None:  # processes began, and kernels were compiled
                self._first_s = took
            else:
                self._longest_s = max(self._longest_s, took)
            if candidate is self._given:
                steps = math.ceil(_SECONDS_OF_STEPS / max(candidate.seconds, 1e-6))
                self._num_steps = min(max(steps, _FEWEST_STEPS), _MOST_STEPS)
        self._note(candidate)
        return None if isinstance(found, str) else found

    def _note(self, candidate: Measured) -> None:
        if candidate not in self._tried:
            self._tried.append(candidate)
        self.say(f"{candidate.name}: {candidate.text()}")

    def _outcome(self, given: Measured, best: Measured, changes: list[str]) -> Outcome:
        rows = [(one.name, one.text()) for one in self._tried]
        late = sum(one.fate == _NO_TIME for one in self._tried)
        if not best.is_measured:
            return Outcome(settings={}, reason="no candidate could be measured", rows=rows, measured=False)
        if best is given:
            reason = "no other settings were faster by more than the noise"
        elif given.is_measured:
            share = 1 - best.seconds / given.seconds
            reason = (
                f"{best.seconds * 1e3:.2f} ms a step for {given.seconds * 1e3:.2f} as given, {share:.1%} less: "
                + "; ".join(changes)
            )
        else:
            reason = f"the settings as given were lost ({given.fate}); " + "; ".join(changes)
        if late:
            reason += f"; there was no time for {late} candidates"
        return Outcome(settings=best.settings, reason=reason, rows=rows, num_late=late)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Format what was measured, a line for each candidate."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
