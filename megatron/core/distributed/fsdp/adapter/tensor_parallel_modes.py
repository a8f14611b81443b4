"""The tensor-parallel mode of a parameter, from its layer's class or attributes, as in Megatron-Core's wrapper."""

from __future__ import annotations

from typing import Literal

from torch import nn

TensorParallelMode = Literal["column", "row", "replicated"]

MODES_BY_CLASS: dict[str, set[str]] = {
    "column": {
        "ColumnParallelLinear",
        "DotProductAttention",  # its sinks, one per head
        "TEColumnParallelGroupedLinear",
        "TEColumnParallelLinear",
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "VocabParallelEmbedding",
    },
    "row": {"RowParallelLinear", "TERowParallelGroupedLinear", "TERowParallelLinear"},
    "replicated": {
        "FusedLayerNorm",
        "IdentityOp",
        "L2Norm",
        "LayerNorm",
        "RMSNorm",
        "TENorm",
        "TopKRouter",
        "WrappedTorchNorm",
    },
}
"""Class names of layers, by mode."""

_NORM_OF_FUSED = ("layer_norm_weight", "layer_norm_bias")


def tensor_parallel_mode(name: str, module: nn.Module) -> TensorParallelMode | None:
    """Return the mode of the parameter ``name`` of a layer; None if neither class nor attributes determine it.

    The bias of a row-parallel layer is added once, after the all-reduce, so it is replicated.
    """
    kind = type(module).__name__
    if kind == "TELayerNormColumnParallelLinear":
        return "replicated" if name.endswith(_NORM_OF_FUSED) else "column"
    mode = next((mode for mode, names in MODES_BY_CLASS.items() if kind in names), None)
    if mode is None and hasattr(module, "tensor_model_parallel"):
        dim = getattr(module, "partition_dim", None)
        mode = {0: "column", 1: "row"}.get(dim) if module.tensor_model_parallel else "replicated"  # type: ignore[arg-type]
    if mode is None and "Norm" in kind:
        mode = "replicated"
    if mode is None and kind == "TELinear":
        mode = {"column": "column", "row": "row"}.get(getattr(module, "parallel_mode", ""), "replicated")
    return "replicated" if mode == "row" and "bias" in name else mode  # type: ignore[return-value]


def mark_tensor_parallel_modes(model: nn.Module) -> None:
    """Set ``_tensor_parallel_mode`` on each parameter whose mode is known."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            mode = tensor_parallel_mode(name, module)
            if mode is not None:
                parameter._tensor_parallel_mode = mode  # type: ignore[attr-defined]
