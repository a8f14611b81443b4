"""Warnings of any rank come to rank 0's page, each once, and nobody waits for them."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
from torch.distributed import TCPStore

from megatron.training.telemetry.watch.rank_warnings import WarningBox, passing_on_warnings


def test_what_ranks_leave_is_taken_once() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    boxes = [WarningBox(store, name="a start") for _ in range(3)]
    assert boxes[0].take() == []
    boxes[1].put("rank 1: hot")
    boxes[2].put("rank 2: slow \u00e9")
    assert boxes[0].take() == ["rank 1: hot", "rank 2: slow \u00e9"] and boxes[0].take() == []
    assert WarningBox(store, name="another start").take() == []
    # A rank that ended between its number and its text.
    boxes[1]._store.add("number", 1)
    assert boxes[0].take() == []


def test_warnings_and_errors_are_told_once_and_shown_as_before() -> None:
    told: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with passing_on_warnings(3, told.append):
            for _ in range(2):
                warnings.warn("it is slow", UserWarning, stacklevel=1)
            logging.getLogger("a.b").warning("%d of %d", 1, 2)
            logging.getLogger("a.b").info("nothing")
        assert warnings.showwarning is before
        warnings.warn("after", UserWarning, stacklevel=1)
    assert told == ["rank 3: UserWarning: it is slow", "rank 3: WARNING of a.b: 1 of 2"]
    assert [str(each.message) for each in shown] == ["it is slow"] * 2 + ["after"]


@pytest.mark.parametrize("fails", [False, True])
def test_who_warns_without_end_is_told_of_a_few_times_and_waits_for_nobody(fails: bool) -> None:
    told, may_go_on = list[str](), threading.Event()

    def tell(text: str) -> None:
        may_go_on.wait(5)
        told.append(text)
        if fails:
            raise RuntimeError("the store is gone")

    with passing_on_warnings(0, tell):
        for number in range(100):
            logging.getLogger("a.b").warning("number %d %s", number, "a" * 1000)
        assert told == []
        may_go_on.set()
    assert len(told) == (1 if fails else 20) and max(map(len, told)) == 500
