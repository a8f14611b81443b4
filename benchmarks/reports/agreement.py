"""Ask whether all ranks failed, through a store: collectives may be out of step by then."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_PATIENCE = timedelta(seconds=20)


def all_failed(what: str) -> bool:
    """Return whether every rank reports within seconds that ``what`` failed there. Ranks: those on which it failed.

    False means that some rank goes on, perhaps waiting for this one: the caller should end the run.
    """
    store = dist.distributed_c10d._get_default_store()
    keys = [f"failed/{what}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, _PATIENCE)
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
