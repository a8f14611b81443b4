"""Flags of what lies in the host's memory; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES
from megatron.training.cli.flag_rows import F, FlagGroup

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
