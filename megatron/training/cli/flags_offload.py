"""Flags of what lies in the host's memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES

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


def add_offload_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("offloading to the host's memory")
    group.add_argument(
        "--optimizer-cpu-offload",
        action="store_true",
        help="keep Adam's state and fp32 main weights in the host's memory, and update them there",
    )
    group.add_argument(
        "--optimizer-offload-fraction",
        type=float,
        default=1.0,
        help="fraction of the parameters whose state is there, by whole units from the last one on (default: 1)",
    )
    group.add_argument(
        "--overlap-cpu-optimizer-d2h-h2d",
        action="store_true",
        help="updates on the host run beside the next forward; each unit waits for its own",
    )
    for what, place in {"grads": "gradients are copied to", "params": "main weights are copied from"}.items():
        group.add_argument(
            f"--no-pin-cpu-{what}",
            dest=f"pin_cpu_{what}",
            action="store_false",
            help=f"{place} pageable memory of the host, which takes the host's time",
        )

    _add_activation_flags(group)


def _add_activation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cpu-offloading-num-layers",
        type=int,
        default=0,
        help="layers, from the first one on, whose activations rest in the host's memory (default: 0)",
    )
    group.add_argument(
        "--fine-grained-activation-offloading",
        action="store_true",
        help="what --offload-modules save for backward rests in the host's memory",
    )
    group.add_argument(
        "--offload-modules",
        nargs="+",
        default=[],
        help=f"modules of each layer: {', '.join(OFFLOAD_MODULES)} (the last two are all of the experts)",
    )
    group.add_argument(
        "--min-offloaded-tensor-size",
        type=int,
        default=1024 * 1024,
        help="elements; smaller activations stay on the device (default: 1048576)",
    )
    group.add_argument(
        "--activation-offload-fraction",
        type=float,
        default=1.0,
        help="fraction of these modules that offload, from the first layer on (default: 1)",
    )
    group.add_argument(
        "--fine-grained-offloading-max-inflight-offloads",
        type=int,
        help="layers whose activations may be on the device while they are copied (default: 1)",
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
