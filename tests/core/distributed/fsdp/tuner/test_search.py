"""What is chosen, given what is measured: never a slower candidate, nothing below the noise, nothing that is lost."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron.core.distributed.fsdp.tuner import Choice, Outcome, Request, Search, Visit, engine_choices
from megatron.core.distributed.fsdp.tuner.figures import Comparison

_GIB = 2**30
_FACTS = {
    "transports": ["gloo"],
    "serving": ["nccl", "peer_copy"],
    "unsharded_nbytes": 8 * _GIB,
    "largest_unit_nbytes": _GIB,
    "largest_unit_numel": 1000,
}


class _Device:
    """Steps that take as long as ``seconds`` says of the settings, with noise; the clock runs while they do."""

    def __init__(
        self,
        seconds: Callable[[Mapping[str, Any]], float | str],
        *,
        noise: float = 0.0,
        spare: Callable[[Mapping[str, Any]], int] = lambda settings: 40 * _GIB,
    ) -> None:
        self.seconds, self.noise, self.spare = seconds, noise, spare
        self.now, self.random = 0.0, random.Random(1)
        self.requests: list[Request] = []
        self.said: list[str] = []

    def visit(self, request: Request) -> Visit | str:
        self.requests.append(Request(**{**vars(request), "settings": dict(request.settings)}))
        step = self.seconds(request.settings)
        if isinstance(step, str):
            return step
        steps = tuple(step * (1 + self.random.gauss(0, self.noise)) for _ in range(request.num_steps))
        self.now += sum(steps) + 1.0
        spare = self.spare(request.settings)
        return Visit(
            seconds=steps, peak_nbytes=100 * _GIB - spare, spare_nbytes=spare, total_nbytes=100 * _GIB, facts=_FACTS
        )

    def search(self, choices: list[Choice], seconds: float = 1e6, **more: Any) -> Outcome:
        return Search(choices, self.visit, seconds=seconds, say=self.said.append, clock=lambda: self.now, **more).run()


@pytest.mark.parametrize(
    ("gains", "scatter", "is_clear"),
    [
        ([0.03, 0.03], 0.0, True),
        ([0.03], 0.0, False),  # one round
        ([0.03, 0.03], 0.04, False),  # its steps scatter by more
        ([0.08, -0.01], 0.0, False),  # lost in one of two
        ([0.09, 0.001], 0.0, True),
        ([0.009, 0.009], 0.0, False),  # too little to matter
    ],
)
def test_a_gain_counts_where_it_is_there_in_each_round_and_above_the_noise(
    gains: list[float], scatter: float, is_clear: bool
) -> None:
    assert Comparison(gains=gains, scatters=[scatter] * len(gains)).is_clear is is_clear


_DEPTH = Choice(name="depth", options=[{"depth": 2}, {"depth": 3}])


def test_the_fastest_is_chosen_and_choices_add_up() -> None:
    times = {1: 1.0, 2: 0.9, 3: 0.8}
    device = _Device(lambda s: times[s.get("depth", 1)] - 0.1 * s.get("kept", 0), noise=0.01)
    outcome = device.search([_DEPTH, Choice(name="kept", options=[{"kept": 1}])])
    assert outcome.settings == {"depth": 3, "kept": 1}
    assert " ms a step for 100" in outcome.reason and "as given, 30." in outcome.reason and "; kept: " in outcome.reason
    assert [name for name, _ in outcome.rows] == ["as given", "depth=2", "depth=3", "kept=1"]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_slower_candidate_is_never_chosen(noise: float) -> None:
    """Also where each of its steps scatters."""
    device = _Device(lambda s: 1.0 + 0.03 * (s.get("depth", 1) - 1), noise=noise)
    assert device.search([_DEPTH]).settings == {}


def test_a_difference_below_the_noise_keeps_what_was_given() -> None:
    for gain in (0.0, 0.004):
        device = _Device(lambda s, gain=gain: 1.0 - gain * (s.get("depth", 1) > 1), noise=0.05)  # type: ignore[misc]
        outcome = device.search([_DEPTH])
        assert outcome.settings == {} and "no other settings were faster" in outcome.reason


def test_a_machine_that_gets_faster_favours_no_candidate() -> None:
    """Each round measures both, one right after the other, in turn."""
    device = _Device(lambda s: 1.0 / (1 + 0.02 * len(device.requests)))
    assert device.search([_DEPTH]).settings == {}


def test_who_comes_second_in_a_round_is_not_favoured() -> None:
    device = _Device(lambda s: 0.95 if len(device.requests) % 2 == 1 else 1.0)
    assert device.search([Choice(name="depth", options=[{"depth": 2}])]).settings == {}
    assert [request.settings.get("depth", 1) for request in device.requests] == [1, 1, 2, 2, 1]


def test_gains_that_vanish_together_are_not_made() -> None:
    """Each change was faster alone, but what was chosen is not faster than what was given."""
    device = _Device(lambda s: 1.0 if not s or len(device.requests) > 9 else 0.9 ** len(s))
    choices = [Choice(name=name, options=[{name: 1}]) for name in "ab"]
    assert device.search(choices).settings == {}
    assert any("none is made" in line for line in device.said)


def test_what_is_lost_is_left_out_and_the_search_goes_on() -> None:
    lost = {2: "out of memory: tried to allocate 9 GiB (rank 1)"}
    device = _Device(lambda s: lost.get(s.get("depth", 1), 1.0 / s.get("depth", 1)))
    outcome = device.search([_DEPTH])
    assert outcome.settings == {"depth": 3}
    assert ("depth=2", "out of memory: tried to allocate 9 GiB (rank 1)") in outcome.rows


def test_after_one_that_runs_out_of_memory_no_larger_one_is_tried() -> None:
    device = _Device(lambda s: "out of memory: no" if s.get("depth", 1) > 1 else 1.0)
    choice = Choice(name="depth", options=_DEPTH.options, ascending=True, renewing=("depth",))
    assert device.search([choice]).settings == {}
    assert [request.settings for request in device.requests] == [{}, {}, {"depth": 2}]
    assert [request.key for request in device.requests] == ["[]", "[]", "[('depth', 2)]"], "processes of its own"


def test_where_the_given_settings_are_lost_others_may_be_chosen() -> None:
    device = _Device(lambda s: 1.0 if s else "out of memory: no")
    outcome = device.search([_DEPTH])
    assert outcome.settings == {"depth": 2} and "as given were lost (out of memory: no)" in outcome.reason
    nothing = _Device(lambda s: "out of memory: no").search([_DEPTH])
    assert not nothing.measured and nothing.settings == {}


def test_time_is_bounded() -> None:
    device = _Device(lambda s: 1.0)
    outcome = device.search([Choice(name=name, options=[{name: 1}]) for name in "abcdefgh"], seconds=60.0)
    assert device.now < 60.0
    assert outcome.rows[-1] == ("h=1", "not measured: no time was left")
    assert re.search(r"; there was no time for \d candidates$", outcome.reason)


def test_what_cannot_be_served_is_not_tried() -> None:
    device = _Device(lambda s: 1.0)
    outcome = device.search([_DEPTH], refuses=lambda s: "no" if s.get("depth") == 2 else None)
    assert ("depth=2", "cannot be served: no") in outcome.rows
    assert {"depth": 2} not in [request.settings for request in device.requests]


def test_a_faster_candidate_must_leave_memory() -> None:
    device = _Device(lambda s: 1.0 / s.get("depth", 1), spare=lambda s: 3 * _GIB if s.get("depth") == 3 else 40 * _GIB)
    assert device.search([_DEPTH]).settings == {"depth": 2}
    assert "depth=3: not taken, since it leaves less than 4.00 GiB" in device.said


def test_long_steps_are_measured_fewer_times() -> None:
    short, long = _Device(lambda s: 0.05), _Device(lambda s: 3.0)
    short.search([_DEPTH])
    long.search([_DEPTH])
    assert (short.requests[-1].num_steps, long.requests[-1].num_steps) == (20, 5)


def test_engine_choices_name_the_transport_and_fill_what_is_free() -> None:
    """Weights of 8 GiB, and room for 10 less a margin of 6 on the fullest rank."""
    device = _Device(lambda s: 1.0, spare=lambda s: 10 * _GIB)
    outcome = device.search(engine_choices(fixed={"overlap_grad_reduce", "overlap_param_gather"}))
    assert outcome.settings == {"fsdp_transport": "nccl"}, "it had no other"
    tried = [{k: v for k, v in request.settings.items() if k != "fsdp_transport"} for request in device.requests]
    assert {"fsdp_memory_budget": 4 * _GIB} in tried and {"fsdp_memory_budget": 2 * _GIB} in tried
    assert {"fsdp_forward_prefetch_depth": 2, "fsdp_backward_prefetch_depth": 2} in tried
    assert {"suggested_communication_unit_size": 2000} in tried
    transports = {request.settings.get("fsdp_transport") for request in device.requests}
    assert transports == {None, "nccl", "peer_copy"}, "symm cannot serve there"


def test_what_stands_and_what_is_named_twice_is_measured_once() -> None:
    device = _Device(lambda s: 1.0)
    outcome = device.search(
        [Choice(name="depth", options=[{"depth": 2}, {"depth": 2}], stands=lambda best: {"kept": 1})]
    )
    assert [name for name, _ in outcome.rows] == ["as given", "depth=2"] and outcome.settings == {"kept": 1}


def test_fixed_settings_stay() -> None:
    names = {"overlap_grad_reduce", "overlap_param_gather", "fsdp_forward_prefetch_depth", "fsdp_memory_budget"}
    device = _Device(lambda s: 1.0)
    device.search(engine_choices(fixed=names, any_transport=False))
    device.search(engine_choices(fixed=(names := names | {"fsdp_transport"})))
    assert not names & {name for request in device.requests for name in request.settings}
    assert [choice.name for choice in engine_choices(num_ranks=1)] == ["what stays unsharded"]
    assert engine_choices(num_ranks=1, shards_weights=False) == []
