"""Layers of transformer-engine under Megatron-Core's names. Importing this file without the package raises ImportError.

Parameters start as those of the local layers and have the same attributes ([Note: names at construction] in
parameter_init.py): a layer is built on the meta device, where transformer-engine initialises nothing, and filled from our
tables. Weight gradients follow [Note: main gradient contract] in tensor_parallel/linear_function.py.

Shapes: s sequence, b batch, i input size, o output size, n query heads, g key and value heads, d head width, r rows of
experts, l experts of a rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megatron.core.extensions.transformer_engine_histories import histories_of, restore_histories
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.init_methods import ConstantInit, InitMethod
from megatron.core.transformer.parameter_init import SeededParameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "FP8GlobalStateManager",
    "QuantizationState",
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TEGroupedLinear",
    "TELayerNorm",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TERMSNorm",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
    "recipes",
    "te",
    "tex",
]

_ELSEWHERE = {
    "TEDotProductAttention": "megatron.core.extensions.transformer_engine_attention",
    "TEFusedMLP": "megatron.core.extensions.transformer_engine_mlp",
}
_WEIGHT = 1
"""The place of a linear layer's weight among the quantisers of forward (``FP8FwdTensorIdx.GEMM1_WEIGHT``)."""


class QuantizationState:
    """What a module keeps between steps beside its weights: amax histories and scales of delayed scaling.

    It is the module's optional state in checkpoints: a run that does not need it ignores it, a run that lacks it starts
    with fresh histories. So FP8 and bf16 runs load each other's checkpoints.
    """

    config: TransformerConfig

    def get_optional_state(self) -> dict[str, Any] | None:
        """Return histories and scales by name, or None where the module has none."""
        return histories_of(self)

    def set_optional_state(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``get_optional_state`` of a module of the same name returned, if this one scales with delay."""
        from megatron.core.extensions.transformer_engine_recipes import quantization_recipe

        if state is None or self.config.fp8 is None or self.config.fp8_recipe != "delayed":
            return
        restore_histories(self, state, quantization_recipe(self.config))


class _Layer(QuantizationState, SeededParameters):
    """Base class of the layers with parameters; transformer-engine's class comes after it."""

    quantized_weights: tuple[str, ...] = ("weight",)
    """Names of the parameters that are multiplied in FP8."""
    fuses_if_quantized_again = True
    """Whether transformer-engine can write the gradient in place of a weight that it quantises again in backward."""
    fuse_wgrad_accumulation: bool
    _is_fsdp2: bool
    _fixes_scale = False

    def begin(self, config: TransformerConfig, init: Mapping[str, Any]) -> None:
        """Build transformer-engine's module on the meta device with the arguments ``init``."""
        super(SeededParameters, self).__init__(params_dtype=config.params_dtype, device="meta", **init)  # type: ignore[call-arg]
        self.begin_parameters(config)

    def finish(self) -> None:
        """Move the described parameters to torch's default device and fill them."""
        assert isinstance(self, torch.nn.Module)
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device, recurse=False)
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Fill the parameters; transformer-engine's constructor, which calls this too, leaves them alone."""
        if "_parts" in self.__dict__:
            super().reset_parameters()

    def _follow_engine(self, weight: torch.Tensor) -> None:
        """Write the weight gradient where its owner wants it, if the weight has one.

        A weight whose owner may release it between forward and backward is also quantised again in backward, so that no
        copy in FP8 stays: transformer-engine does this for the modules of PyTorch's FSDP2.
        """
        owned, codec = hasattr(weight, "get_main_grad"), getattr(weight, "fsdp_codec", None)
        followed = (owned, getattr(codec, "keeps_derived", False))
        if followed != self.__dict__.get("_followed"):
            self.__dict__["_followed"] = followed
            config = self.config
            quantizes_again = config.fp8 is not None and not config.fp8_param
            fuses = config.gradient_accumulation_fusion and (self.fuses_if_quantized_again or not quantizes_again)
            # Modules of FSDP2 drop the transposed bytes behind each product.
            self.__dict__["_is_fsdp2"] = owned and not followed[1]
            self.__dict__["_fixes_scale"] = owned and quantizes_again and config.fp8_recipe == "delayed"
            self.__dict__["fuse_wgrad_accumulation"] = owned and fuses

    def _fix_scale(self) -> None:
        """Let the backward of this forward quantise the weight as forward did, and not note its largest value again.

        The scales of delayed scaling move between the two. So the quantiser that transformer-engine keeps for backward gets a
        scale of its own, and further forwards another quantiser.
        """
        quantizers = getattr(self, "quantizers", {}).get("scaling_fwd", ())
        if not (torch.is_grad_enabled() and len(quantizers) > _WEIGHT and FP8GlobalStateManager.is_fp8_enabled()):
            return
        kept = quantizers[_WEIGHT]
        quantizers[_WEIGHT] = kept.copy()
        kept.scale, kept.amax = kept.scale.clone(), torch.zeros_like(kept.amax)


