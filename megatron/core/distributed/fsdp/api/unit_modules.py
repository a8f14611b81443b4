"""The modules and parameters of a unit, and those that cannot be sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from megatron.core.distributed.fsdp.api.module import FsdpModule, fsdp_modules
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.module_names import named_modules


@dataclass(frozen=True)
class UnitModules:
    """The modules that become one unit.

    Args:
        members: the modules that ``fully_shard`` was given; several make one unit: [Note: modules that are one unit].
        root: the only member, or a module that has them as children.
        own: (name in the unit, module) of the tree without nested units, ``root`` first, each module once.
    """

    members: list[nn.Module]
    root: nn.Module
    own: list[tuple[str, nn.Module]]

    @classmethod
    def of(cls, module: nn.Module | Sequence[nn.Module]) -> UnitModules:
        """Find the modules of the unit that ``fully_shard`` makes of ``module``.

        Raises:
            TypeError: it is no module, or one whose forward nobody calls.
            ValueError: a module is a unit already, or has no forward; a list is empty, or its modules contain each other.
        """
        # See [Note: modules that are one unit].
        members = [module] if isinstance(module, nn.Module) else list(module)
        for member in members:
            _check_member(member)
        # What several modules own is found as if one held them; nobody keeps it.
        root = members[0] if isinstance(module, nn.Module) else _holder(members)
        return cls(members, root, cls.tree_of(root))

    @staticmethod
    def tree_of(root: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of a tree without nested units, ``root`` first, each module once."""
        # Not their trees: what a nested unit and this one share (tied modules) is found through this one too.
        return list(named_modules(root, {inner for inner in fsdp_modules(root) if inner is not root}))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the unit, parameter) of the unit's parameters that are not sharded."""
        for prefix, module in self.own:
            for key, parameter in module._parameters.items():
                if parameter is not None and group_of(parameter) is None:
                    yield f"{prefix}.{key}" if prefix else key, parameter

    def ignore(self, ignored: Collection[nn.Parameter]) -> list[str]:
        """Mark parameters that the unit does not shard, and return their names."""
        names = []
        for name, parameter in self.parameters() if ignored else ():
            if any(parameter is other for other in ignored):  # by identity: ``in`` compares tensors
                parameter._fsdp_ignored = True  # type: ignore[attr-defined]
                names.append(name)
        return names


def _check_member(module: nn.Module) -> None:
    if isinstance(module, FsdpModule):
        raise ValueError(
            f"fully_shard must be called once on a module, got a {type(module).__name__}, which is a unit already"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard needs a module, or a list of modules, got {module!r}")
    # Weights are unsharded around forward: a container whose children are called one by one would never have them.
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, around which weights are unsharded, got a "
            f"{type(module).__name__}; call it on each of the modules in it"
        )
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise TypeError(
            "fully_shard needs a module whose forward is called, got the out_proj of an nn.MultiheadAttention, which reads its "
            "weight and never calls it; call it on the MultiheadAttention"
        )


def _holder(members: Sequence[nn.Module]) -> nn.Module:
    """Return a module that holds those of one unit.

    Raises:
        ValueError: there is none; one is given twice, or lies in another one.
    """
    inside = [inner for member in members for inner in member.modules()]
    twice = next((member for member in members if inside.count(member) > 1), None)
    if twice is not None or not members:
        raise ValueError(
            "fully_shard of a list needs modules that do not hold each other, "
            f"got {'none' if twice is None else f'a {type(twice).__name__} twice, or inside of another one'}"
        )
    return nn.ModuleList(members)


def check_modules(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse modules that cannot be trained sharded.

    Args:
        modules: (name in the unit, module).

    Raises:
        NotImplementedError: an embedding writes to its weight in forward, or makes sparse gradients.
        ValueError: a lazy module has not been initialised.
    """
    for name, module in modules:
        label = f"{name} ({type(module).__name__})" if name else type(module).__name__
        own = {**module._parameters, **module._buffers}
        # A layout needs shapes, and a lazy parameter replaces itself in the first forward.
        lazy = [key for key, tensor in own.items() if tensor is not None and is_lazy(tensor)]
        if lazy:
            raise ValueError(
                f"{lazy[0]} of {label} must have a shape, got an uninitialised one; run a forward of the lazy module before "
                "fully_shard, or give its sizes"
            )
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise NotImplementedError(
                f"max_norm of {label} must be None, got {module.max_norm}: forward writes to its weight then, and what is written "
                "to unsharded weights is lost; scale the rows after each step, or normalise what the embedding returns"
            )
        if module.sparse and module.weight.requires_grad:
            raise NotImplementedError(
                f"sparse of {label} must be False, got True: gradients are reduced over the ranks dense"
            )
