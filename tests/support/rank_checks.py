"""Checks that need ranks: all of one number of ranks share a launch, and each is reported as a test of its own."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tests.support.launch import run_ranks

# How long ranks wait for one that is slower in the same check; one that fails alone leaves the others in a collective.
_PATIENCE = timedelta(seconds=60)


class RankChecks:
    """The checks of a test module, which holds this object under the name ``CHECKS``.

    Args:
        module: the test module's ``__name__``; ranks import it.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._checks: dict[int, dict[str, Callable[[], None]]] = {}

    def on(self, *worlds: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Run the decorated check on each of these numbers of ranks."""

        def register(check: Callable[[], None]) -> Callable[[], None]:
            for world in worlds:
                self._checks.setdefault(world, {})[check.__name__] = check
            return check

        return register

    @property
    def parameters(self) -> list[tuple[int, str]]:
        """(number of ranks, name) of each check."""
        return [(world, name) for world, checks in self._checks.items() for name in checks]

    def assert_passed(self, num_ranks: int, name: str) -> None:
        """Run the check on these ranks, unless that was done, and fail if an assertion failed on any."""
        failures = _failures(self._module, num_ranks)
        failure = failures if isinstance(failures, str) else failures.get(name, "")
        assert not failure, failure

    def run(self) -> dict[str, str]:
        """The failures of this number of ranks' checks, by name. Ranks: all."""
        failures: dict[str, str] = {}
        for name, check in self._checks[dist.get_world_size()].items():
            try:
                check()
            except Exception:
                failures[name] = traceback.format_exc()
            _meet(name, failures.get(name, ""))
        return failures


def _meet(name: str, failure: str) -> None:
    """Wait until all ranks are done with the check, so that the next one may start even if it failed."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "done")
    try:
        store.wait([f"{name}/{rank}" for rank in range(dist.get_world_size())], _PATIENCE)
    except (dist.DistStoreError, RuntimeError):  # a FileStore raises the latter
        raise AssertionError(f"{name} failed on this rank alone:\n{failure}" if failure else f"{name} hangs") from None


def _run(module: str) -> dict[str, str]:
    failures: dict[str, str] = importlib.import_module(module).CHECKS.run()
    return failures


@functools.cache
def _failures(module: str, num_ranks: int) -> dict[str, str] | str:
    try:
        everywhere: dict[str, str] = {}
        for failures in run_ranks(num_ranks, _run, module, timeout_s=800.0):
            everywhere.update(failures)
        return everywhere
    except AssertionError as error:
        return str(error)
