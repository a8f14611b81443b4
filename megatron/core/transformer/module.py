"""The base class of the framework's modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.model_tensors import describe_module, sharded_state_dict_default
from megatron.core.process_groups_config import DEFAULT_GROUP, group_of, group_rank, group_size

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(torch.nn.Module):
    """A module with the model's configuration.

    Attributes:
        rng_tracker: the random number streams of this tensor-parallel rank; None where the model is not split.
    """

    rng_tracker: CudaRNGStatesTracker | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def set_is_first_microbatch(self) -> None:
        """Do nothing: modules cache nothing between microbatches. Megatron-Core's callers may call it."""

    def refresh_cache(self) -> None:
        """Do nothing: no module caches values that it computes from weights."""

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return ``state_dict``."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Describe all tensors of this module for ``dist_checkpointing.save`` and ``load``, by their names in the model.

        Args:
            prefix: goes before the names.
            sharded_offsets: (axis, index of this part, number of parts) of axes before those of the tensors.
            metadata: ``dp_cp_group`` is the group of the ranks that hold the same; None: that of ``pg_collection`` or
                ``parallel_state``.

        Ranks: local.
        """
        groups = getattr(self, "pg_collection", None)
        if groups is not None and (metadata is None or "dp_cp_group" not in metadata):
            metadata = {**(metadata or {}), "dp_cp_group": groups.dp_cp or groups.dp, "expt_dp_group": groups.expt_dp}
        tp_group = DEFAULT_GROUP if groups is None else groups.tp
        return describe_module(self, prefix, sharded_offsets, metadata, tp_group=tp_group)

    def drawing_apart(self, x: torch.Tensor, draws: bool) -> AbstractContextManager[None]:
        """Return a context in which each tensor-parallel rank draws its own random numbers on the device of ``x``.

        Args:
            draws: whether anything is drawn; if not, or without a tracker, the context does nothing.
        """
        if not draws or self.rng_tracker is None:
            return nullcontext()
        return self.rng_tracker.fork(device=x.device)


class Float16Module(MegatronModule):
    """A model in bf16 or fp16.

    Parameters are converted, the first stage's floating-point inputs too, and the last stage's outputs are in fp32. Parameters with the attribute ``keep_in_fp32`` (``mark_keep_in_fp32``) stay as they are.

    Raises:
        ValueError: neither ``config.bf16`` nor ``config.fp16`` is set.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        super().__init__(config)
        if not (config.bf16 or config.fp16):
            raise ValueError(
                "Float16Module must come with TransformerConfig(bf16=True) or fp16=True, got neither; leave it out"
            )
        self.fp16, self.bf16 = config.fp16, config.bf16
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.pg_collection: ProcessGroupCollection | None = getattr(module, "pg_collection", None)
        self.module = convert_module_to_dtype_except_fp32_marked(module, self.dtype)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the input of the next forward, where the stage has no embedding."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Run the model's forward.

        Args:
            fp32_output: False: the last stage's outputs stay as they are.
        """
        group = group_of(self.pg_collection, "pp")
        if group_rank(group) == 0:
            inputs = fp32_to_float16(inputs, lambda x: x.to(self.dtype))
        outputs = self.module(*inputs, **kwargs)
        is_last = group_rank(group) == group_size(group) - 1
        return float16_to_fp32(outputs) if is_last and fp32_output else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's own state dict."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Describe the model's own tensors."""
        return sharded_state_dict_default(self.module, prefix, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the model's own state dict."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def mark_keep_in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Let ``Float16Module`` leave a parameter or buffer in its dtype."""
    tensor.keep_in_fp32 = True  # type: ignore[attr-defined]
    return tensor


def convert_module_to_dtype_except_fp32_marked(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert floating-point parameters and buffers, but those of ``mark_keep_in_fp32``; attributes of parameters stay."""
    converted: torch.nn.Module = module._apply(
        lambda x: x.to(dtype) if x.is_floating_point() and not hasattr(x, "keep_in_fp32") else x
    )
    return converted


def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert the fp32 tensors of nested lists and tuples."""
    return _converted(val, lambda x: float16_convertor(x) if x.dtype is torch.float32 else x)


def float16_to_fp32(val: Any) -> Any:
    """Convert the half-precision tensors of nested lists and tuples to fp32."""
    return _converted(val, lambda x: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)


def _converted(val: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(val, list | tuple):
        converted = [_converted(one, convert) for one in val]
        return converted if isinstance(val, list) else tuple(converted)
    return convert(val) if isinstance(val, torch.Tensor) else val
