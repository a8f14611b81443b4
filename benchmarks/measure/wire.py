"""Count the bytes that gathers bring from other ranks, where transports hand them to the library or the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from torch import Tensor

from megatron.core.distributed.fsdp.comm import peer_copy
from megatron.core.distributed.fsdp.comm.peer_copy import prepare_copies
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport


@dataclass
class Wire:
    """Bytes so far on this rank; what a CUDA graph replays is counted when it is captured, not when it is replayed."""

    gathered: Counter[str] = field(default_factory=Counter)
    """Received in all-gathers, by the dtype that travels ("uint8", "bfloat16")."""
    maxima: int = 0
    """Largest absolute values of weights, from which scales are made, handed to reductions."""

    def copy(self) -> Wire:
        """Return the counts as they are now."""
        return Wire(Counter(self.gathered), self.maxima)

    def since(self, before: Wire) -> Wire:
        """Return what was counted after ``before``."""
        return Wire(self.gathered - before.gathered, self.maxima - before.maxima)

    def note(self, tensor: Tensor, nbytes: int) -> None:
        """Count bytes received of a tensor's dtype."""
        self.gathered[str(tensor.dtype).removeprefix("torch.")] += nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of weights and of what their scales are made from."""
        return self.gathered.total() + self.maxima


@contextmanager
def counted_wire() -> Iterator[Wire]:
    """Count what engines send that are built and used in the scope, whatever their transport."""
    wire = Wire()
    gather, maximum = ProcessGroupTransport.all_gather, ProcessGroupTransport.maximum

    def counted_gather(self: ProcessGroupTransport, full: Tensor, shard: Tensor) -> None:
        wire.note(shard, full.nbytes - shard.nbytes)
        gather(self, full, shard)

    def counted_copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        run, shard = prepare_copies(pairs), pairs[-1][1]  # the last is this rank's own
        nbytes = sum(source.nbytes for _, source in pairs[:-1])

        def counted() -> None:
            wire.note(shard, nbytes)
            run()

        return counted

    def counted_maximum(self: ProcessGroupTransport, tensor: Tensor) -> None:
        wire.maxima += tensor.nbytes
        maximum(self, tensor)

    with (
        patch.object(ProcessGroupTransport, "all_gather", counted_gather),
        patch.object(peer_copy, "prepare_copies", counted_copies),
        patch.object(ProcessGroupTransport, "maximum", counted_maximum),
    ):
        yield wire
