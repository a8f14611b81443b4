"""The class of parameters from before ``fully_shard``: whoever still holds one must not use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.refusing_tensor import RefusingTensor


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
    is_placed = isinstance(parameter, DTensor)
    if is_placed:
        parameter._local_tensor = torch.empty(0, device="meta")  # type: ignore[attr-defined]
    parameter.__class__ = RetiredDTensor if is_placed else RetiredParameter
