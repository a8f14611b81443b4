"""Flags of ranks and sharding; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse

from megatron.core.distributed.fsdp import TRANSPORT_KINDS

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER_STRATEGIES = ("no_shard", "optim")
DTYPES = ("fp32", "bf16", "fp16", "auto")


def add_distributed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of process groups and of the sharding engine."""
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--distributed-backend",
        choices=["nccl", "gloo"],
        help="nccl trains on CUDA devices, gloo on CPUs (default: nccl if there are CUDA devices)",
    )
    group.add_argument(
        "--distributed-timeout-minutes",
        type=int,
        default=10,
        help="minutes until a missing rank is an error (default: 10)",
    )
    group.add_argument(
        "--create-all-gather-group",
        action="store_true",
        help="gather weights on a separate communicator, so that gathers overlap reductions",
    )
    group.add_argument(
        "--use-sharp",
        action="store_true",
        help="use SHARP switches for the reductions of one process group: only its communicator gets CollNet",
    )
    group.add_argument(
        "--sharp-enabled-group",
        choices=["dp", "dp_replica"],
        help="the process group for --use-sharp: dp (the ranks over which weights are sharded) or dp_replica (the replicas of the "
        "sharded state) (default: dp)",
    )
    group.add_argument(
        "--nccl-communicator-config-path",
        metavar="FILE",
        help="a YAML file with NCCL communicator options by process group, such as dp_cp: {max_ctas: 8}",
    )
    _add_transport_flags(parser.add_argument_group("transport"))
    _add_sharding_flags(parser.add_argument_group("sharding"))


def _add_transport_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fsdp-transport",
        choices=list(TRANSPORT_KINDS),
        default="auto",
        help="what moves bytes between ranks: "
        + ", ".join(f"{kind} ({summary})" for kind, summary in TRANSPORT_KINDS.items())
        + " (default: auto)",
    )
    for flag, dest in (("--use-nccl-ub", "nccl_ub"), ("--use-symm-mem", "use_symm_mem")):
        group.add_argument(flag, dest=dest, action="store_true", help="NCCL symmetric memory: --fsdp-transport symm")

    group.add_argument(
        "--disable-symmetric-registration",
        action="store_true",
        help="do not register memory with NCCL: auto selects --fsdp-transport nccl",
    )
    group.add_argument(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        action="store_true",
        help="accumulate in fp32 when gradients are communicated in bf16 or fp16: --fsdp-transport peer_copy on GPUs",
    )


def _add_sharding_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--use-megatron-fsdp", action="store_true", help="shard by --data-parallel-sharding-strategy")
    group.add_argument(
        "--data-parallel-sharding-strategy",
        choices=STRATEGIES,
        default="optim_grads_params",
        help="what --use-megatron-fsdp shards (default: optim_grads_params)",
    )
    group.add_argument(
        "--num-distributed-optimizer-instances",
        type=int,
        default=1,
        help="hybrid sharding: number of replicas of the sharded state, each over a part of the data-parallel ranks "
        "(default: 1)",
    )
    group.add_argument(
        "--outer-dp-sharding-strategy",
        choices=OUTER_STRATEGIES,
        default="no_shard",
        help="what is sharded over the replicas too: nothing, or the optimizer state (default: no_shard)",
    )
    group.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="shard optimizer state; with --use-megatron-fsdp the strategy decides what is sharded",
    )
    group.add_argument(
        "--use-torch-fsdp2",
        action="store_true",
        help="taken as --use-megatron-fsdp, which shards weights as FSDP2 does",
    )
    group.add_argument(
        "--torch-fsdp2-no-reshard-after-forward",
        dest="torch_fsdp2_reshard_after_forward",
        action="store_false",
        help="with --use-torch-fsdp2, taken as --data-parallel-sharding-strategy optim_grads",
    )
    group.add_argument(
        "--overlap-grad-reduce",
        action="store_true",
        help="reduce gradients during backward (always with optim_grads and optim_grads_params)",
    )
    group.add_argument(
        "--overlap-param-gather",
        action="store_true",
        help="prefetch weights while the model computes (always with optim_grads_params)",
    )
    group.add_argument(
        "--no-overlap-grad-reduce", action="store_true", help="wait for each gradient reduction, for every strategy"
    )
    group.add_argument(
        "--no-overlap-param-gather",
        action="store_true",
        help="gather each unit's weights only when they are needed, for every strategy",
    )
    dest = "fsdp_all_gather_in_start_param_sync"
    group.add_argument(
        "--fsdp-all-gather-in-start-param-sync",
        dest=dest,
        action="store_true",
        default=None,
        help="gather the first unit's weights right after the optimizer's step (default: yes, unless iterations are captured in a "
        "CUDA graph)",
    )
    group.add_argument(
        "--no-fsdp-all-gather-in-start-param-sync",
        dest=dest,
        action="store_false",
        default=None,
        help="gather the first unit's weights in the next forward",
    )
    group.add_argument(
        "--megatron-fsdp-main-params-dtype",
        choices=DTYPES,
        default="fp32",
        help="dtype of main weights (default: fp32)",
    )
    group.add_argument(
        "--megatron-fsdp-main-grads-dtype",
        choices=DTYPES,
        default="auto",
        help="dtype of main gradients; auto: fp32, or the compute dtype with --grad-reduce-in-bf16 (default: auto)",
    )
    group.add_argument(
        "--megatron-fsdp-grad-comm-dtype",
        choices=DTYPES,
        default="auto",
        help="dtype in which gradients are communicated; auto: that of main gradients, or fp16 with --fp16 (default: auto)",
    )
    group.add_argument(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="parameters whose gradients must be accumulated in fp32; --megatron-fsdp-main-grads-dtype must be fp32",
    )
    group.add_argument(
        "--grad-reduce-in-bf16", action="store_true", help="keep and reduce gradients in the compute dtype"
    )
    group.add_argument(
        "--accumulate-allreduce-grads-in-fp32", action="store_true", help="keep and reduce gradients in fp32"
    )
    group.add_argument(
        "--init-model-with-meta-device", action="store_true", help="create weights unit by unit, already sharded"
    )
    group.add_argument(
        "--fsdp-memory-budget",
        type=_bytes_or_fraction,
        help="memory for weights that stay gathered between forward and backward: bytes, or a fraction of the device's, or auto "
        "with --fsdp-tune (default: none)",
    )
    group.add_argument(
        "--fsdp-debug",
        action="store_true",
        help="fill released memory with NaN, name weights that are read after their release, compare each collective "
        "between ranks, and name the first gradient or weight that is not finite; slow",
    )
    group.add_argument(
        "--fsdp-forward-prefetch-depth",
        type=_whole,
        default=1,
        help="units whose weights are gathered ahead in forward; 0 gathers each when it is needed; auto with --fsdp-tune (default: 1)",
    )
    group.add_argument(
        "--fsdp-backward-prefetch-depth",
        type=_whole,
        default=1,
        help="units whose weights are gathered ahead in backward; auto with --fsdp-tune (default: 1)",
    )
    group.add_argument(
        "--fsdp-layers-per-unit",
        type=int,
        default=1,
        help="consecutive layers whose weights are gathered, and whose gradients are reduced, together: less work for the host, "
        "which small layers wait for, and more memory (default: 1)",
    )
    group.add_argument(
        "--suggested-communication-unit-size",
        type=_whole,
        help="gather units ahead, beyond the prefetch depth, until weights of this many elements are in flight; auto with --fsdp-tune",
    )


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
