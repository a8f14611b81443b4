"""Which modules of a model keep what they save in the host's memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from megatron.core.transformer.offload.activation_offload import ActivationOffload

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

OFFLOAD_MODULES = {
    "attn_norm": r"input_layernorm",
    "qkv_linear": r"self_attention\.(linear_(q|kv|qkv)(_down|_up)?(_proj)?|in_proj)",
    "core_attn": r"self_attention\.core_attention",
    "attn_proj": r"self_attention\.(linear|out)_proj",
    "mlp_norm": r"pre_mlp_layernorm",
    "expert_fc1": r"mlp\.experts",
    "moe_act": r"mlp\.experts",
}
"""Names of ``offload_modules``, and the modules of a layer that they mean."""


def offload_activations(config: TransformerConfig, layers: Sequence[nn.Module]) -> ActivationOffload | None:
    """Let the layers of this stage offload what they save, as the configuration says; None: nothing is offloaded."""
    if config.cpu_offloading and config.cpu_offloading_activations:
        offload = ActivationOffload(max_regions=1)
        for layer in layers[: config.cpu_offloading_num_layers]:
            offload.attach(layer)
        return offload
    if not config.fine_grained_activation_offloading:
        return None
    modules = [module for layer in layers for module in _named(config.offload_modules, layer)]
    inflight = config.fine_grained_offloading_max_inflight_offloads
    per_layer = len(config.offload_modules)
    offload = ActivationOffload(
        min_numel=config.min_offloaded_tensor_size,
        max_regions=per_layer if inflight is None else inflight * per_layer,
    )
    # The first ones: backward needs them last.
    for module in modules[: round(config.activation_offload_fraction * len(modules))]:
        offload.attach(module)
    return offload


def _named(names: Sequence[str], layer: nn.Module) -> list[nn.Module]:
    wanted = [re.compile(OFFLOAD_MODULES[name]) for name in names]
    return [module for path, module in layer.named_modules() if any(pattern.fullmatch(path) for pattern in wanted)]
