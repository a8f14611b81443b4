"""Megatron-Core's import path of small functions; what is longer is in a file of its own."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from megatron.core import parallel_state
from megatron.core._rank_utils import log_single_rank
from megatron.core.api_marks import (
    ExperimentalNotEnabledError,
    deprecate_args,
    deprecated,
    experimental_api,
    experimental_cls,
    experimental_fn,
    internal_api,
    null_decorator,
)
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
    get_causal_conv1d_version,
    get_emerging_optimizers_version,
    get_fa_version,
    get_flashinfer_version,
    get_mamba_version,
    get_te_version,
    get_torch_version,
    is_causal_conv1d_min_version,
    is_emerging_optimizers_min_version,
    is_fa_min_version,
    is_flashinfer_min_version,
    is_mamba_min_version,
    is_te_min_version,
    is_torch_min_version,
)
from megatron.core.packed_seq_params import flatten_batch_for_packed_sequences
from megatron.core.parallel_state import GlobalMemoryBuffer
from megatron.core.process_groups_config import DEFAULT_GROUP, group_of, group_or_default, group_rank, group_size
from megatron.core.replica_check import check_param_hashes_across_dp_replicas
from megatron.core.straggler_detector import StragglerDetector
from megatron.core.tensor_parallel.data import get_batch_on_this_tp_rank
from megatron.core.transformer import context_parallel

__all__ = [
    "ExperimentalNotEnabledError",
    "GlobalMemoryBuffer",
    "MakeViewlessTensor",
    "StragglerDetector",
    "WrappedTensor",
    "accepts_parameter",
    "assert_viewless_tensor",
    "check_param_hashes_across_dp_replicas",
    "configure_nvtx_profiling",
    "deprecate_args",
    "deprecate_inference_params",
    "deprecated",
    "divide",
    "ensure_divisibility",
    "ensure_params_ready",
    "experimental_api",
    "experimental_cls",
    "experimental_fn",
    "flatten_batch_for_packed_sequences",
    "get_attr_wrapped_model",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_causal_conv1d_version",
    "get_data_parallel_group_if_dtensor",
    "get_emerging_optimizers_version",
    "get_fa_version",
    "get_flashinfer_version",
    "get_full_tensor_if_necessary",
    "get_mamba_version",
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
    "internal_api",
    "is_causal_conv1d_min_version",
    "is_emerging_optimizers_min_version",
    "is_fa_min_version",
    "is_flashinfer_min_version",
    "is_mamba_min_version",
    "is_submodule",
    "is_te_min_version",
    "is_torch_min_version",
    "is_using_quantization_scales",
    "local_multi_tensor_applier",
    "local_multi_tensor_l2_norm",
    "local_multi_tensor_scale",
    "log_on_each_pipeline_stage",
    "log_single_rank",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "make_viewless_tensor",
    "mup_scaled_init_method_normal",
    "null_decorator",
    "nvtx_decorator",
    "nvtx_range_pop",
    "nvtx_range_push",
    "prepare_input_tensors_for_wgrad_compute",
    "round_up_to_nearest_multiple",
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


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that fills a tensor from normal(0, sigma)."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that fills a tensor from normal(0, sigma / sqrt(multiplier * num_layers))."""
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))


