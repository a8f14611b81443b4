"""Parameters as modules hold them: from before sharding, sharded at rest and unsharded in use; and what the first ones become."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
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
        group_mesh: over which it is sharded.
        placed: how it is split over tensor-parallel ranks, where it was a DTensor; ``original`` is its local tensor then.
        has_values: it is not waiting for values, as one from the meta device may be.
    """

    name: str
    original: nn.Parameter
    made_from: nn.Parameter | None
    group_mesh: GroupMesh
    param_slots: list[tuple[ModuleParameters, str]] = field(default_factory=list)
    tied_names: list[str] = field(default_factory=list)
    placed: PlacedParameter | None = None
    has_values: bool = True

    def release_originals(self) -> list[nn.Parameter]:
        """Return the parameters from before sharding, and keep no reference to them."""
        originals = [original for original in (self.original, self.made_from) if original is not None]
        self.original = self.made_from = None  # type: ignore[assignment]
        return originals


class ParamSlots:
    """The places (a module's ``_parameters`` and a key) of parameters that are [T] sharded at rest, [T] whole in use.

    Attributes:
        holders, keys: the ``_parameters`` of the modules and the keys, place by place.
        unsharded: what ``Weights.use`` puts there.
    """

    def __init__(self) -> None:
        self.holders: list[ModuleParameters] = []
        self.keys: list[str] = []
        self._indices: list[int] = []
        self._sharded: list[nn.Parameter] = []
        self.unsharded: list[nn.Parameter] = []

    def add(
        self, index: int, sharded: nn.Parameter, unsharded: nn.Parameter, holder: ModuleParameters, key: str
    ) -> None:
        """Put sharded parameter ``index`` into a module under ``key``."""
        self.holders.append(holder)
        self.keys.append(key)
        self._indices.append(index)
        self._sharded.append(sharded)
        self.unsharded.append(unsharded)
        holder[key] = sharded

    def hold_unsharded(self, unsharded: Sequence[nn.Parameter]) -> None:
        """Take other [T] parameters for those in use; modules hold the sharded ones."""
        self.unsharded = [unsharded[index] for index in self._indices]

    def has(self, holder: ModuleParameters, key: str) -> bool:
        """Return whether the module with these ``_parameters`` holds one of the parameters under ``key``."""
        return any(own is holder and name == key for own, name in zip(self.holders, self.keys, strict=True))

    def held(self) -> list[nn.Parameter | None]:
        """Return what modules hold now, slot by slot."""
        return list(map(dict.get, self.holders, self.keys))

    def replaced(self) -> int | None:
        """Return the index of a parameter that a module has replaced by something else; None if there is none."""
        # The usual case, without a loop over parameters: each forward asks.
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


# ---- tensors that refuse all uses of their values -------------------------------------------------------------------


class RefusingTensor(torch.Tensor):
    """A tensor without values that anybody may use.

    Attributes:
        answered: names of attributes that may be read.
        answered_functions: functions that may be called.
        served: functions that are called instead of others, with the same arguments.

    Raises:
        RuntimeError: from any other use; ``refuse`` makes the message.
    """

    answered: ClassVar[tuple[str, ...]] = ()
    answered_functions: ClassVar[tuple[Callable[..., Any], ...]] = ()
    served: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in cls.served:
            return cls.served[function](*args)
        # The name of the attribute that an accessor reads or writes.
        asked = getattr(getattr(function, "__self__", None), "__name__", None)
        if (function.__name__ == "__get__" and asked in cls.answered) or function in cls.answered_functions:
            # Without it the function would come back to this method.
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls.refuse(asked or function.__name__, args)

    @classmethod
    def refuse(cls, use: str, args: Sequence[Any]) -> NoReturn:
        """Raise an error that names the use."""
        raise NotImplementedError


class RetiredParameter(RefusingTensor, nn.Parameter):
    """A parameter from before ``fully_shard``: it can be asked for its shape and dtype, and refuses all else.

    A module that was tied to a sharded one and is not sharded itself would compute with a copy that no optimizer
    updates, and an optimizer from before would update what no forward reads; both without a word. Parameters get
    this class when their values have moved to a sharded buffer (``retire``).

    Raises:
        RuntimeError: from any use of its values or its gradient.
    """

    # What a later fully_shard, an optimizer's constructor and an error message may ask.
    answered = ("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
    answered_functions = (
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.is_floating_point,
        torch.is_complex,
    )

    @classmethod
    def refuse(cls, use: str, args: Sequence[Any]) -> NoReturn:
        raise RuntimeError(
            f"a parameter must not be used once fully_shard has sharded it, got {use!r} of one from before; if it is "
            "a tied weight, call fully_shard also on the module that holds it (or on one around both); if it is an "
            "optimizer's, build the optimizer after fully_shard"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredParameter(shape={list(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a parameter from before fully_shard must not be copied or saved, got one that is sharded now"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)


class RetiredDTensor(RetiredParameter, DTensor):
    """The same for a parameter that was a DTensor."""

    __slots__ = ()


def retire(parameter: nn.Parameter) -> None:
    """Make every use of the parameter's values an error, and free them where nothing else refers to them."""
    # The object cannot be replaced: a tied module or an optimizer holds it. So its class changes, which tensors allow.
    is_placed = isinstance(parameter, DTensor)
    if is_placed:
        # torch's properties of a DTensor ask its local tensor; a meta tensor answers without memory.
        parameter._local_tensor = torch.empty(0, device="meta")  # type: ignore[attr-defined]
    parameter.__class__ = RetiredDTensor if is_placed else RetiredParameter
