"""Configurations take every field of Megatron-Core's, in its order; what is not served is refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron.core.checked_config import CheckedConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.served_arguments import ANY
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.upstream_fields import UPSTREAM_FIELDS

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
CONFIGS: list[tuple[type[CheckedConfig], dict[str, object], dict[str, Any]]] = [
    (ModelParallelConfig, UPSTREAM_FIELDS["ModelParallelConfig"], {}),
    (TransformerConfig, UPSTREAM_FIELDS["ModelParallelConfig"] | UPSTREAM_FIELDS["TransformerConfig"], SHAPE),
    (OptimizerConfig, UPSTREAM_FIELDS["OptimizerConfig"], {}),
    (DistributedDataParallelConfig, UPSTREAM_FIELDS["DistributedDataParallelConfig"], {}),
]
# Fields whose other values go with a further one.
WITH: dict[str, dict[str, Any]] = {
    "DistributedDataParallelConfig.fsdp_manual_registration": {"nccl_ub": True},
    "TransformerConfig.experimental_attention_variant": {"linear_attention_freq": 2, "activation_func": "silu"},
    "TransformerConfig.fp8_recipe": {"fp8": "hybrid", "bf16": True, "params_dtype": torch.bfloat16},
}


def _another(value: object) -> object:
    """Return a value of the kind of ``value`` that is not it, and that no table has."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 7
    return torch.float64 if isinstance(value, torch.dtype) else "another"


@pytest.mark.parametrize(("kind", "upstream", "base"), CONFIGS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_field_of_megatron_core_is_there_in_its_place(
    kind: type[CheckedConfig], upstream: dict[str, object], base: dict[str, Any]
) -> None:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    assert [name for name in known if not known[name].kw_only] == list(upstream)
    kind(**base)


@pytest.mark.parametrize(("kind", "upstream", "base"), CONFIGS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_field_that_is_not_served_is_refused_by_name_with_the_reason(
    kind: type[CheckedConfig], upstream: dict[str, object], base: dict[str, Any]
) -> None:
    for name, (values, reason) in kind.served.items():
        value = _another(values[0] if values else upstream[name])
        further = WITH.get(f"{kind.__name__}.{name}", {})
        if values is ANY:
            kind(**base, **{name: value}, **further)
            continue
        for served in values:
            kind(**base, **{name: served}, **({} if served is values[0] else further))
        with pytest.raises(NotImplementedError) as caught:
            kind(**base, **{name: value})
        message = str(caught.value)
        assert message.startswith(f"{kind.__name__}.{name} must be ") and f"got {value!r}" in message, message
        assert reason in message and len(reason) > 10, message


def test_the_configuration_of_multi_latent_attention_has_megatron_cores_fields_and_defaults() -> None:
    config = MLATransformerConfig(**SHAPE)
    assert {name: getattr(config, name) for name in UPSTREAM_FIELDS["MLATransformerConfig"]} == UPSTREAM_FIELDS[
        "MLATransformerConfig"
    ]
    names = [field.name for field in fields(MLATransformerConfig)]
    own = [
        name
        for name in UPSTREAM_FIELDS["MLATransformerConfig"]
        if name not in ("multi_latent_attention", "normalization")
    ]
    assert [name for name in names if name in own] == own