class _Split:
    """How a linear layer is split over tensor-parallel ranks, and what transformer-engine is told of it."""

    def __init__(
        self, input_size: int, output_size: int, mode: str | None, *, stride: int, is_expert: bool, group: Any
    ) -> None:
        self.mode, self.stride, self.group = mode, stride, group if mode in ("column", "row") else None
        size = group_size(self.group)
        self.inputs, self.outputs = input_size, output_size
        self.communicates = size > 1 and not is_expert
        own_inputs = part_extent(input_size, 1, size) if mode == "row" else input_size
        own_outputs = part_extent(output_size, stride, size) if mode == "column" else output_size
        # Layers of experts do not communicate: the token dispatcher brings their rows and sums their results.
        if self.communicates:
            self.init: dict[str, Any] = {"in_features": input_size, "out_features": output_size, "parallel_mode": mode}
            self.init |= {"tp_group": self.group, "tp_size": size}
        else:
            self.init = {"in_features": own_inputs, "out_features": own_outputs, "parallel_mode": None}
        self.marks: dict[str, Any] = {"allreduce": False} if is_expert else {}

    def describe(self, layer: SeededParameters, init_method: InitMethod, *, bias: bool, number: str = "") -> None:
        """Note how weight and bias are initialised and split; ``number`` ends their names."""
        parts: dict[str, Any] = {"partition_stride": self.stride, "group": self.group}
        dim = {"column": {"partition_dim": 0}, "row": {"partition_dim": 1}}.get(self.mode or "", {})
        marks = self.marks | ({"sequence_parallel": True} if self._sees_a_part(layer) and not dim else {})
        layer.describe_parameter(
            f"weight{number}", (self.outputs, self.inputs), init_method, **(parts | dim if dim else {}), **marks
        )
        if bias:
            columns = parts | dim if self.mode == "column" else {}
            marks = self.marks | ({"sequence_parallel": True} if self._sees_a_part(layer) and not columns else {})
            layer.describe_parameter(f"bias{number}", (self.outputs,), ConstantInit(0.0), **columns, **marks)

    def _sees_a_part(self, layer: SeededParameters) -> bool:
        """Return whether each tensor-parallel rank sees its own part of the sequence, so that gradients are partial sums."""
        return layer.config.sequence_parallel and (self.communicates or self.mode not in ("column", "row"))


