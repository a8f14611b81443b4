"""Flags of what lies in the host's memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

OPTIMIZER_OFFLOAD = {
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
}
"""Settings of ``--optimizer-cpu-offload``, with their defaults."""


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


def optimizer_offload_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for an ``OptimizerConfig``."""
    return {name: getattr(args, name) for name in ("optimizer_cpu_offload", *OPTIMIZER_OFFLOAD)}
