"""Sums of gradients over ranks besides the data-parallel ones, once per step: sequence-parallel and shared parameters.

Two kinds of parameters are the same on ranks that compute with them on different data, besides the data-parallel ones.
``sequence_parallel`` parameters see a part of the sequence on each tensor-parallel rank; theirs are summed at the end of
a step's last backward. Embeddings are held by the first and the last pipeline stage; theirs are summed when they are used
(norm, clipping, optimizer step, ``finish_grad_sync``), and not before: the last stage's backward ends before the first
stage's begins, which waits for what the last stage sends after it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

_GRAD_SUMS = operator.attrgetter("grad_sums")


class GradSum:
    """The main gradients of some parameters of a group, to be summed over a process group.

    Args:
        parameters: sharded, alike on all ranks of the process group.
        over: the process group.
        waits_for_use: sum them when they are used; else at a backward's end.

    Attributes:
        is_due: gradients were reduced that are not summed yet.
        is_summed: the main gradients are sums over all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], over: ProcessGroup, *, waits_for_use: bool) -> None:
        self.parameters, self.over, self.waits_for_use = list(parameters), over, waits_for_use
        self.is_due = False
        self.is_summed = False

    def before_reduction(self, *, overwrite: bool) -> None:
        """Make the main gradients such that what is reduced into them next can be summed together with what they hold.

        Sums that they hold already are kept on the first rank alone.
        """
        if self.is_summed and not overwrite and self.over.rank() > 0:
            grads = self.grads()
            if grads:
                torch._foreach_zero_(grads)
        self.is_summed = False
        self.is_due = True

    def grads(self) -> list[torch.Tensor]:
        """Return this rank's parts of the existing main gradients."""
        held = (parameter.grad for parameter in self.parameters)
        return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in held if grad is not None]


class HasGradSums(Protocol):
    """A parameter group."""

    grad_sums: list[GradSum]


@torch.no_grad()
def sum_grads(groups: Iterable[HasGradSums], *, in_use: bool) -> None:
    """Sum the main gradients that are due over the ranks that hold a part of them.

    Args:
        in_use: they are about to be used; else a backward ends, and those that wait for use go on waiting.

    Ranks: all that share parameters with this one, alike; one all-reduce for each process group and dtype. On the current
    stream, which has waited for the reductions; does not block the host but for backends that do.
    """
    due: dict[ProcessGroup, list[GradSum]] = {}
    for grad_sum in chain.from_iterable(map(_GRAD_SUMS, groups)):
        if grad_sum.is_due and (in_use or not grad_sum.waits_for_use):
            due.setdefault(grad_sum.over, []).append(grad_sum)
    for over, sums in due.items():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for grad in (grad for grad_sum in sums for grad in grad_sum.grads() if grad.numel()):
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            _all_reduce(grads, over)
        for grad_sum in sums:
            grad_sum.is_due, grad_sum.is_summed = False, True


def _all_reduce(tensors: list[torch.Tensor], over: ProcessGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=over)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
