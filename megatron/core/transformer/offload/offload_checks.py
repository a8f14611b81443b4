"""Checks of the fields of offloaded activations."""

from __future__ import annotations

from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES
from megatron.core.transformer.parallel_checks import Condition

OFFLOAD_CONTRADICTIONS: list[tuple[Condition, str]] = [
    (
        lambda c: c.cpu_offloading and not 0 < c.cpu_offloading_num_layers < c.num_layers,
        "cpu_offloading_num_layers must be at least 1 and below num_layers ({num_layers}) with cpu_offloading, got "
        "{cpu_offloading_num_layers}: backward begins with the last layer's activations",
    ),
    (
        lambda c: c.cpu_offloading and c.pipeline_model_parallel_size > 1,
        "cpu_offloading must go without pipeline_model_parallel_size > 1, got {pipeline_model_parallel_size}; use"
        " fine_grained_activation_offloading",
    ),
    (
        lambda c: c.cpu_offloading and c.recompute_granularity is not None,
        "cpu_offloading must go without recompute_granularity, got {recompute_granularity!r}: what is recomputed is not kept",
    ),
    (
        lambda c: c.cpu_offloading and c.fine_grained_activation_offloading,
        "cpu_offloading and fine_grained_activation_offloading exclude each other, got both",
    ),
    (
        lambda c: (
            c.fine_grained_activation_offloading
            and not (c.offload_modules and set(c.offload_modules) <= set(OFFLOAD_MODULES))
        ),
        f"offload_modules must name some of {', '.join(OFFLOAD_MODULES)}, got {{offload_modules!r}}",
    ),
    (
        lambda c: (
            c.fine_grained_activation_offloading
            and "attn_proj" in c.offload_modules
            and "core_attn" not in c.offload_modules
        ),
        "offload_modules must have core_attn beside attn_proj, whose input core attention's backward needs, got"
        " {offload_modules!r}",
    ),
    (
        lambda c: c.fine_grained_activation_offloading and c.recompute_granularity == "full",
        "fine_grained_activation_offloading must go without recompute_granularity='full': what is recomputed is not kept",
    ),
    (
        lambda c: not 0.0 <= c.activation_offload_fraction <= 1.0,
        "activation_offload_fraction must be from 0 to 1, got {activation_offload_fraction}",
    ),
    (
        lambda c: c.min_offloaded_tensor_size < 0 or (c.fine_grained_offloading_max_inflight_offloads or 0) < 0,
        "min_offloaded_tensor_size and fine_grained_offloading_max_inflight_offloads must not be negative, got"
        " {min_offloaded_tensor_size} and {fine_grained_offloading_max_inflight_offloads}",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
