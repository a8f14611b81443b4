"""Fields of configurations whose defaults differ from Megatron-LM's; written by ``tools/upstream_defaults.py``: do not edit."""

from __future__ import annotations

# fmt: off
DEFAULTS: dict[str, tuple[object, object, str]] = {
    "ModelParallelConfig.gradient_accumulation_fusion": (False, True, 'it needs no further package here'),
    "TransformerConfig.moe_token_dispatcher_type": ('allgather', 'alltoall', 'where experts are divided, tokens go by one all-to-all; elsewhere both compute the same'),
    "OptimizerConfig.store_param_remainders": (True, False, 'there it does nothing without `use_precision_aware_optimizer`, which sets it here'),
}
"""Class and field: (default of Megatron-LM, ours, what it means)."""
