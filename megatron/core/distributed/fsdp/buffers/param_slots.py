"""Where modules hold a group's parameters, sharded at rest and unsharded in use."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.mesh.model_parallel import PlacedParameter

ModuleParameters = dict[str, nn.Parameter | None]


@dataclass(eq=False)
class ManagedParameter:
    """A parameter as its user made it, and where modules hold it.

    Args:
        name: its name within the unit.
        original: the parameter before sharding.
        made_from: the meta parameter that it was before, which a module of another unit may hold.
        param_slots: the ``_parameters`` dicts that hold it, with the key; several where weights are tied.
        tied_names: its further names within the unit.
        placed: how it is split over tensor-parallel ranks, where it was a DTensor; ``original`` is its local tensor then.
        mesh: over which it is sharded; None: over its unit's.
        has_values: it is not waiting for values, as one from the meta device may be.
    """

    name: str
    original: nn.Parameter
    made_from: nn.Parameter | None = None
    param_slots: list[tuple[ModuleParameters, str]] = field(default_factory=list)
    original_ids: tuple[int, ...] = ()
    tied_names: tuple[str, ...] = ()
    placed: PlacedParameter | None = None
    mesh: DeviceMesh | None = None
    has_values: bool = True

    def tie(self, name: str) -> None:
        """Note a further name of the parameter."""
        self.tied_names += (name,)

    def release_originals(self) -> list[nn.Parameter]:
        """Return the parameters from before sharding, and keep no reference to them, only their ids."""
        originals = [original for original in (self.original, self.made_from) if original is not None]
        self.original_ids += tuple(map(id, originals))
        self.original = self.made_from = None  # type: ignore[assignment]
        return originals


class ParamSlots:
    """The places (a module's ``_parameters`` and a key) of parameters that are [T] sharded at rest, [T] whole in use.

    Args:
        places: [T] the places of each parameter; several where weights are tied.

    Attributes:
        holders, keys: the ``_parameters`` of the modules and the keys, place by place.
        unsharded: what ``Weights.use`` puts there.
    """

    def __init__(
        self,
        places: Sequence[Sequence[tuple[ModuleParameters, str]]],
        sharded: Sequence[nn.Parameter],
        unsharded: Sequence[nn.Parameter],
    ) -> None:
        self._sharded_of, self._unsharded_of = sharded, unsharded
        self.holders: list[ModuleParameters] = []
        self.keys: list[str] = []
        self._indices: list[int] = []
        self._sharded: list[nn.Parameter] = []
        self.unsharded: list[nn.Parameter] = []
        for index, of_one in enumerate(places):
            for holder, key in of_one:
                self.add(index, holder, key)

    def add(self, index: int, holder: ModuleParameters, key: str) -> None:
        """Put sharded parameter ``index`` into a module under ``key``."""
        self.holders.append(holder)
        self.keys.append(key)
        self._indices.append(index)
        self._sharded.append(self._sharded_of[index])
        self.unsharded.append(self._unsharded_of[index])
        holder[key] = self._sharded_of[index]

    def hold_unsharded(self, unsharded: Sequence[nn.Parameter]) -> None:
        """Take other [T] parameters for those in use; modules hold the sharded ones."""
        self._unsharded_of = unsharded
        self.unsharded = [unsharded[index] for index in self._indices]

    def has(self, holder: ModuleParameters, key: str) -> bool:
        """Return whether the module with these ``_parameters`` holds one of the parameters under ``key``."""
        return any(own is holder and name == key for own, name in zip(self.holders, self.keys, strict=True))

    def held(self) -> list[nn.Parameter | None]:
        """Return what modules hold now, slot by slot."""
        return list(map(dict.get, self.holders, self.keys))

    def replaced(self) -> int | None:
        """Return the index of a parameter that a module has replaced by something else; None if there is none."""
        if all(map(operator.is_, map(dict.get, self.holders, self.keys), self._sharded)):
            return None
        places = zip(self._indices, self.held(), self._sharded, self.unsharded, strict=True)
        for index, found, sharded, unsharded in places:
            if found is not sharded and found is not unsharded:
                return index
        return None

    def to_sharded(self) -> None:
        """Put the sharded parameters into the modules."""
        deque(map(dict.__setitem__, self.holders, self.keys, self._sharded), maxlen=0)  # each, without a call


def each(function: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    """Call ``function`` on the arguments' elements without a line of Python for each: the host is a bottleneck."""
    deque(map(function, *arguments), maxlen=0)
