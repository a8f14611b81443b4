"""The modules of a unit, watched for parameters that come after ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import nn

from megatron.core.distributed.fsdp.buffers.param_slots import ModuleParameters
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of

Children = dict[str, nn.Module | None]


def is_ignored(parameter: nn.Parameter) -> bool:
    """Return whether ``fully_shard`` was told to leave the parameter as it is (``ignored_params``)."""
    return getattr(parameter, "_fsdp_ignored", False)


class ModuleTree:
    """The modules of a unit without those of nested units, through dicts that do not point back to them.

    Args:
        tops: (prefix of names, children, parameters) of the unit's topmost modules.
        is_unit: whether a module is a unit by itself.

    Attributes:
        known: what ``look`` returned when the tree was walked last; [] if that found strangers, which are told each time.
    """

    def __init__(
        self, tops: list[tuple[str, Children, ModuleParameters]], is_unit: Callable[[nn.Module], bool]
    ) -> None:
        self._tops, self._is_unit = tops, is_unit
        self._children: list[Children] = []
        self._parameters: list[ModuleParameters] = []
        self.walk()

    def walk(self) -> list[str]:
        """Take the tree as it is now; return the names of parameters in it that are in no group."""
        self._children, self._parameters = [], []
        strangers: list[str] = []
        for prefix, children, parameters in self._tops:
            self._add(prefix, children, parameters, strangers)
        absent = [(held, key) for held in self._parameters for key, value in held.items() if value is None]
        self._absent_from = [held for held, _ in absent]
        self._absent = [key for _, key in absent]
        self.known = [] if strangers else self.look()
        return strangers

    def _add(self, prefix: str, children: Children, parameters: ModuleParameters, strangers: list[str]) -> None:
        if any(children is known for known in self._children):
            return
        self._children.append(children)
        self._parameters.append(parameters)
        for key, parameter in parameters.items():
            if parameter is not None and group_of(parameter) is None and not is_ignored(parameter):
                strangers.append(prefix + key)
        for name, child in children.items():
            if child is not None and not self._is_unit(child):
                self._add(f"{prefix}{name}.", child._modules, child._parameters, strangers)

    def look(self) -> list[int]:
        """Return what is not ``known`` once a module or a parameter was added, at little cost: each forward looks."""
        children = chain.from_iterable(map(dict.values, self._children))
        absent = map(dict.get, self._absent_from, self._absent)
        return [*map(id, chain(children, absent)), *map(len, self._parameters)]
