"""gpt-oss as Hugging Face stores it: windows and sinks in attention, experts with biases in stacks, gates and ups in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.activations import QUICK_SLOPE
from megatron.core.distributed.fsdp.checkpoint import Part
from megatron.training.formats.architecture import Architecture
from megatron.training.formats.huggingface_llama import (
    LAYER,
    OUTSIDE,
    THERE,
    attention,
    llama_config,
    plain_settings,
    window_config,
)
from megatron.training.formats.rules import Rule, Subject, Table, same

_EXPERT = "mlp.experts.local_experts.{expert}."
_STACKS = THERE + "mlp.experts."

INTERLEAVED = (
    (".experts.gate_up_proj", ".experts.gate_proj", ".experts.up_proj"),
    (".experts.gate_up_proj_bias", ".experts.gate_proj_bias", ".experts.up_proj_bias"),
)
"""See ``interleaved.py``: the table below knows gates and ups apart."""


def _of_stack(*names: str) -> Rule:
    """Read rows, or biases, that are those of an expert in stacks [experts, in, out], one stack behind the other."""

    def parts(own: Subject) -> list[Part]:
        expert, rows, others = int(own.numbers["expert"]), own.size[0] // len(names), tuple(own.size[1:])
        begin = (expert, *(0 for _ in own.size))
        return [
            Part((index * rows, *own.start[1:]), (rows, *others), own.source(name), begin, bool(others))
            for index, name in enumerate(names)
        ]

    return parts


def _table() -> Table:
    rules: dict[str, Rule] = {
        **OUTSIDE,
        **attention(("weight", "bias")),
        LAYER + "self_attention.linear_proj.bias": same(THERE + "self_attn.o_proj.bias"),
        LAYER + "self_attention.core_attention.softmax_offset": same(THERE + "self_attn.sinks"),
    }
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        rules |= {
            LAYER + f"mlp.router.{kind}": same(THERE + f"mlp.router.{kind}"),
            LAYER + _EXPERT + f"linear_fc1.{kind}": _of_stack(
                *(_STACKS + f"{half}_proj{suffix}" for half in ("gate", "up"))
            ),
            LAYER + _EXPERT + f"linear_fc2.{kind}": _of_stack(_STACKS + f"down_proj{suffix}"),
        }
    return rules


TABLE = _table()


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a ``config.json``."""
    if "quantization_config" in config:
        raise NotImplementedError(
            "quantization_config must not be there, got weights in "
            f"{(config['quantization_config'] or {}).get('quant_method', 'fewer bits')}; save the model dequantised, in bf16"
        )
    if config.get("swiglu_alpha", QUICK_SLOPE) != QUICK_SLOPE:
        raise NotImplementedError(f"swiglu_alpha must be {QUICK_SLOPE}, got {config['swiglu_alpha']}")
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    return {
        **plain_settings(config),
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.get("swiglu_limit", 7.0),
        "softmax_type": "learnable",
        "num_moe_experts": config["num_local_experts"],
        "moe_layer_freq": [1] * layers,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
    }


def config(settings: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` of our settings, which may say less than they do."""
    return {
        **llama_config(settings),
        **window_config(settings),
        "hidden_act": "silu",
        "attention_bias": True,
        "intermediate_size": settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"],
        "num_local_experts": settings.get("num_moe_experts"),
        "num_experts_per_tok": settings.get("moe_router_topk"),
        "swiglu_alpha": QUICK_SLOPE,
        "swiglu_limit": settings.get("activation_func_clamp_value"),
    }
