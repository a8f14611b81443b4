"""Orthogonalization of matrices whose elements ranks share: each is brought to one rank, and the result back.

A step's work is a list of rounds, the same on all ranks. In each round an owner receives some whole matrices, iterates on them
in batches of equal shapes, and returns to each rank its elements of the results. What is sent for the next round travels while
this one computes, and so does what the round before returns.

See [Note: whole matrices].
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat
from megatron.core.distributed.fsdp.matrices.gram_iteration import (
    ALIGNMENT,
    GramIteration,
    PlacedMatrix,
    serves_device,
    serves_shape,
)
from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz, batch_size
from megatron.core.distributed.fsdp.matrices.replayed_work import CaptureSite, ReplayedWork, capture_site
from megatron.core.distributed.fsdp.matrices.shared_matrix import SharedMatrix

# Elements that a rank receives in a round, unless one tensor has more: small enough that rounds overlap, large enough that
# messages are long.
ROUND_NUMEL = 2**25

Fill = Callable[[int, torch.Tensor], None]
"""Writes this rank's elements of the matrices of a round, of this number, to a flat tensor in the order of ``numbers_of``."""


@dataclass
class _Batch:
    """Matrices of one shape that are multiplied in one call; ``size`` is at least their number."""

    size: int
    rows: int
    columns: int
    tensor_group: ProcessGroup | None
    split_dim: int
    is_distributed: bool
    blocks: list[PlacedMatrix] = field(default_factory=list)

    def run(self, iterate: NewtonSchulz, whole: torch.Tensor, out: torch.Tensor) -> None:
        """Orthogonalize the matrices that lie in ``whole`` to the same places of ``out``."""
        views = [block.view(whole) for block in self.blocks]
        if self.size == 1:
            (block,) = self.blocks
            block.view(out).copy_(
                self._orthogonalized(iterate, views[0].reshape(self.rows, self.columns)).view(views[0].shape)
            )
            return
        stacked = whole.new_empty(self.size, self.rows, self.columns)
        stacked[len(views) :].zero_()
        torch._foreach_copy_([m.view(v.shape) for m, v in zip(stacked.unbind(), views, strict=False)], views)
        results = self._orthogonalized(iterate, stacked).unbind()[: len(views)]
        torch._foreach_copy_(
            [block.view(out) for block in self.blocks],
            [r.reshape(v.shape) for r, v in zip(results, views, strict=True)],
        )

    def _orthogonalized(self, iterate: NewtonSchulz, x: torch.Tensor) -> torch.Tensor:
        """Orthogonalize [(size,) R, C], this rank's parts, to the same shape, contiguous."""
        group = self.tensor_group
        if group is None:
            return iterate(x).contiguous()
        if self.is_distributed:
            return iterate(x, split_over=group, split_dim=self.split_dim).contiguous()
        dim = self.split_dim - 2
        parts = x.new_empty(group.size(), *x.shape)
        all_gather_flat(group, parts.view(-1), x.reshape(-1))
        whole = torch.cat(parts.unbind(), dim=dim)
        return iterate(whole).chunk(group.size(), dim=dim)[group.rank()].contiguous()


