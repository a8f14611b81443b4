"""Messages of components in the words of the command line: settings by their flags."""

from __future__ import annotations

import argparse
import re

_FIELDS = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "fp8_param": "--fp8-param-gather",
    "fp8": "--fp8-format",
    "add_bias_linear=False": "--disable-bias-linear",
    "add_bias_linear": "the bias of linear layers (off: --disable-bias-linear)",
    "bias_activation_fusion": "the fusion of bias and activation (off: --no-bias-gelu-fusion, --no-bias-swiglu-fusion)",
    "activation_func": "the activation",
    "params_dtype": "--bf16",
    "hysteresis": "--hysteresis",
    "bf16=True": "--bf16",
    "fp16=True": "--fp16",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
"""Fields of components whose flags have other names."""


def in_words_of_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """Replace the names of settings in a component's message by the flags that the user types."""
    flags = dict(_FIELDS)
    for action in parser._actions:
        if "_" in action.dest and action.option_strings:
            flags.setdefault(action.dest, action.option_strings[0])
    text = re.sub(r"\b(TransformerConfig|OptimizerConfig|DistributedDataParallelConfig)\.(?=\w)", "", text)
    names = "|".join(re.escape(name) for name in sorted(flags, key=len, reverse=True))
    text = re.sub(rf"(?<![\w./-])({names})(?![\w/])", lambda match: flags[match[1]], text)
    off = {action.option_strings[0] for action in parser._actions if action.const is False and action.option_strings}
    text = re.sub(
        r"(--[\w-]+) must be True, got False",
        lambda match: f"{match[1]} is not served" if match[1] in off else match[0],
        text,
    )
    return re.sub(r"(--[\w-]+)=('?)([\w-]+)\2", r"\1 \3", text)
