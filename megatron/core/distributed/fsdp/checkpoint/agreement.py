"""``agree``: ranks that succeed or fail together. What one rank raises, all ranks raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

LocalT = TypeVar("LocalT")
ResultT = TypeVar("ResultT")

# Exceptions that the other ranks raise as the same class. They raise other kinds of OSError (no permission, not a folder, ...)
# as OSError, and all others as RuntimeError; the message names the original class.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, FileNotFoundError, FileExistsError, NotImplementedError, OSError, RuntimeError)
}
_MAX_RANKS_NAMED = 8
_ON_ALL_RANKS = "_raised_on_all_ranks"


_Failure = tuple[str, str]  # class and text of an exception


def agree(
    local: Callable[[], LocalT], first: Callable[[list[LocalT]], ResultT], *, group: dist.ProcessGroup | None = None
) -> ResultT:
    """Run ``local`` on every rank, then ``first`` on rank 0 with all results; return its result on every rank.

    Args:
        local: runs on each rank; its result is pickled.
        first: runs on rank 0 with [R] results in rank order, if no rank failed; its result is pickled.
        group: process group of all ranks; None: the default process group.

    Raises:
        Exception: ``local`` raised on some rank, or ``first`` did. All ranks raise its message with the numbers of the
            ranks that failed, with the same class if it is a common one, else as an OSError or a RuntimeError.

    Ranks: all; blocks. Always one gather and one broadcast.
    Source: ours.
    """
    value: LocalT | None = None
    failure: _Failure | None = None
    cause: Exception | None = None
    rank = dist.get_rank()
    try:
        value = local()
    except Exception as error:
        failure, cause = _failure_of(error), error
    outcomes: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object((value, failure), outcomes, dst=0, group=group)
    verdict: list[Any] = [None]
    if outcomes is not None:
        # The failure of the lowest rank, with all ranks that failed in the same way.
        failure = next((failed for _, failed in outcomes if failed is not None), None)
        ranks = [index for index, (_, failed) in enumerate(outcomes) if failed == failure]
        try:
            verdict = [(None if failure else first([result for result, _ in outcomes]), failure, ranks)]
        except Exception as error:
            verdict, cause = [(None, _failure_of(error), [rank])], error
    dist.broadcast_object_list(verdict, src=0, group=group)
    result, failure, ranks = verdict[0]
    if failure is not None:
        raise _exception(failure, ranks) from cause
    return result


def together(local: Callable[[], LocalT]) -> LocalT:
    """Run ``local`` on every rank and return its own result on each; what one rank raises, all raise. Ranks: all; blocks."""
    results: list[LocalT] = []
    agree(lambda: results.append(local()), lambda _: None)
    return results[0]


def raised_on_all_ranks(error: BaseException) -> bool:
    """Return whether ``agree`` raised the exception, so that all ranks have it."""
    return getattr(error, _ON_ALL_RANKS, False)


def check_initialized(caller: str) -> None:
    """Raise a RuntimeError that names the caller if torch.distributed is not initialised."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"torch.distributed must be initialised before {caller}; call torch.distributed.init_process_group() in a "
            "program started with torchrun"
        )


def digest_of(value: object) -> str:
    """Return a hash of the value's ``repr``, the same on all ranks for equal values."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def firsts(values: Sequence[object]) -> list[int]:
    """Return the index of the first occurrence of each distinct value."""
    return [values.index(value) for value in dict.fromkeys(values)]


def _failure_of(error: Exception) -> _Failure:
    kind = type(error).__name__
    if kind not in _KINDS and isinstance(error, OSError):
        kind = OSError.__name__
    return kind, str(error) if kind in _KINDS else f"{kind}: {error}"


def _exception(failure: _Failure, ranks: Sequence[int]) -> Exception:
    """Return what all ranks raise."""
    kind, text = failure
    named = ", ".join(map(str, ranks[:_MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - _MAX_RANKS_NAMED} more" if len(ranks) > _MAX_RANKS_NAMED else ""
    where = f"rank {named}" if len(ranks) == 1 else f"ranks {named}{more}"
    exception = _KINDS.get(kind, RuntimeError)(f"{text} [{where}]")
    setattr(exception, _ON_ALL_RANKS, True)
    return exception
