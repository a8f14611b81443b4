"""AdamW's updates in the host's memory: a thread copies gradients there, updates, and copies weights back, unit by unit.

While one unit is updated, the next one's gradient is on its way to the host, and the weights of the one before on their way
back. The host's memory holds state and main weights in fp32 and two gradients.

See [Note: updates on the host].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.streams import HostWork
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import HostState
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable

_NUM_GRADIENTS = 2  # in the host's memory at a time


@dataclass(eq=False)
class _Job:
    """The update of one group."""

    group: FsdpParameterGroup
    state: HostState
    work: HostWork


class HostUpdates:
    """Updates of the groups whose state is in the host's memory.

    Args:
        device: where their gradients and weights are.
        pin_memory: gradients are copied to page-locked memory.
        largest_numel: elements of the largest group's shard.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool, largest_numel: int) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        pins = pin_memory and self._is_cuda
        self._gradients = [torch.empty(largest_numel, pin_memory=pins) for _ in range(_NUM_GRADIENTS)]
        self._downloads = torch.cuda.Stream(device) if self._is_cuda else None
        self._uploads = torch.cuda.Stream(device) if self._is_cuda else None
        self._thread = ThreadPoolExecutor(1, "optimizer updates", initializer=_take_cores if self._is_cuda else None)
        self._jobs: list[_Job] = []
        self._begun: tuple[Any, ...] | None = None  # what the updates of a step depend on, until they start
        self._running: Future[None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory for gradients."""
        return sum(gradient.nbytes for gradient in self._gradients)

    # ---- the caller's thread ------------------------------------------------------------------------------------

    def begin_step(self, table: HyperparameterTable, grad_factor: torch.Tensor, found_inf: torch.Tensor | None) -> None:
        """Take what the next updates depend on, which is on the device; gradients are complete on the current stream.

        Args:
            table: hyperparameters and step counts, on the host; not written before ``drain``.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None
        self._jobs, self._begun = [], (table, grad_factor, found_inf, ready)

    def add(self, group: FsdpParameterGroup, state: HostState) -> HostWork:
        """Let the group be updated in this step, after those that were added before."""
        work = HostWork(self.start)
        self._jobs.append(_Job(group, state, work))
        return work

    def start(self) -> None:
        """Begin the updates that were added."""
        if self._begun is not None:
            # Groups must not be held between steps.
            jobs, begun, self._jobs, self._begun = self._jobs, self._begun, [], None
            self._running = self._thread.submit(self._run, jobs, *begun)

    def drain(self) -> None:
        """Block the host until all updates are over, and copies to the device under way; raise what they raised."""
        self.start()
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    # ---- the thread of the updates ------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(
        self,
        jobs: Sequence[_Job],
        table: HyperparameterTable,
        grad_factor: torch.Tensor,
        found_inf: torch.Tensor | None,
        ready: Any,
    ) -> None:
        try:
            with self._on(self._downloads):
                if ready is not None:
                    ready.wait()  # the caller's stream still writes gradients, the factor and found_inf
                skips = found_inf is not None and bool(found_inf)
            if skips:
                for job in jobs:
                    job.work.set_result(None)
                return
            table.steps.add_(table.advances)
            table.show_steps()
            arrivals = [self._download(index, job, grad_factor) for index, job in enumerate(jobs[:1])]
            for index, job in enumerate(jobs):
                if index + 1 < len(jobs):
                    # Into the memory of the gradient before this one, whose update has ended: a copy must not overwrite what an
                    # update reads.
                    arrivals.append(self._download(index + 1, jobs[index + 1], grad_factor))
                if arrivals[index] is not None:
                    arrivals[index].synchronize()
                self._update(job, self._gradients[index % _NUM_GRADIENTS], table)
                with self._on(self._uploads):
                    job.state.upload(job.group)
                    job.work.set_result(self._uploads.record_event() if self._uploads is not None else None)
        except BaseException as error:
            for job in jobs:
                if not job.work.done():
                    job.work.set_exception(error)
            raise

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _download(self, index: int, job: _Job, grad_factor: torch.Tensor) -> Any:
        """Copy a gradient times the factor to the host, in fp32; return the event that says when it is there."""
        grad = job.group.grads.main.storage.flat
        with self._on(self._downloads):
            scaled = grad * grad_factor if grad.dtype == torch.float32 else grad.float().mul_(grad_factor)
            self._gradients[index % _NUM_GRADIENTS][: grad.numel()].copy_(scaled, non_blocking=True)
            return self._downloads.record_event() if self._downloads is not None else None

    def _update(self, job: _Job, grad: torch.Tensor, table: HyperparameterTable) -> None:
        shard = job.state.shard(job.group)
        groups, steps = table.param_group.tolist(), table.steps
        for begin, end, row, *_ in shard.runs:
            lr, weight_decay, beta1, beta2, eps = table.hyperparameters[groups[row]].tolist()
            main, own, exp_avg, exp_avg_sq = (f[begin:end] for f in (shard.main, grad, shard.exp_avg, shard.exp_avg_sq))
            torch._fused_adamw_(
                [main],
                [own],
                [exp_avg],
                [exp_avg_sq],
                [],
                [steps[row]],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )


def _take_cores() -> None:
    """Use this rank's share of the host's cores in this thread; torchrun gives the others one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