class _Round:
    """The matrices of one round, where they come from and what is done with them.

    Args:
        matrices: all matrices, of which ``numbers`` are in this round, all of one process group.
        owners: [numbers] rank of each.
    """

    def __init__(
        self,
        matrices: Sequence[SharedMatrix],
        numbers: Sequence[int],
        owners: Sequence[int],
        iterate: NewtonSchulz,
        device: torch.device,
    ) -> None:
        first = matrices[numbers[0]]
        self.ranks, self._rank = first.ranks, first.rank
        self._iterate, self._device = iterate, device
        num_ranks = len(first.ranges)
        # Equal shapes side by side, so that they are batched; those that keep the others aligned first.
        in_order = sorted(
            zip(numbers, owners, strict=True),
            key=lambda item: (item[1], matrices[item[0]].numel % ALIGNMENT != 0, matrices[item[0]].shape, item[0]),
        )
        by_owner = [[number for number, owner in in_order if owner == rank] for rank in range(num_ranks)]
        mine = by_owner[self._rank]
        own = {number: _numel(matrices[number].own_range) for number in numbers}
        self.numbers = [number for of_rank in by_owner for number in of_rank]
        self.sent_numels = [own[number] for number in self.numbers]
        self._sent_by_rank = [sum(own[number] for number in of_rank) for of_rank in by_owner]
        # Received: for each rank, its elements of my matrices. Wanted: for each matrix, the elements of all ranks.
        held = [[_numel(matrices[number].ranges[rank]) for number in mine] for rank in range(num_ranks)]
        self._received_numels = [numel for of_rank in held for numel in of_rank]
        self._received_by_rank = list(map(sum, held))
        places = [(rank, at) for at, number in enumerate(mine) for rank in _by_position(matrices[number])]
        self._whole_numels = [held[rank][at] for rank, at in places]
        self._to_whole = [rank * len(mine) + at for rank, at in places]
        self._from_whole = [place for _, place in sorted((to, at) for at, to in enumerate(self._to_whole))]
        uses_grams = serves_device(iterate, device)
        self._batches, by_short_side = _batches_of([matrices[n] for n in mine], device.type, uses_grams=uses_grams)
        self._on_grams = [GramIteration(placed, iterate, device) for placed in by_short_side]
        self.whole_numel = sum(self._whole_numels)
        self.scratch_numel = max((grams.scratch_numel for grams in self._on_grams), default=0)
        self._on_fixed_memory: tuple[torch.Tensor, torch.Tensor, Callable[[], None]] | None = None
        self._handle: Any = None
        self._tensors: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def send(self, fill: Callable[[torch.Tensor], None]) -> None:
        """Begin to bring this rank's elements, which ``fill`` writes, to the owners."""
        sent = torch.empty(sum(self.sent_numels), dtype=self._iterate.norm_dtype, device=self._device)
        fill(sent)
        self._exchange(sent, self._sent_by_rank, self._received_by_rank)

    def compute(self) -> None:
        """Orthogonalize this rank's matrices, and begin to return the results."""
        received = self.receive()
        pieces = received.split(self._received_numels)
        if self._on_fixed_memory is None:
            whole = received if self.ranks is None else _joined([pieces[at] for at in self._to_whole], received)
            results = torch.empty_like(whole, dtype=self._iterate.dtype)
            self._run(whole, results)
        else:
            whole, results, work = self._on_fixed_memory
            if self.whole_numel:
                torch.cat([pieces[at] for at in self._to_whole], out=whole)
            del received, pieces  # their memory serves what is returned
            work()
        parts = results.split(self._whole_numels)
        own_memory = self.ranks is None and self._on_fixed_memory is None
        returned = results if own_memory else _joined([parts[at] for at in self._from_whole], results)
        self._exchange(returned, self._received_by_rank, self._sent_by_rank)

    def use_memory(
        self, whole: torch.Tensor, results: torch.Tensor, scratch: torch.Tensor, site: CaptureSite | None
    ) -> None:
        """Compute in memory that all rounds use in turn, so that the work can be replayed.

        Args:
            whole, results, scratch: flat memory of at least ``whole_numel`` and ``scratch_numel`` elements.
            site: where the work is captured.
        """
        whole, results = whole[: self.whole_numel], results[: self.whole_numel]
        work: Callable[[], None] = functools.partial(self._run, whole, results, scratch)
        if self.whole_numel and all(batch.tensor_group is None for batch in self._batches):
            work = ReplayedWork(work, site)  # it communicates nothing
        self._on_fixed_memory = whole, results, work

    def _run(self, whole: torch.Tensor, results: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        for grams in self._on_grams:
            assert scratch is not None
            grams.run(whole, results, scratch)
        for batch in self._batches:
            batch.run(self._iterate, whole, results)

    def _exchange(self, sent: torch.Tensor, sent_numels: list[int], received_numels: list[int]) -> None:
        if self.ranks is None:
            self._tensors = sent, sent
            return
        received = sent.new_empty(sum(received_numels))
        self._tensors = (
            sent,
            received,
        )  # what travels must stay, and may not be touched before the handle was waited for
        self._handle = dist.all_to_all_single(
            received, sent, received_numels, sent_numels, group=self.ranks, async_op=True
        )

    def receive(self) -> torch.Tensor:
        """Return what was exchanged last, flat: after ``compute`` this rank's elements of the results of the matrices ``numbers``."""
        if self._handle is not None:
            self._handle.wait()
        received = self._tensors[1]
        self._handle, self._tensors = None, (torch.empty(0), torch.empty(0))
        return received


class Orthogonalizer:
    """Orthogonalizes matrices that ranks share, in the same rounds on all ranks.

    Args:
        matrices: what ranks hold of them; numbers below are places in this list.
        iterate: the iterations.
        device: of the elements.
        round_numel: elements that an owner takes in a round.

    Attributes:
        places: [numbers] round of each matrix, and where this rank's elements are in what travels.

    Ranks: all that hold the matrices build it over the same ones, in the same order.
    """

    def __init__(
        self,
        matrices: Sequence[SharedMatrix],
        iterate: NewtonSchulz,
        device: torch.device,
        *,
        round_numel: int = ROUND_NUMEL,
    ) -> None:
        self.places = [(0, 0)] * len(matrices)
        self._rounds: list[_Round] = []
        found: list[tuple[int, list[int], list[int]]] = []
        of_ranks: dict[ProcessGroup | None, list[int]] = {}
        for number, matrix in enumerate(matrices):
            of_ranks.setdefault(matrix.ranks, []).append(number)
        for ranks, numbers in of_ranks.items():
            costs = [sum(iterate.flops(*shape) for shape in matrices[number].matrices()) for number in numbers]
            owners = owners_of(costs, 1 if ranks is None else ranks.size())
            rounds = rounds_of(owners, [matrices[number].numel for number in numbers], round_numel=round_numel)
            for at in range(max(rounds) + 1):
                members = [place for place, own in enumerate(rounds) if own == at]
                of_round = [numbers[place] for place in members]
                found.append((min(of_round), of_round, [owners[place] for place in members]))
        for at, (_, numbers, owners) in enumerate(sorted(found)):
            self._rounds.append(_Round(matrices, numbers, owners, iterate, device))
            made = self._rounds[-1]
            begins = accumulate(made.sent_numels, initial=0)
            for number, begin in zip(made.numbers, begins, strict=False):
                self.places[number] = at, begin

        if serves_device(iterate, device):
            numel = max((made.whole_numel for made in self._rounds), default=0)
            whole = torch.empty(numel, dtype=iterate.norm_dtype, device=device)
            results = torch.empty(numel, dtype=torch.float16, device=device)
            scratch_numel = max((made.scratch_numel for made in self._rounds), default=0)
            scratch = torch.empty(scratch_numel, dtype=torch.float16, device=device)
            site = capture_site(device)
            for made in self._rounds:
                # Rounds compute one after the other on one stream, and return copies of their results.
                made.use_memory(whole, results, scratch, site)

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def numbers_of(self, round_number: int) -> tuple[list[int], list[int]]:
        """Return the matrices of a round in the order of their elements in what travels, and how many elements of each."""
        made = self._rounds[round_number]
        return made.numbers, made.sent_numels

    def begin(self, fill: Fill, num_users: Sequence[int]) -> OrthogonalizedMatrices:
        """Begin a step. Ranks: all.

        Args:
            fill: gives this rank's elements when they are sent.
            num_users: [rounds] how often the results of each are taken.
        """
        return OrthogonalizedMatrices(self._rounds, fill, num_users)


class OrthogonalizedMatrices:
    """The results of one step, which come in rounds. Ranks: all take the rounds in one order."""

    def __init__(self, rounds: Sequence[_Round], fill: Fill, num_users: Sequence[int]) -> None:
        self._rounds, self._fill, self._num_users = rounds, fill, list(num_users)
        self._num_sent = self._num_computed = self._num_received = 0
        self._results: dict[int, torch.Tensor] = {}

    def take(self, round_number: int) -> torch.Tensor:
        """Return this rank's elements of the round's results, which is kept for as many as take it."""
        while self._num_received <= round_number:
            # The next round computes while this one's results travel.
            self._compute(self._num_received + 1)
            self._results[self._num_received] = self._rounds[self._num_received].receive()
            self._num_received += 1
        self._num_users[round_number] -= 1
        is_last = not self._num_users[round_number]
        return self._results.pop(round_number) if is_last else self._results[round_number]

    def _compute(self, last: int) -> None:
        while self._num_computed <= min(last, len(self._rounds) - 1):
            # The next round's elements travel while this one computes.
            while self._num_sent <= min(self._num_computed + 1, len(self._rounds) - 1):
                self._rounds[self._num_sent].send(functools.partial(self._fill, self._num_sent))
                self._num_sent += 1
            self._rounds[self._num_computed].compute()
            self._num_computed += 1


def _batches_of(
    matrices: Sequence[SharedMatrix], device_type: str, *, uses_grams: bool
) -> tuple[list[_Batch], list[list[PlacedMatrix]]]:
    """Group the matrices, which lie one behind the other, in batches of one shape and one split.

    The second list is of those that are iterated on by their Gram matrices, with equally long short sides.
    """
    batches: list[_Batch] = []
    by_short_side: dict[int, list[PlacedMatrix]] = {}
    unfilled: dict[tuple[Any, ...], _Batch] = {}
    offsets = [0, *accumulate(matrix.numel for matrix in matrices)]
    for matrix, offset in zip(matrices, offsets, strict=False):
        first, period = 0, sum(matrix.row_blocks)
        for height, (rows, columns) in zip(matrix.row_blocks, matrix.matrices(), strict=True):
            placed = PlacedMatrix(offset, matrix.num_repeats, period, first, height, matrix.shape[1])
            first += height
            if uses_grams and matrix.tensor_group is None and serves_shape(placed):
                by_short_side.setdefault(placed.short, []).append(placed)
                continue
            own_rows, is_distributed = height * matrix.num_repeats, matrix.tensor_mode == "distributed"
            key = (own_rows, matrix.shape[1], matrix.tensor_group, matrix.split_dim, is_distributed)
            batch = unfilled.get(key)
            if batch is None:
                batch = unfilled[key] = _Batch(batch_size(rows, columns, device_type), *key)
                batches.append(batch)
            batch.blocks.append(placed)
            if len(batch.blocks) == batch.size:
                del unfilled[key]
    return batches, list(by_short_side.values())


def _by_position(matrix: SharedMatrix) -> list[int]:
    """Return the ranks in the order of their elements."""
    return sorted(range(len(matrix.ranges)), key=lambda rank: matrix.ranges[rank])


def _numel(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _joined(pieces: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)


# ---- which rank computes with which tensors, and in which round -------------------------------------------------


def owners_of(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Give each tensor to one rank so that the ranks' work is about equal: [T] ranks.

    The largest tensor goes first, each to the rank with the least work so far; of equal ones the first. So the busiest
    rank has at most a third more than with the best choice, and no more than the mean and the largest tensor together.

    Args:
        costs: [T] work of each tensor, in any unit.

    Ranks: pure; every rank computes the same answer.
    Source: Graham, Bounds on multiprocessing timing anomalies (1969), longest processing time first.
    """
    owners = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return owners


def rounds_of(owners: Sequence[int], numels: Sequence[int], *, round_numel: int = ROUND_NUMEL) -> list[int]:
    """Give each tensor a round, such that each owner has whole tensors of about ``round_numel`` elements in each: [T].

    An owner takes its tensors in their order, so tensors that come first are ready first.

    Ranks: pure; every rank computes the same answer.
    """
    rounds: list[int] = []
    filled: dict[int, tuple[int, int]] = {}
    for owner, numel in zip(owners, numels, strict=True):
        number, used = filled.get(owner, (0, 0))
        if used and used + numel > round_numel:
            number, used = number + 1, 0
        filled[owner] = number, used + numel
        rounds.append(number)
    return rounds
