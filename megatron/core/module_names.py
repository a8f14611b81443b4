"""Names of modules and parameters in the whole model, from those on this rank.

[Note: names in the whole model] A pipeline stage numbers its layers from 0, and so does an expert-parallel rank its experts, as
callers of Megatron-Core expect: they add the offset themselves. Whatever ranks must agree on (initial weights, checkpoints,
conversions, conditions on names, messages) uses names in the whole model, and translates them with the functions in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn


class ModuleListPart(nn.ModuleList):
    """Consecutive modules of a longer list, whose other modules are on other ranks.

    Args:
        modules: [N] the modules of this rank, named ``0`` to ``N - 1``.
        first_index: index of the first of them in the whole list.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), first_index: int = 0) -> None:
        super().__init__(modules)
        self.first_index = first_index


def child_name(module: nn.Module, name: str) -> str:
    """Return the name in the whole model of a child, relative to ``module``, from its name on this rank."""
    return str(int(name) + module.first_index) if isinstance(module, ModuleListPart) else name


def named_modules(
    root: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``root.named_modules`` does, in the same order, under names in the whole model; arguments as for that."""
    memo = set() if memo is None else memo
    if root in memo:
        return
    if remove_duplicate:
        memo.add(root)
    yield prefix, root
    for name, child in root._modules.items():
        if child is not None:
            own = child_name(root, name)
            yield from named_modules(child, memo, f"{prefix}.{own}" if prefix else own, remove_duplicate)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what ``model.named_parameters()`` does, under names in the whole model."""
    whole = whole_names(model)
    return ((whole(name), parameter) for name, parameter in model.named_parameters())


def whole_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function from names of parameters, buffers and ``state_dict`` entries of ``model`` to those in the whole model."""
    local = (name for name, _ in model.named_modules(remove_duplicate=False))
    whole = dict(zip(local, (name for name, _ in named_modules(model, remove_duplicate=False)), strict=True))

    def translate(name: str) -> str:
        parts = name.split(".")
        # The innermost module that the name starts with: checkpoints may have other names for what it holds.
        for end in range(len(parts) - 1, 0, -1):
            if (prefix := ".".join(parts[:end])) in whole:
                return ".".join((whole[prefix], *parts[end:]))
        return name

    return translate
