"""Notices of ranks to each other in the store of the process groups, for when no collective can ask any more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

PATIENCE_S = 5.0
"""Seconds for which a rank waits for the notices of others, and for the store."""


class Notices:
    """The notices of a set of ranks: each writes its own, over the one before, and reads the others'.

    Where there is no store, or it does not answer, nothing is written and none is there.

    Args:
        name: the same on all ranks, and of these alone.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def post(self, notice: Mapping[str, Any]) -> None:
        """Write this rank's notice. Ranks: each alone; blocks the host for one answer of the store."""
        text = json.dumps(notice)
        _run(lambda: dist.distributed_c10d._get_default_store().set(self._key(dist.get_rank()), text))

    def read(self, ranks: Sequence[int], step: int, field: str, *, waits: bool) -> dict[int, dict[str, Any]]:
        """Return the notices about this step that have the field, by rank; ``waits``: give all ranks a few seconds to write theirs.

        Ranks: each alone; blocks the host.
        """
        found: dict[int, dict[str, Any]] = {}

        def look() -> None:
            store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + PATIENCE_S
            while True:
                for rank in ranks:
                    if rank not in found and store.check([self._key(rank)]):
                        notice = json.loads(store.get(self._key(rank)))
                        if notice["step"] == step and field in notice:
                            found[rank] = notice
                if not waits or len(found) == len(ranks) or time.monotonic() > deadline:
                    return
                time.sleep(0.05)

        _run(look)
        return dict(sorted(found.items()))

    def _key(self, rank: int) -> str:
        return f"fsdp/notices/{self._name}/{rank}"


def _run(act: Any) -> None:
    """Run ``act`` in a thread, for a few seconds at most: who serves the store may be stopped, and a client waits for it."""

    def quietly() -> None:
        try:
            act()
        except (RuntimeError, ValueError):  # no store, or a broken connection to it
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout=2 * PATIENCE_S)
