"""Megatron-Core's import path of small functions; what is longer is in a file of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.model_tensors import (
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from megatron.core.model_wrappers import (
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    unwrap_model,
)
from megatron.core.nvtx_ranges import configure_nvtx_profiling, nvtx_decorator, nvtx_range_pop, nvtx_range_push
from megatron.core.package_versions import (
    get_fa_version,
    get_te_version,
    get_torch_version,
    is_fa_min_version,
    is_te_min_version,
    is_torch_min_version,
)
from megatron.core.packed_seq_params import flatten_batch_for_packed_sequences
from megatron.core.parallel_state import GlobalMemoryBuffer
from megatron.core.process_groups_config import DEFAULT_GROUP, group_or_default, group_rank, group_size
from megatron.core.replica_check import check_param_hashes_across_dp_replicas
from megatron.core.transformer import context_parallel

__all__ = [
    "GlobalMemoryBuffer",
    "WrappedTensor",
    "check_param_hashes_across_dp_replicas",
    "configure_nvtx_profiling",
    "deprecate_inference_params",
    "divide",
    "ensure_divisibility",
    "flatten_batch_for_packed_sequences",
    "get_attr_wrapped_model",
    "get_batch_on_this_cp_rank",
    "get_data_parallel_group_if_dtensor",
    "get_fa_version",
    "get_model_config",
    "get_model_type",
    "get_model_xattn",
    "get_pg_rank",
    "get_pg_size",
    "get_pg_src_rank",
    "get_te_version",
    "get_tensor_model_parallel_group_if_none",
    "get_torch_version",
    "init_method_normal",
    "is_fa_min_version",
    "is_te_min_version",
    "is_torch_min_version",
    "log_on_each_pipeline_stage",
    "log_single_rank",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "make_viewless_tensor",
    "nvtx_decorator",
    "nvtx_range_pop",
    "nvtx_range_push",
    "safely_set_viewless_tensor_data",
    "scaled_init_method_normal",
    "to_local_if_dtensor",
    "unwrap_model",
]

# ---- numbers --------------------------------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError where ``denominator`` does not divide ``numerator``."""
    if numerator % denominator:
        raise AssertionError(
            f"{numerator} must be a multiple of {denominator}, got the remainder {numerator % denominator}"
        )


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of two integers that leave no remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that fills a tensor from normal(0, sigma)."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that fills a tensor from normal(0, sigma / sqrt(multiplier * num_layers))."""
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))


# ---- groups ---------------------------------------------------------------------------------------------------------


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Return the size of a process group; 1 for None."""
    return group_size(group) if dist.is_initialized() else 1


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's index in a process group; 0 for None."""
    return group_rank(group) if dist.is_initialized() else 0


def get_pg_src_rank(group: ProcessGroup | None = None) -> int:
    """Return the first rank of a process group; 0 for None."""
    return 0 if group is None or not dist.is_initialized() else dist.get_process_group_ranks(group)[0]


def get_tensor_model_parallel_group_if_none(
    tp_group: ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return a tensor-parallel group that was given, or else the default one; None where there are no default groups."""
    if tp_group is not None or not parallel_state.is_initialized():
        return tp_group
    found: ProcessGroup | None = parallel_state.group_named("expt_tp" if is_expert else "tp")
    return found


# ---- tensors --------------------------------------------------------------------------------------------------------


def make_viewless_tensor(inp: torch.Tensor, requires_grad: bool, keep_graph: bool) -> torch.Tensor:
    """Return a tensor with the memory of ``inp`` that keeps no larger tensor alive through ``_base``.

    Args:
        requires_grad: of the result, where the graph is not kept.
        keep_graph: gradients of the result reach ``inp``.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        viewless: torch.Tensor = _Viewless.apply(inp)  # type: ignore[no-untyped-call, unused-ignore]
        return viewless
    return _viewless(inp).requires_grad_(requires_grad)


def _viewless(inp: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=inp.dtype, device=inp.device)
    out.data = inp.data
    return out


class _Viewless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor) -> torch.Tensor:
        return _viewless(inp)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


def safely_set_viewless_tensor_data(tensor: torch.Tensor, new_data_tensor: torch.Tensor) -> None:
    """Set ``tensor.data``; raise AssertionError for a view, whose base would keep the old memory."""
    if tensor._base is not None:
        raise AssertionError(
            "the data of a view must not be replaced, got a tensor with a base; see make_viewless_tensor"
        )
    tensor.data = new_data_tensor


class WrappedTensor:
    """A tensor that is handed over: ``unwrap`` returns it once, and nothing here holds it afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._wrapper = [tensor]

    def unwrap(self) -> torch.Tensor:
        """Return the tensor and forget it.

        Raises:
            RuntimeError: it was returned before.
        """
        if not self._wrapper:
            raise RuntimeError("a WrappedTensor must be unwrapped once, got a second call")
        return self._wrapper.pop()


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; other tensors as they are. Without gradients."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_data_parallel_group_if_dtensor(
    tensor: torch.Tensor, data_parallel_group: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Return the group of a DTensor's mesh of one axis; None for other tensors.

    Raises:
        AssertionError: it is not ``data_parallel_group``, where that is given.
    """
    if not isinstance(tensor, DTensor):
        return None
    group = tensor.device_mesh.get_group()
    if data_parallel_group is not None and group is not data_parallel_group:
        raise AssertionError("data_parallel_group must be the group of the tensor's mesh, got another")
    return group


# ---- batches --------------------------------------------------------------------------------------------------------

_KEPT = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: ProcessGroup | None = DEFAULT_GROUP,
    hybrid_cp_group_func: Callable[..., Any] | None = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Any]:
    """Cut a batch to the tokens of this context-parallel rank; see ``transformer/context_parallel.py``.

    Args:
        cp_group: left out, that of ``parallel_state``.

    Raises:
        NotImplementedError: ``is_hybrid_cp``, or packed sequences that would be cut one by one.
    """
    if is_hybrid_cp:
        raise NotImplementedError("is_hybrid_cp must be False, got True: all sequences are split over all ranks")
    group = group_or_default(cp_group, "cp")
    if group_size(group) > 1 and batch.get("cu_seqlens") is not None and not use_per_sequence_balancing:
        raise NotImplementedError(
            "packed sequences must not be split over context-parallel ranks, got cu_seqlens; use context_parallel_size 1"
        )
    cut = {name: value for name, value in batch.items() if value is not None and name not in _KEPT}
    return {**batch, **context_parallel.get_batch_on_this_cp_rank(cut, group)}


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """Return whichever of the two names of one argument was given."""
    return inference_params if inference_context is None else inference_context


# ---- logs -----------------------------------------------------------------------------------------------------------


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank; without torch.distributed on each process."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(*args, **kwargs)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    dp_cp_group: ProcessGroup | None = DEFAULT_GROUP,
    **kwargs: Any,
) -> None:
    """Log on the first rank of each pipeline stage; groups that are left out are those of ``parallel_state``."""
    if group_rank(group_or_default(tp_group, "tp")) == group_rank(group_or_default(dp_cp_group, "dp_cp")) == 0:
        logger.log(*args, **kwargs)
