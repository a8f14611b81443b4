"""A list of modules whose names are those that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


class GlobalModuleList(nn.Module):
    """Consecutive modules of a longer list: indexed from 0 here, named by their place in the whole list.

    The layers of a pipeline stage and the experts of an expert-parallel rank keep the names that they have in the model
    that is not split, so initial weights, ``state_dict`` keys and checkpoints need no translation.

    Args:
        modules: [N] the modules that this rank holds.
        first_index: the place of the first of them in the whole list.
    """

    def __init__(self, modules: Sequence[nn.Module], first_index: int = 0) -> None:
        super().__init__()
        self.first_index = first_index
        for index, module in enumerate(modules, start=first_index):
            self.add_module(str(index), module)

    def __getitem__(self, index: int) -> nn.Module:
        """The module at a local index; negative ones count from the end."""
        modules = list(self.children())
        return modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)
