"""Flags of the split of the model over ranks; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.core.rank_grid import RankGrid


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    """Add the degrees of parallelism."""
    group = parser.add_argument_group("split of the model")
    group.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help="ranks that split each matrix (default: 1)"
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split the sequence over the tensor-parallel ranks between split matrices (no effect with one rank, as in "
        "Megatron-LM)",
    )
    group.add_argument(
        "--context-parallel-size", type=int, default=1, help="ranks that split each sequence (default: 1)"
    )
    group.add_argument(
        "--cp-comm-type",
        nargs="+",
        choices=["p2p", "all_gather", "a2a", "a2a+p2p"],
        default=["p2p"],
        help="how attention gets the keys of other ranks: a ring (p2p), a gather (all_gather), or an exchange of heads "
        ""
        "(a2a; a2a+p2p is taken as p2p); one, or one for each layer (default: p2p)",
    )
    group.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help="stages of consecutive layers (default: 1)"
    )
    group.add_argument(
        "--expert-model-parallel-size", type=int, default=1, help="ranks that divide a layer's experts (default: 1)"
    )
    group.add_argument(
        "--expert-tensor-parallel-size",
        type=int,
        help="ranks that split each expert's matrices (default: --tensor-model-parallel-size)",
    )
    group.add_argument(
        "--use-tp-pp-dp-mapping",
        action="store_true",
        help="order ranks tp-cp-ep-pp-dp, so that pipeline stages are closer neighbours than data-parallel ranks (default: "
        "tp-cp-ep-dp-pp)",
    )


def parallel_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` for the split of the model."""
    comm_types = None if args.cp_comm_type == ["p2p"] else args.cp_comm_type
    return {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "sequence_parallel": args.sequence_parallel and args.tensor_model_parallel_size > 1,
        "context_parallel_size": args.context_parallel_size,
        "cp_comm_type": comm_types[0] if comm_types and len(comm_types) == 1 else comm_types,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
    }


def rank_grid(args: argparse.Namespace, *, world_size: int) -> RankGrid:
    """Build the grid of ranks.

    Raises:
        ValueError: the degrees do not divide the number of ranks; the message shows the arithmetic.
    """
    return RankGrid(
        world_size=world_size,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
