"""A setting has one fate, whichever door it comes through: as a flag, or as a field of a configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from megatron.core.checked_config import CheckedConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import arguments
from megatron.training.arguments import build_parser, check_command_line
from megatron.training.cli.substitutions import DESTS
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from tests.training.cli.test_flags import MINIMAL

LINES = {
    "": "--swiglu",
    "experts": "--swiglu --num-experts 4 --moe-grouped-gemm",
    "latent": "--swiglu --multi-latent-attention",
    "fp8": "--swiglu --bf16 --fp8-format hybrid --attention-dropout 0 --use-megatron-fsdp",
    "sharded": "--swiglu --use-megatron-fsdp --use-nccl-ub --overlap-param-gather",
    "split": "--swiglu --tensor-model-parallel-size 2 --sequence-parallel",
    "fp16": "--swiglu --fp16",
    "offload": "--swiglu --optimizer-cpu-offload --fine-grained-activation-offloading --offload-modules core_attn",
}
"""Launch lines that flags are added to."""

FIELDS = {dest: field for field, dest in DESTS.items()} | {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Names of fields whose flags set something of another name."""

DERIVED = ("num_query_groups", "ffn_hidden_size", "kv_channels", "softmax_scale")

EXEMPT = {
    "cuda_graph_impl": "FullCudaGraphConfig says what is captured",
    "cpu_offloading_num_layers": "the field has cpu_offloading beside it, which the flag turns on",
    "data_parallel_sharding_strategy": "the class of the wrapper says whether the engine shards",
    "fsdp_manual_registration": "the command line is asked for --use-nccl-ub, the field for any name of symmetric memory",
    "multi_latent_attention": "the class of the configuration says it",
    "num_query_groups": "the flag has an effect with --group-query-attention alone, as in Megatron-LM",
    "optimizer_cpu_offload": "what it excludes is in another configuration",
    "use_precision_aware_optimizer": "what it excludes is in another configuration",
    "fp8_recipe": "OptimizerConfig leaves it to the model",
    "pipeline_model_parallel_size": "the number of ranks is no field",
}

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _flags() -> Iterator[tuple[str, str, list[tuple[list[str], Any]]]]:
    """Yield each flag with a name of a field, that name, and (words, value of the field) to try."""
    parser = build_parser()
    for flag in sorted({*UPSTREAM_FLAGS, *parser._option_string_actions}):
        own, upstream = parser._option_string_actions.get(flag), UPSTREAM_FLAGS.get(flag)
        dest = own.dest if own is not None else (upstream and upstream.dest) or flag.lstrip("-").replace("-", "_")
        nargs = own.nargs if own is not None else upstream and upstream.nargs
        choices: list[Any] = [
            *((own.choices if own is not None else None) or ()),
            *(upstream.choices if upstream else ()),
        ]
        kind = own.type if own is not None else {"int": int, "float": float}.get(upstream.kind if upstream else "")
        values: list[tuple[list[str], Any]] = []
        if nargs == 0:
            turns_off = flag.startswith(("--no-", "--disable-")) and not dest.startswith(("no_", "disable_"))
            values = [([], own.const if own is not None else not turns_off)]
        elif choices:
            words = dict.fromkeys(map(str, choices))
            if dest in _OF_DTYPES or dest.startswith("megatron_fsdp_"):
                values = [([word], _DTYPES[word]) for word in words if word in _DTYPES]
            else:
                values = [([word], int(word) if word.isdigit() else word) for word in words]
        elif kind in (int, float) and nargs is None:
            values = [([word], kind(word)) for word in (("2", "-1") if kind is int else ("0.5", "-1.0"))]
        yield flag, FIELDS.get(dest, dest), values


def _bases(of: str) -> list[CheckedConfig]:
    settings = check_command_line([*MINIMAL, *LINES[of].split()], world_size=4).settings
    assert settings is not None, of
    return [settings.model.transformer, settings.ddp, settings.optimizer]


