"""When layers multiply in FP8: the contexts that they run in. Names are Megatron-Core's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.package_versions import get_te_version
from megatron.core.process_groups_config import group_of, group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

HAVE_TE = get_te_version().major > 0
"""Whether transformer-engine is installed."""


def __getattr__(name: str) -> Any:
    """Find transformer-engine's class of FP8 tensors when somebody asks: its layers import what imports this file."""
    if name == "HAVE_TE_FP8_TENSOR_CLASS":
        return HAVE_TE
    if name != "FP8_TENSOR_CLASS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not HAVE_TE:
        return None
    from megatron.core.extensions.transformer_engine_layers import te

    return te.tensor.QuantizedTensor


def correct_amax_history_if_needed(model: Iterable[torch.nn.Module]) -> None:
    """Do nothing: parameters are made in ``params_dtype``, so no history has values of their initialization."""


def is_first_last_bf16_layer(config: TransformerConfig, layer_no: int) -> bool:
    """Return whether ``first_last_layers_bf16`` keeps the layer of this index in the whole model (from 0) out of FP8."""
    first, last = config.num_layers_at_start_in_bf16, config.num_layers - config.num_layers_at_end_in_bf16
    return config.first_last_layers_bf16 and layer_no >= 0 and not first <= layer_no < last


def get_fp8_context(
    config: TransformerConfig,
    layer_no: int = -1,
    is_init: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
) -> AbstractContextManager[Any]:
    """Return the context of a layer's forward.

    Args:
        layer_no: index of the layer in the whole model, from 0; -1: of all layers.
        is_init: the context in which weights are made; must be False, since they are made in ``params_dtype``.
        pg_collection: the process groups over which the model is split.

    Raises:
        NotImplementedError: ``is_init``.

    Source: Megatron-Core's function of this name.
    """
    if is_init:
        raise NotImplementedError("is_init must be False, got True: weights are made in params_dtype")
    return nullcontext() if config.fp8 is None else Quantization(config, pg_collection).of_layer(layer_no)


def quantize_weights(config: TransformerConfig, layers: Iterable[Any]) -> None:
    """Have the sharding engine keep and move the weights of these layers in FP8, where they multiply in it.

    Args:
        layers: transformer layers, on any device, before they are sharded.
    """
    from megatron.core.extensions.transformer_engine_weights import te_weight_codec

    settings: dict[str, Any] = {}
    if config.fp8_recipe == "delayed":
        settings = {
            "margin": config.fp8_margin,
            "amax_history_len": config.fp8_amax_history_len,
            "amax_compute_algo": config.fp8_amax_compute_algo,
        }
    codec = te_weight_codec(config.fp8_recipe, **settings)
    for layer in layers:
        if is_first_last_bf16_layer(config, layer.layer_number - 1):
            continue
        for module in layer.modules():
            for name in getattr(module, "quantized_weights", ()):
                module.set_parameter_attribute(name, "fsdp_codec", codec)


def recomputation_in_fp8(
    modules: Iterable[torch.nn.Module],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward and for its recomputation, which multiplies with the same scales and leaves no trace.

    Args:
        modules: what runs in it.
    """
    from megatron.core.extensions.transformer_engine_recomputation import recomputation

    return recomputation(part for module in modules for part in module.modules())


class Quantization:
    """The contexts of a block of layers that multiplies in FP8.

    With delayed scaling one context spans the block, since scales are made for all layers at its end; with other recipes
    each layer has its own.

    Raises:
        ValueError: no process group has the ranks over which delayed scaling must reduce.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
        from megatron.core.extensions.transformer_engine_recipes import quantization_recipe

        self._config = config
        self._group, reduces = _amax_group(config, pg_collection)
        self._recipe = quantization_recipe(config, reduce_amax=reduces)
        self.spans_block = config.fp8_recipe == "delayed"

    @contextmanager
    def of_block(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Return the context of the whole block; without gradients, as in an evaluation, it leaves later steps' scales alone.

        Args:
            modules: what runs in it.
        """
        from megatron.core.extensions.transformer_engine_recomputation import without_trace

        evaluates = self.spans_block and not torch.is_grad_enabled()
        parts = (part for module in modules for part in module.modules())
        with without_trace(parts) if evaluates else nullcontext(), self.of_layer(-1):
            yield

    def of_layer(self, layer_no: int) -> AbstractContextManager[Any]:
        """Return the context of the layer of this index in the whole model; -1: of the block."""
        from megatron.core.extensions.transformer_engine_recipes import autocast

        if is_first_last_bf16_layer(self._config, layer_no):
            return nullcontext()
        return autocast(self._recipe, self._group)


def _amax_group(config: TransformerConfig, groups: ProcessGroupCollection | None) -> tuple[ProcessGroup | None, bool]:
    """Return the group over which largest absolute values are reduced (None: all ranks), and whether they are."""
    if config.tp_only_amax_red:
        group = group_of(groups, "tp_cp") or group_of(groups, "tp") or group_of(groups, "cp")
        return group, group_size(group) > 1
    if group_size(group_of(groups, "pp")) == 1:
        return None, torch.distributed.is_initialized()
    if group_size(group_of(groups, "tp")) == 1:
        stage = group_of(groups, "dp_cp") or group_of(groups, "dp")
    else:
        stage = group_of(groups, "tp_dp_cp")
    if stage is None and config.fp8_recipe == "delayed":
        raise ValueError(
            "fp8_recipe='delayed' over pipeline-parallel ranks must come with a process group of a stage's ranks, got a collection"
            " without tp_dp_cp; make it, let build_process_groups do so, or set tp_only_amax_red"
        )
    return stage, group_size(stage) > 1
