"""Operations that get a sharded weight beside a plain tensor: a layer outside of its unit's forward, plain values to write.

Torch says of most that tensors are mixed, which does not name the cause. A linear layer's weight is refused as a view. Writes
that optimizers call for each parameter (``add_``, ``mul_``) have torch's words, since a handler would slow them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher

from megatron.core.distributed.fsdp.dtensor.row_shard_rules import USE_IN_FORWARD
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard

_aten = torch.ops.aten
_LAYERS = (
    _aten.embedding.default,
    _aten.native_layer_norm.default,
    _aten._fused_rms_norm.default,
    _aten.mul.Tensor,  # norms that are written by hand, and what follows
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.div.Tensor,
    _aten.addcmul.default,
    _aten.where.self,
    _aten.mm.default,  # losses that multiply by the head's weight
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.native_group_norm.default,
    _aten.convolution.default,
    _aten.mkldnn_rnn_layer.default,
    _aten._cudnn_rnn.default,
)


class _Dispatcher(OpDispatcher):
    """Torch's dispatcher, whose table of handlers each thread can see without some operations.

    The table is one for the process: a handler must not take itself out of it to have torch run its operation.
    """

    @property
    def _custom_op_handlers(self) -> dict[Any, Any]:
        handlers: dict[Any, Any] | None = getattr(_seen_here, "handlers", None)
        return handlers if handlers is not None else self.__dict__["_custom_op_handlers"]

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[Any, Any]) -> None:
        self.__dict__["_custom_op_handlers"] = handlers


# The table that operations of this thread see; None or no attribute: that of the process.
_seen_here = threading.local()


def by_torch(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], handler: Any = None) -> Any:
    """Run an operation on DTensors as if the engine had no handler for it, or with this one of torch."""
    if handler is not None:
        return handler(op, args, kwargs)
    before = getattr(_seen_here, "handlers", None)
    handlers: dict[Any, Any] = dict(DTensor._op_dispatcher._custom_op_handlers)
    handlers.pop(op, None)  # else the operation would come to the engine's handler again
    _seen_here.handlers = handlers
    try:
        return op(*args, **kwargs)
    finally:
        _seen_here.handlers = before


def _refusing(handler: Any) -> Callable[..., Any]:
    def run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = list(_tensors((*args, *kwargs.values())))
        sharded = next((t for t in found if isinstance(t, DTensor) and _is_uneven(t)), None)
        if sharded is not None and not all(isinstance(tensor, DTensor) or tensor.numel() == 1 for tensor in found):
            raise RuntimeError(
                f"{op} must get whole weights, got one of shape {list(sharded.shape)} of which ranks hold rows (RowShard), beside a "
                f"plain tensor: {USE_IN_FORWARD}"
            )
        return by_torch(op, args, kwargs, handler)

    return run


def _refusing_plain_values(handler: Any) -> Callable[..., Any]:
    def run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own, *others = _tensors((*args, *kwargs.values()))
        plain = next((t for t in others if not isinstance(t, DTensor) and t.numel() != 1), None)
        if plain is not None and isinstance(own, DTensor) and _is_uneven(own):
            raise RuntimeError(
                f"{op} on a parameter of shape {list(own.shape)} of which ranks hold rows (RowShard) must get tensors that are "
                f"sharded alike, got a plain one of shape {list(plain.shape)}; write `parameter.copy_(distribute_tensor(whole, "
                "parameter.device_mesh, parameter.placements))`, of torch.distributed.tensor, where `whole` has all values "
                "(parameter.full_tensor() returns those there are)"
            )
        return by_torch(op, args, kwargs, handler)

    return run


def _refusing_other_replicas(handler: Any) -> Callable[..., Any]:
    """Tell ``DistributedDataParallel`` from a use that may go on: it joins all parameters in one tensor, and broadcasts that."""

    def run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = list(_tensors(args))
        is_sharded = [isinstance(tensor, DTensor) for tensor in found]
        if op is not _aten.cat.default or (any(map(_is_uneven, found)) and not all(is_sharded)):
            raise NotImplementedError(
                f"{op} must get plain tensors, got DTensors, of which ranks hold rows; call full_tensor() on them before. If "
                "DistributedDataParallel is around: take it away, fully_shard averages gradients itself"
            )
        return by_torch(op, args, kwargs, handler)

    return run


def _is_uneven(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(isinstance(placement, UnevenShard) for placement in tensor.placements)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _patch_dtensor() -> None:
    DTensor._op_dispatcher.__class__ = _Dispatcher
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update({op: _refusing(handlers.get(op)) for op in _LAYERS})
    copy = _aten.copy_.default
    handlers[copy] = _refusing_plain_values(handlers.get(copy))
    for joined in (_aten.cat.default, torch.ops.c10d.broadcast_.default):
        handlers[joined] = _refusing_other_replicas(handlers.get(joined))


_patch_dtensor()