def _fault_of_field(base: CheckedConfig, name: str, value: Any) -> str | None:
    known = {field.name for field in dataclasses.fields(base)}  # type: ignore[arg-type]
    fields = {name: getattr(base, name) for name in known if not name.endswith("init_method") and name not in DERIVED}
    try:
        type(base)(**{**fields, name: value})
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("of", LINES)
def test_a_field_is_accepted_where_its_flag_is(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All flags with a field of the same meaning: those in effect, those that are always so or said once, and those refused."""
    monkeypatch.setattr(arguments, "build_parser", cache(build_parser))
    bases, compared, differing = _bases(of), 0, list[str]()
    for flag, name, values in _flags():
        base = next((base for base in bases if name in base.__dataclass_fields__), None)  # type: ignore[attr-defined]
        if base is None or name in EXEMPT or not _belongs(name, of):
            continue
        for words, value in values:
            compared += 1
            faults = check_command_line([*MINIMAL, *LINES[of].split(), flag, *words], world_size=4).faults
            assert not any(re.search(r"\b(None|True|False)\b|`|torch\.|Config\b", fault) for fault in faults), faults
            fault = _fault_of_field(base, name, value)
            if bool(faults) != (fault is not None):
                differing.append(f"{flag} {' '.join(words)}: {faults or 'accepted'}; as a field: {fault or 'accepted'}")
    assert differing == []
    assert compared > (300 if not of else 10)


def _belongs(name: str, of: str) -> bool:
    """Whether a field may fare otherwise on a line than on the plain one; it would take long to try all on all."""
    starts = {
        "": ("",),
        "experts": ("moe_", "expert_", "use_transformer_engine"),
        "latent": ("q_", "kv_lora", "qk_", "v_head", "mscale", "beta", "rotary", "rope", "original"),
        "fp8": ("fp8", "keep_fp8", "use_transformer_engine", "activation_func", "first_last", "num_layers_at", "tp_only"),
        "sharded": ("fsdp", "megatron_fsdp", "overlap", "suggested", "num_distributed", "outer", "use_", "nccl"),
        "split": ("sequence", "tensor", "context", "num_attention", "ffn", "hidden_size", "expert"),
        "fp16": ("loss", "initial", "min_loss", "hysteresis", "bf16", "fp16", "fp8"),
        "offload": ("optimizer_", "overlap_cpu", "pin_", "cpu_", "fine", "offload", "min_off", "activation_off", "recompute"),
    }  # fmt: skip
    return name.startswith(starts[of])


SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig])
def test_what_is_taken_as_something_else_is_remarked(kind: type[CheckedConfig]) -> None:
    assert kind(**(SHAPE if kind is TransformerConfig else {})).remarks == ()


def test_what_was_given_comes_back_with_what_it_needs() -> None:
    """Whichever is set first."""
    config: Any = TransformerConfig(**SHAPE, fp8_recipe="tensorwise", recompute_num_layers=1)
    assert (config.fp8_recipe, config.recompute_num_layers) == ("delayed", None)
    assert config.remarks == (
        "recompute_num_layers has no effect without recompute_granularity='full'",
        "fp8_recipe has no effect without fp8",
    )
    config.recompute_method = "uniform"
    config.recompute_granularity = "full"
    assert (config.recompute_method, config.recompute_num_layers) == ("uniform", 1)
    with pytest.raises(ValueError, match="recompute_granularity must be"):
        config.recompute_granularity = "all"
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    config.fp8 = "hybrid"
    assert (config.fp8_recipe, config.bf16, config.params_dtype) == ("tensorwise", True, torch.bfloat16)
    config.fp8 = None
    assert (config.fp8_recipe, config.bf16, config.params_dtype) == ("delayed", False, torch.float32)
    config.sequence_parallel = True
    config.tensor_model_parallel_size = 2
    assert config.sequence_parallel and dataclasses.replace(config, hidden_size=32).sequence_parallel
    assert MLATransformerConfig(**SHAPE, moe_router_topk=1).moe_router_topk == 2


def test_old_names_of_fields_mean_the_new_ones() -> None:
    config: Any = DistributedDataParallelConfig
    assert config(use_custom_fsdp=True).use_megatron_fsdp
