"""Flags of ranks and sharding; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse

from megatron.core.distributed.fsdp import TRANSPORT_KINDS
from megatron.training.cli.flag_rows import F, FlagGroup

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER_STRATEGIES = ("no_shard", "optim")
DTYPES = ("fp32", "bf16", "fp16", "auto")


# "auto" is replaced by the default once the line is read.
def _bytes_or_fraction(text: str) -> int | float | str:
    try:
        return text if text == "auto" else float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be bytes, a fraction, or auto, got {text}") from None


def _whole(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, or auto, got {text}") from None


RANK_FLAGS = FlagGroup(
    "ranks",
    F(
        "--distributed-backend",
        "nccl trains on CUDA devices, gloo on CPUs (default: nccl if there are CUDA devices)",
        default=None,
    ),
    F("--distributed-timeout-minutes", "minutes until a missing rank is an error"),
    F("--create-all-gather-group", "gather weights on a separate communicator, so that gathers overlap reductions"),
    F("--use-sharp", "use SHARP switches for the reductions of one process group: only its communicator gets CollNet"),
    F(
        "--sharp-enabled-group",
        "the process group for --use-sharp: dp (the ranks over which weights are sharded) or dp_replica "
        "(the replicas of the sharded state) (default: dp)",
    ),
    F(
        "--nccl-communicator-config-path",
        "a YAML file with NCCL communicator options by process group, such as dp_cp: {max_ctas: 8}",
        metavar="FILE",
    ),
)


TRANSPORT_FLAGS = FlagGroup(
    "transport",
    F(
        "--fsdp-transport",
        "what moves bytes between ranks: "
        + ", ".join(f"{kind} ({summary})" for kind, summary in TRANSPORT_KINDS.items())
        + " (default: auto)",
        default="auto",
        choices=list(TRANSPORT_KINDS),
    ),
    F("--use-nccl-ub", "NCCL symmetric memory: --fsdp-transport symm"),
    F("--use-symm-mem", "NCCL symmetric memory: --fsdp-transport symm"),
    F("--disable-symmetric-registration", "do not register memory with NCCL: auto selects --fsdp-transport nccl"),
    F(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "accumulate in fp32 when gradients are communicated in bf16 or fp16: --fsdp-transport peer_copy on GPUs",
    ),
)


SHARDING_FLAGS = FlagGroup(
    "sharding",
    F("--use-megatron-fsdp", "shard by --data-parallel-sharding-strategy"),
    F("--data-parallel-sharding-strategy", "what --use-megatron-fsdp shards", choices=STRATEGIES),
    F(
        "--num-distributed-optimizer-instances",
        "hybrid sharding: number of replicas of the sharded state, each over a part of the data-parallel ranks",
    ),
    F(
        "--outer-dp-sharding-strategy",
        "what is sharded over the replicas too: nothing, or the optimizer state",
        choices=OUTER_STRATEGIES,
    ),
    F(
        "--use-distributed-optimizer",
        "shard optimizer state; with --use-megatron-fsdp the strategy decides what is sharded",
    ),
    F("--use-torch-fsdp2", "taken as --use-megatron-fsdp, which shards weights as FSDP2 does"),
    F(
        "--torch-fsdp2-no-reshard-after-forward",
        "with --use-torch-fsdp2, taken as --data-parallel-sharding-strategy optim_grads",
    ),
    F("--overlap-grad-reduce", "reduce gradients during backward (always with optim_grads and optim_grads_params)"),
    F("--overlap-param-gather", "prefetch weights while the model computes (always with optim_grads_params)"),
    F("--no-overlap-grad-reduce", "wait for each gradient reduction, for every strategy"),
    F("--no-overlap-param-gather", "gather each unit's weights only when they are needed, for every strategy"),
    F(
        "--fsdp-all-gather-in-start-param-sync",
        "gather the first unit's weights right after the optimizer's step (default: yes, unless "
        "iterations are captured in a CUDA graph)",
        default=None,
    ),
    F(
        "--no-fsdp-all-gather-in-start-param-sync",
        "gather the first unit's weights in the next forward",
        dest="fsdp_all_gather_in_start_param_sync",
        default=None,
        const=False,
    ),
    F("--megatron-fsdp-main-params-dtype", "dtype of main weights", choices=DTYPES),
    F(
        "--megatron-fsdp-main-grads-dtype",
        "dtype of main gradients; auto: fp32, or the compute dtype with --grad-reduce-in-bf16",
        choices=DTYPES,
    ),
    F(
        "--megatron-fsdp-grad-comm-dtype",
        "dtype in which gradients are communicated; auto: that of main gradients, or fp16 with --fp16",
        choices=DTYPES,
    ),
    F(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "parameters whose gradients must be accumulated in fp32; --megatron-fsdp-main-grads-dtype must be fp32",
        metavar="PATTERN",
    ),
    F("--grad-reduce-in-bf16", "keep and reduce gradients in the compute dtype"),
    F("--accumulate-allreduce-grads-in-fp32", "keep and reduce gradients in fp32"),
    F("--init-model-with-meta-device", "create weights unit by unit, already sharded"),
    F(
        "--fsdp-memory-budget",
        "memory for weights that stay gathered between forward and backward: bytes, or a fraction of the "
        "device's, or auto with --fsdp-tune (default: none)",
        type=_bytes_or_fraction,
    ),
    F(
        "--fsdp-debug",
        "fill released memory with NaN, name weights that are read after their release, compare each "
        "collective between ranks, and name the first gradient or weight that is not finite; slow",
    ),
    F(
        "--fsdp-forward-prefetch-depth",
        "units whose weights are gathered ahead in forward; 0 gathers each when it is needed; auto with --fsdp-tune",
        type=_whole,
        default=1,
    ),
    F(
        "--fsdp-backward-prefetch-depth",
        "units whose weights are gathered ahead in backward; auto with --fsdp-tune",
        type=_whole,
        default=1,
    ),
    F(
        "--fsdp-layers-per-unit",
        "consecutive layers whose weights are gathered, and whose gradients are reduced, together: less "
        "work for the host, which small layers wait for, and more memory",
        type=int,
        default=1,
    ),
    F(
        "--suggested-communication-unit-size",
        "gather units ahead, beyond the prefetch depth, until weights of this many elements are in "
        "flight; auto with --fsdp-tune",
        type=_whole,
    ),
)
