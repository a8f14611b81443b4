"""Triton's interpreter with the numpy that is installed."""

from __future__ import annotations

from typing import Any


def let_ranges_be_loaded() -> None:
    """Let kernels loop up to numbers that they load: numpy 2.4 makes no integer of an array of one element.

    To be deleted when Triton's interpreter does so itself.
    """
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
