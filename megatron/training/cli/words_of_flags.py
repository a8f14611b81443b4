"""Messages of components in the words of the command line: settings by their flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

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
    "add_bias_linear=True": "biases",
    "cpu_offloading": "--cpu-offloading-num-layers",
    "nccl_ub=True": "--use-nccl-ub",
    "use_symm_mem=True": "--use-symm-mem",
    "reduce_scatter_with_fp32_accumulation=True": "--ddp-reduce-scatter-with-fp32-accumulation",
    "param_name_patterns_for_fp32_local_accumulation": "--ddp-param-name-patterns-for-fp32-local-accumulation",
    "store_param_remainders": "--use-precision-aware-optimizer",
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


_PLAIN: tuple[tuple[str, str], ...] = (
    (r"^(--\S+): invalid int value: '(.*)'$", r"\1 must be a whole number, got \2"),
    (r"^(--\S+): invalid float value: '(.*)'$", r"\1 must be a number, got \2"),
    (r"^(--\S+): expected one argument$", r"\1 takes one value, got none"),
    (r"^(--\S+): expected at least one argument$", r"\1 takes at least one value, got none"),
    (r"^(--\S+): expected (\d+) arguments$", r"\1 takes \2 values, got fewer"),
    (r"^(--\S+): invalid choice: '(.*)' \(choose from (.*)\)$", r"\1 must be one of \3, got \2"),
    (r" \(or None[^)]*\)", ""),
    (r"\bgot \['([^'\s]*)'\]", r"got \1"),
    (r"\bgot \[\]", "got none"),
    (r"\bNone\b", "none"),
    (r"(--[\w-]+) True\b", r"\1"),
    (r"\bgot True\b(?!,| and)", "got it on"),
    (r"\bgot False\b(?!,| and)", "got it off"),
    (r"\bTrue\b", "on"),
    (r"\bFalse\b", "off"),
    (r"\btorch\.bfloat16\b", "bf16"),
    (r"\btorch\.float(16|32)\b", r"fp\1"),
    (r"\btorch\.uint8\b", "fp8"),
    (r"'([\w+./-]+)'", r"\1"),
)
"""What Python writes, and what users read."""


def in_plain_words(fault: str) -> str:
    """Write values as they are typed: no quotes, no None, and switches on or off."""
    for pattern, plain in _PLAIN:
        fault = re.sub(pattern, plain, fault)
    return re.sub(r"\bgot \[([^\[\])]*)\]", lambda match: "got " + match[1].replace(",", ""), fault)


def in_few_lines(faults: Sequence[str]) -> str:
    """Join all reasons why a run does not start in three lines at most; flags that are refused for the same reason come together."""
    flags: dict[str, list[str]] = {}
    for fault in faults:
        refused = re.fullmatch(r"(--\S+) is refused: (.*)", fault)
        flags.setdefault(refused[2] if refused else fault, []).extend([refused[1]] if refused else [])
    reasons = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused: {reason}" if names else reason
        for reason, names in flags.items()
    ]
    if len(reasons) <= 3:
        return "\n".join(reasons)
    numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
    return f"{len(reasons)} reasons: {numbered}\ntools/check_launch.py prints each on a line of its own"
