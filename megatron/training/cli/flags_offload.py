"""Flags of what lies in the host's memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES
from megatron.training.cli.flag_rows import F, FlagGroup

_OPTIMIZER_OFFLOAD = (
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)
_ACTIVATION_OFFLOAD = (
    "fine_grained_activation_offloading",
    "offload_modules",
    "min_offloaded_tensor_size",
    "activation_offload_fraction",
    "fine_grained_offloading_max_inflight_offloads",
)


OFFLOAD_FLAGS = FlagGroup(
    "offloading to the host's memory",
    F("--optimizer-cpu-offload", "keep Adam's state and fp32 main weights in the host's memory, and update them there"),
    F(
        "--optimizer-offload-fraction",
        "fraction of the parameters whose state is there, by whole units from the last one on (default: 1)",
    ),
    F(
        "--overlap-cpu-optimizer-d2h-h2d",
        "updates on the host run beside the next forward; each unit waits for its own",
    ),
    F("--no-pin-cpu-grads", "gradients are copied to pageable memory of the host, which takes the host's time"),
    F("--no-pin-cpu-params", "main weights are copied from pageable memory of the host, which takes the host's time"),
    F("--cpu-offloading-num-layers", "layers, from the first one on, whose activations rest in the host's memory"),
    F("--fine-grained-activation-offloading", "what --offload-modules save for backward rests in the host's memory"),
    F(
        "--offload-modules",
        f"modules of each layer: {', '.join(OFFLOAD_MODULES)} (the last two are all of the experts)",
    ),
    F("--min-offloaded-tensor-size", "elements; smaller activations stay on the device"),
    F("--activation-offload-fraction", "fraction of these modules that offload, from the first layer on (default: 1)"),
    F(
        "--fine-grained-offloading-max-inflight-offloads",
        "layers whose activations may be on the device while they are copied (default: 1)",
    ),
)


def activation_offload_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for a ``TransformerConfig``."""
    num_layers = args.cpu_offloading_num_layers
    return {
        "cpu_offloading": num_layers > 0,
        "cpu_offloading_num_layers": num_layers,
        **{name: getattr(args, name) for name in _ACTIVATION_OFFLOAD},
    }


def optimizer_offload_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for an ``OptimizerConfig``."""
    return {name: getattr(args, name) for name in _OPTIMIZER_OFFLOAD}
