"""The meeting of all ranks at a start of the run, in a store whose keys belong to this start alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

_GREETINGS = "megatron/greetings"
_POLL_S = 0.01
_PATIENCE = timedelta(seconds=5)
"""How much longer the others wait than rank 0, which says who is missing."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """All ranks of one start of the run."""

    name: str
    """A name of this start, alike on all ranks; no other start had it."""

    connection: Store
    """This rank's connection to the store; use ``store``."""

    rank: int
    world_size: int
    timeout: timedelta
    """After which a missing rank is an error on all others."""

    serves: bool = False
    """The store ends with this process."""

    @property
    def store(self) -> Store:
        """The store with the keys of this start alone."""
        return PrefixStore(self.name, self.connection)

    @property
    def outlives_a_start(self) -> bool:
        """Whether the connection is to torchrun's store, which has the keys of earlier starts of this job too."""
        return _torchrun_serves()

    @property
    def where(self) -> str:
        """Name what serves the store."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"the store of torchrun on {place}" if _torchrun_serves() else f"rank 0, which serves the store on {place},"
        )


def world_size_of_environment() -> int:
    """Return the number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_environment() -> int:
    """Return this rank's index among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def meet(timeout: timedelta) -> Rendezvous:
    """Wait until all ranks of this start have come, and return the store that they share.

    An existing default process group is used. Without torchrun's environment there is one rank.

    Raises:
        RuntimeError: ranks are missing; rank 0 names them.

    Ranks: all; blocks.
    Source: ours.
    """
    if dist.is_initialized():
        return _of_default_group(timeout)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Rendezvous(name="alone", connection=HashStore(), rank=0, world_size=1, timeout=timeout)
    rank, world_size = rank_of_environment(), world_size_of_environment()
    serves = rank == 0 and not _torchrun_serves()
    try:
        tcp = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        name = _gather_ranks(tcp, world_size, timeout) if rank == 0 else _greet(tcp, rank, timeout + _PATIENCE)
    except (KeyError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"rank {rank} must reach {world_size} ranks at MASTER_ADDR:MASTER_PORT {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} within {timeout.total_seconds():.0f} s, got {_reason(error)}; look for ranks "
            "that did not start or have ended, and start all of them with torchrun"
        ) from error
    return Rendezvous(name=name, connection=tcp, rank=rank, world_size=world_size, timeout=timeout, serves=serves)


def _of_default_group(timeout: timedelta) -> Rendezvous:
    names, rank = [uuid4().hex], dist.get_rank()
    dist.broadcast_object_list(names, src=0)
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    serves = isinstance(store, TCPStore) and rank == 0 and not _torchrun_serves()
    return Rendezvous(
        name=names[0],
        connection=store,
        rank=rank,
        world_size=dist.get_world_size(),
        timeout=timeout,
        serves=serves,
    )


def _torchrun_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _gather_ranks(store: TCPStore, world_size: int, timeout: timedelta) -> str:
    """Make up a name for this start, and answer the greeting of each rank with it.

    After a restart torchrun's store still holds keys of the start before. A greeting from then gets an answer that nobody
    reads.
    """
    name, deadline = uuid4().hex, time.monotonic() + timeout.total_seconds()
    while store.add(f"megatron/{name}/met", 0) < world_size - 1:
        if store.queue_len(_GREETINGS):
            store.set(f"megatron/answers/{store.queue_pop(_GREETINGS).decode()}", name)
        elif time.monotonic() > deadline:
            missing = [rank for rank in range(1, world_size) if not store.check([f"megatron/{name}/met/{rank}"])]
            raise RuntimeError(f"no sign of {ranks_text(missing)}")
        else:
            time.sleep(_POLL_S)
    return name


def _greet(store: TCPStore, rank: int, timeout: timedelta) -> str:
    greeting = uuid4().hex
    store.queue_push(_GREETINGS, greeting)
    answer = f"megatron/answers/{greeting}"
    try:
        store.wait([answer], timeout)
    except dist.DistStoreError as error:
        raise RuntimeError("no answer of rank 0") from error
    name = store.get(answer).decode()
    store.set(f"megatron/{name}/met/{rank}", "")
    store.add(f"megatron/{name}/met", 1)
    return name


def _reason(error: Exception) -> str:
    return f"no {error} in the environment" if isinstance(error, KeyError) else str(error)


def ranks_text(ranks: list[int], limit: int = 8) -> str:
    """Name ranks in a message: all of a few, the first ones of many."""
    named = ", ".join(map(str, ranks[:limit])) + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
