"""What a CUDA device does otherwise than a CPU, for tensors without values.

[Note: stand-ins] A plan is made on a machine without a GPU, for one. So in ``on_hollow_device`` tensors say that they are CUDA's,
functions that a device runs as one kernel count as one operation without memory of its own, attention is cuDNN's, and
transports are those of NCCL. Everything else is the model's and the engine's own code. Each stand-in is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from megatron.core import jit
from megatron.core.distributed.fsdp import planning
from megatron.core.transformer.moe import grouped_gemm, permutation, token_dispatcher, token_exchange
from megatron.training.planner.hollow import HollowMode, no_room


@contextmanager
def on_hollow_device(mode: HollowMode, streams: Any) -> Iterator[None]:
    """Run code for a CUDA device in the scope, without one: [Note: stand-ins].

    Args:
        streams: makes the engine's streams.
    """
    with ExitStack() as stack:
        for change in (*_of_torch(mode), *_of_model(mode), *planning.stand_ins(mode.fused, streams)):
            stack.enter_context(change)
        stack.enter_context(mode)
        yield


def _of_torch(mode: HollowMode) -> list[AbstractContextManager[Any]]:
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if not storage.resizable():
            raise no_room(storage.nbytes())
        result = resize(storage, nbytes)
        mode.ledger.resized(storage)
        return result

    return [
        patch.object(torch.UntypedStorage, "resize_", resize_and_count),
        patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True), create=True),
        patch.object(F, "scaled_dot_product_attention", _attention),
        patch.object(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.CUDNN_ATTENTION.value),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ]


def _of_model(mode: HollowMode) -> list[AbstractContextManager[Any]]:
    def call(function: jit.Fusible, compiled: bool, first: torch.Tensor, *rest: Any) -> Any:
        eager: Callable[..., Any] = function.eager
        return mode.fused(eager.__name__, eager, first, *rest) if compiled else eager(first, *rest)

    return [
        patch.object(jit.Fusible, "__call__", call),
        patch.object(jit, "_can_compile", lambda: True),
        patch.object(grouped_gemm, "_has_kernel", lambda device: True),
        patch.object(grouped_gemm, "_has_triton", lambda: False),
        patch.object(permutation, "_kernels_on", lambda device: None),
        *(_as_one(mode, owner, name) for owner, name in _ONE_KERNEL),
    ]


# Functions that are one kernel of Triton's on a device: (where they are looked up, name).
_ONE_KERNEL: tuple[tuple[Any, str], ...] = (
    (permutation.RowMap, "take"),
    (permutation.RowMap, "sum"),
    (token_dispatcher, "expert_order"),
    (token_dispatcher, "bounded_order"),
    (token_exchange, "arrivals"),
    (token_exchange, "bounded_arrivals"),
)


def _as_one(mode: HollowMode, owner: Any, name: str) -> AbstractContextManager[Any]:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return mode.fused(name, function, *args, **kwargs)

    return patch.object(owner, name, call)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention as cuDNN's kernel does: it keeps its inputs, its output and one fp32 number for each query and head."""
    saves = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    outputs: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, attn_mask, saves, dropout_p, is_causal, False, scale=scale
    )
    return outputs[0]
