"""A list of modules that are named by their index in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


class GlobalModuleList(nn.Module):
    """Consecutive modules of a longer list, indexed from 0 and named by their index in the whole list.

    The layers of a pipeline stage and the experts of an expert-parallel rank keep the names of the unsplit model, so
    initial weights, ``state_dict`` keys and checkpoints need no translation.

    Args:
        modules: [N] the modules of this rank.
        first_index: index of the first of them in the whole list.
    """

    def __init__(self, modules: Sequence[nn.Module], first_index: int = 0) -> None:
        super().__init__()
        self.first_index = first_index
        for index, module in enumerate(modules, start=first_index):
            self.add_module(str(index), module)

    def __getitem__(self, index: int) -> nn.Module:
        """Return the module at a local index; negative ones count from the end."""
        modules = list(self.children())
        return modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)
