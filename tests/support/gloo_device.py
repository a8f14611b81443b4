"""One gloo device for all process groups of a rank.

Each device has a thread that wakes a hundred times a second, and each group of gloo has a device of its own. A launch in
which dozens of runs make their groups would soon give a quarter of its time to such threads.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def share_gloo_device() -> None:
    """Make the gloo groups of this process use the device of the first."""
    groups: Any = dist.ProcessGroupGloo
    construct = groups.__init__

    @functools.cache
    def device() -> Any:
        return groups.create_default_device()

    def construct_with_device(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = groups._Options()
        options._timeout, options._devices = timeout, [device()]
        construct(self, store, rank, size, options)

    groups.__init__ = construct_with_device