class TELinear(_Layer, te.Linear):
    """A linear layer, y = x A^T + b.

    Args:
        parallel_mode: "column" or "row" (split over ``tp_group``), or "duplicated" or None (whole on each rank).
        skip_bias_add: return the bias beside the output instead of adding it.
        stride: number of matrices that are concatenated in the weight; see [Note: partition stride] in partition.py.
        is_expert: whether the layer is an expert's; ``tp_group`` is then the experts', and the layer does not communicate.
        tp_comm_buffer_name, symmetric_ar_type, name: handed to transformer-engine.

    Raises:
        ValueError: sizes are no multiples of the ranks; a weight is to be given in forward; an expert's bias would be added
            to a partial sum.

    Source: Megatron-Core's class of this name.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        _check_weight(type(self).__name__, skip_weight_param_allocation)
        split = _Split(input_size, output_size, parallel_mode, stride=stride, is_expert=is_expert, group=tp_group)
        if bias and is_expert and parallel_mode == "row" and group_size(tp_group) > 1 and not skip_bias_add:
            raise ValueError(
                "an expert's row-parallel layer over several ranks must have skip_bias_add or no bias, got a bias to add: it"
                " would be added on each rank; pass skip_bias_add=True and add it after the sum over ranks"
            )
        self.begin(
            config,
            split.init
            | {"bias": bias, "return_bias": bias and skip_bias_add, "sequence_parallel": config.sequence_parallel}
            | {"ub_name": tp_comm_buffer_name, "symmetric_ar_type": symmetric_ar_type, "name": name},
        )
        split.describe(self, init_method, bias=bias)
        self.finish()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute [s, ..., i] -> [s, ..., o], parts of them where the layer is split.

        Returns:
            The output, and the bias where it was not added, else None.

        Ranks: all of ``tp_group``, unless the layer is an expert's.
        """
        self._follow_engine(self.weight)
        result = super().forward(x)
        if self._fixes_scale:
            self._fix_scale()
        return result if self.return_bias else (result, None)


class TEColumnParallelLinear(TELinear):
    """A linear layer whose output features are split over tensor-parallel ranks.

    Raises:
        ValueError: the output is to be gathered.

    Source: Megatron-Core's class of this name.
    """

    def __init__(self, input_size: int, output_size: int, *, gather_output: bool = False, **kwargs: Any) -> None:
        _check_gather(type(self).__name__, gather_output)
        super().__init__(input_size, output_size, parallel_mode="column", **kwargs)


class TERowParallelLinear(TELinear):
    """A linear layer whose input features are split over tensor-parallel ranks; each rank has the whole bias.

    Raises:
        ValueError: the input is to be split here.

    Source: Megatron-Core's class of this name.
    """

    def __init__(self, input_size: int, output_size: int, *, input_is_parallel: bool = True, **kwargs: Any) -> None:
        if not input_is_parallel:
            raise ValueError(
                f"{type(self).__name__} must be given this rank's features (input_is_parallel=True), got False; use"
                " RowParallelLinear, which splits its input"
            )
        super().__init__(input_size, output_size, parallel_mode="row", **kwargs)


class TELayerNormColumnParallelLinear(_Layer, te.LayerNormLinear):
    """The configured norm and a column-parallel linear layer in one module; the norm's output is never in memory in bf16.

    In checkpoints the norm's weights have the names that they have as modules of their own: see ``TransformerLayer``.

    Args:
        kwargs: as for ``TELinear``.

    Raises:
        ValueError: the output is to be gathered; the layer is an expert's, whose tokens are normalised before they are
            dispatched.

    Source: Megatron-Core's class of this name.
    """

    # It does not ask for the main gradient then, and fails (2.20). The alternative, to keep the bytes of both directions
    # from forward to backward, would take two bytes for each weight of the whole model.
    fuses_if_quantized_again = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        gather_output: bool = False,
        bias: bool,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        _check_weight(type(self).__name__, skip_weight_param_allocation)
        _check_gather(type(self).__name__, gather_output)
        if is_expert:
            raise ValueError("experts must have no norm of their own, got is_expert=True; use TEColumnParallelLinear")
        split = _Split(input_size, output_size, "column", stride=stride, is_expert=False, group=tp_group)
        centered = config.layernorm_zero_centered_gamma
        self.begin(
            config,
            split.init
            | {"bias": bias, "return_bias": bias and skip_bias_add, "sequence_parallel": config.sequence_parallel}
            | {"normalization": config.normalization, "eps": config.layernorm_epsilon}
            | {"zero_centered_gamma": centered, "ub_name": tp_comm_buffer_name, "name": name},
        )
        marks: dict[str, Any] = {"sequence_parallel": True} if config.sequence_parallel else {}
        self.describe_parameter("layer_norm_weight", (input_size,), ConstantInit(0.0 if centered else 1.0), **marks)
        if config.normalization == "LayerNorm":
            self.describe_parameter("layer_norm_bias", (input_size,), ConstantInit(0.0), **marks)
        split.describe(self, init_method, bias=bias)
        self.finish()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``TELinear.forward``; an input of another dtype (``fp32_residual_connection``) is cast to the weight's."""
        self._follow_engine(self.weight)
        result = super().forward(x.to(self.weight.dtype))
        if self._fixes_scale:
            self._fix_scale()
        return result if self.return_bias else (result, None)


