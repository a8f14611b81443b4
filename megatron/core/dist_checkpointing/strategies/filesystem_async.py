"""A writer of PyTorch's checkpoints that copies a plan's tensors to host memory first and writes the copies later.

``dist_checkpointing.save`` has a writer of its own; this one is for callers that derive from Megatron-Core's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

WriteBucket = tuple[
    str | os.PathLike[str], str, tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, torch.Tensor]]]
]
"""(folder, name, (plain values, tensors)): what is written together."""

_results_queue = None  # results stay in the process that writes: callers find nothing to shut down


class FileSystemWriterAsync(FileSystemWriter):
    """A writer whose ``prepare_write_data`` takes what ``get_save_function_and_args`` writes in another thread.

    Source: Megatron-Core's class of this name (names).
    """

    write_buckets: list[WriteBucket]

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the values of a plan; tensors are not copied yet. Ranks: each on its own."""
        given: tuple[list[Any], list[Any]] = ([], [])
        for item in plan.items:
            given[item.type != WriteItemType.BYTE_IO].append((item, planner.resolve_data(item)))
        self._plan, self.write_buckets = plan, [(self.path, "", given)]

    def get_save_function_and_args(self) -> tuple[Callable[..., None], Callable[[], list[WriteBucket]], list[Any]]:
        """Return what writes buckets, what copies those of the plan to host memory, and further arguments, of which there are none."""
        return self.write_preloaded_data, partial(self.preload_tensors, self.write_buckets, True), []

    @staticmethod
    def preload_tensors(write_buckets: list[WriteBucket], non_blocking: bool = True) -> list[WriteBucket]:
        """Return the buckets with copies of their tensors in host memory; they are complete.

        Args:
            non_blocking: copy all before the host waits.
        """
        copied: list[WriteBucket] = []
        for folder, name, (values, tensors) in write_buckets:
            copies = [(item, x.detach().to("cpu", non_blocking=non_blocking, copy=True)) for item, x in tensors]
            copied.append((folder, name, (values, copies)))
        if non_blocking and torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def write_preloaded_data(self, write_buckets: list[WriteBucket]) -> None:
        """Write buckets; ``retrieve_write_results`` has the results. Ranks: each on its own, in any thread."""
        data = {item.index: value for *_, given in write_buckets for part in given for item, value in part}
        self._results = super().write_data(self._plan, _Resolved(data))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take, copy and write the values of a plan now."""
        self.prepare_write_data(plan, planner)
        write, preload, further = self.get_save_function_and_args()
        write(preload(), *further)
        return self._results

    def retrieve_write_results(self) -> list[WriteResult]:
        """Return what was written.

        Raises:
            Exception: what the write raised.
        """
        results: list[WriteResult] = self._results.wait()
        return results


class _Resolved(SavePlanner):
    """A planner whose values are known."""

    def __init__(self, data: dict[Any, Any]) -> None:
        self.data = data

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.data[write_item.index]

    set_up_planner = create_local_plan = create_global_plan = finish_plan = None  # type: ignore[assignment]