def mup_scaled_init_method_normal(
    sigma: float, num_layers: int, width_mult: float, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``scaled_init_method_normal``'s function for a model that is ``width_mult`` times as wide as the tuned one."""
    return scaled_init_method_normal(sigma / math.sqrt(width_mult), num_layers, multiplier)


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
        viewless: torch.Tensor = MakeViewlessTensor.apply(inp, requires_grad)  # type: ignore[no-untyped-call, unused-ignore]
        return viewless
    return _viewless(inp).requires_grad_(requires_grad)


def _viewless(inp: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=inp.dtype, device=inp.device)
    out.data = inp.data
    return out


class MakeViewlessTensor(torch.autograd.Function):
    """What ``make_viewless_tensor(..., keep_graph=True)`` applies."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        return _viewless(inp)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0], None


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return what is given; raise AssertionError for a tensor, or a list with one, that is a view."""
    for one in tensor if isinstance(tensor, list) else [tensor]:
        if isinstance(one, torch.Tensor) and one._base is not None:
            raise AssertionError(
                f"a tensor whose data is replaced or kept must be no view, got one with a base, which would stay in memory; {extra_msg or ''}"
            )
    return tensor


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


def get_full_tensor_if_necessary(tensor: DTensor) -> torch.Tensor:
    """Return the whole of a DTensor that has fewer rows than ranks, so that no rank has an empty part; of others this rank's part.

    Ranks: all of the tensor's mesh; blocks where it gathers.
    """
    mesh = tensor.device_mesh
    needs = any(
        isinstance(placement, Shard) and mesh.size(axis) > tensor.shape[placement.dim]
        for axis, placement in enumerate(tensor.placements)
    )
    return tensor.full_tensor() if needs else tensor.to_local()


def prepare_input_tensors_for_wgrad_compute(
    grad_output: torch.Tensor, all_gathered_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors contiguous, and as matrices [tokens, features] where they are [s, b, features]."""
    tensors = (grad_output.contiguous(), all_gathered_input.contiguous())
    if grad_output.dim() == 3:
        return tensors[0].flatten(0, 1), tensors[1].flatten(0, 1)
    return tensors


def local_multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: torch.Tensor | None, lists: Any, *args: Any
) -> Any:
    """Call a function that takes apex's arguments: a chunk size, a flag, and lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, lists, *args)


def local_multi_tensor_l2_norm(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: Any, per_tensor: bool = False, *args: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the norm [1] of all tensors of the lists; with ``per_tensor`` also that of each. Arguments as apex's function."""
    norms = torch.stack(
        torch._foreach_norm([one for tensors in tensor_lists for one in tensors], 2, dtype=torch.float32)
    )
    return norms.norm().view(1), norms if per_tensor else None


def local_multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: Any, scale: float | torch.Tensor
) -> None:
    """Write the tensors of the first list times ``scale`` into those of the second. Arguments as apex's function."""
    torch._foreach_copy_(tensor_lists[1], torch._foreach_mul(tensor_lists[0], scale))


PARAM_READY_CALLBACK_ATTR = "_ensure_param_ready_callback"
"""Name of a function that whoever gathers a parameter puts on it; the engine's parameters are always whole or sharded."""


def ensure_params_ready(params: Iterable[Any]) -> None:
    """Call each of the functions that parameters have under ``PARAM_READY_CALLBACK_ATTR`` once."""
    for callback in dict.fromkeys(getattr(param, PARAM_READY_CALLBACK_ATTR, None) for param in params):
        if callback is not None:
            callback()


# ---- modules --------------------------------------------------------------------------------------------------------


def is_submodule(module: torch.nn.Module, parent_module: torch.nn.Module, strict: bool = True) -> bool:
    """Return whether a module is in another; with ``strict``, not that itself."""
    return not (strict and module is parent_module) and any(one is module for one in parent_module.modules())


def is_using_quantization_scales(config: Any) -> bool:
    """Return whether a configuration computes in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def accepts_parameter(func: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument of this name, be it by ``**kwargs``."""
    parameters = inspect.signature(func).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


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


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    level: int,
    msg: object,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> None:
    """Log on the first rank of each pipeline stage.

    Args:
        tp_group, dp_cp_group: given both, or neither: then those of ``parallel_state``, if there are any.

    Raises:
        AssertionError: torch.distributed is not initialised.
        ValueError: only one group is given.
    """
    if not dist.is_initialized():
        raise AssertionError("torch.distributed must be initialised to log on stages; call init_process_group")
    if (tp_group is None) is not (dp_cp_group is None):
        raise ValueError("tp_group and dp_cp_group must be provided or not provided together, got one of them")
    if not logger.isEnabledFor(level):
        return
    if tp_group is None:
        tp_group, dp_cp_group = group_of(None, "tp"), group_of(None, "dp_cp")
    if group_rank(tp_group) == group_rank(dp_cp_group) == 0:
        logger.log(level, msg, *args, **kwargs)