class _Norm(_Layer):
    """Base class of the norms."""

    quantized_weights = ()

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        centered = config.layernorm_zero_centered_gamma
        self.begin(config, {"normalized_shape": hidden_size, "eps": eps, "zero_centered_gamma": centered})
        marks: dict[str, Any] = {"sequence_parallel": True} if config.sequence_parallel else {}
        self.describe_parameter("weight", (hidden_size,), ConstantInit(0.0 if centered else 1.0), **marks)
        if config.normalization == "LayerNorm":
            self.describe_parameter("bias", (hidden_size,), ConstantInit(0.0), **marks)
        self.finish()

    def get_optional_state(self) -> None:
        """Norms keep nothing between steps."""


class TERMSNorm(_Norm, te.RMSNorm):
    """transformer-engine's RMSNorm."""


class TELayerNorm(_Norm, te.LayerNorm):
    """transformer-engine's LayerNorm."""


class TENorm:
    """A constructor of the norm that ``config.normalization`` names. Source: Megatron-Core's class of this name."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> TERMSNorm | TELayerNorm:
        """Build the norm; ``has_residual`` is accepted for Megatron-Core's callers, and residuals are added outside."""
        return (TERMSNorm if config.normalization == "RMSNorm" else TELayerNorm)(config, hidden_size, eps)


class TEGroupedLinear(_Layer, te.GroupedLinear):
    """A linear layer of each of ``num_gemms`` experts, as one grouped GEMM; it does not communicate.

    Args:
        parallel_mode: "column" or "row"; each expert's matrix is split over ``tp_group``.

    Source: Megatron-Core's class of this name.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool,
        skip_bias_add: bool = False,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        if not is_expert:
            raise ValueError("a grouped linear layer must be of experts, got is_expert=False; use TELinear")
        split = _Split(input_size, output_size, parallel_mode, stride=stride, is_expert=True, group=tp_group)
        self.begin(
            config,
            split.init
            | {"num_gemms": num_gemms, "bias": bias, "return_bias": bias and skip_bias_add}
            | {"ub_name": tp_comm_buffer_name, "name": name},
        )
        self.quantized_weights = tuple(f"weight{index}" for index in range(num_gemms))
        for index in range(num_gemms):
            split.describe(self, init_method, bias=bias, number=str(index))
        self.finish()

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Multiply each expert's rows by its weight: [r, i] -> [r, o].

        Args:
            m_splits: [l] rows of each expert, on the host.

        Returns:
            The output, and the [l] biases [o] where they were not added, else None.
        """
        self._follow_engine(self.weight0)
        result = super().forward(x, m_splits)
        return result if self.return_bias else (result, None)


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Grouped linear layers whose output features are split. Source: Megatron-Core's class of this name."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, gather_output: bool = False, **kwargs: Any
    ) -> None:
        _check_gather(type(self).__name__, gather_output)
        super().__init__(num_gemms, input_size, output_size, parallel_mode="column", **kwargs)


class TERowParallelGroupedLinear(TEGroupedLinear):
    """Grouped linear layers whose input features are split. Source: Megatron-Core's class of this name."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, input_is_parallel: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(num_gemms, input_size, output_size, parallel_mode="row", **kwargs)


def __getattr__(name: str) -> Any:
    """Give what Megatron-Core has under this path and what lies in files here that import this one."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)


def _check_weight(name: str, skip_weight_param_allocation: bool) -> None:
    if skip_weight_param_allocation:
        raise ValueError(
            f"{name} must have its own weight, got skip_weight_param_allocation=True; use ColumnParallelLinear"
        )


def _check_gather(name: str, gather_output: bool) -> None:
    if gather_output:
        raise ValueError(f"{name} must leave its output split, got gather_output=True; use ColumnParallelLinear")
