"""Flags of the split of the model over ranks; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.core.pipeline_parallel import check_microbatches
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.data.batches import BatchConfig

PARALLEL_FLAGS = FlagGroup(
    "split of the model",
    F("--tensor-model-parallel-size", "ranks that split each matrix"),
    F(
        "--sequence-parallel",
        "split the sequence over the tensor-parallel ranks between split matrices (no effect with one "
        "rank, as in Megatron-LM)",
    ),
    F("--context-parallel-size", "ranks that split each sequence"),
    F(
        "--cp-comm-type",
        "how attention gets the keys of other ranks: a ring (p2p), a gather (all_gather), or an exchange "
        "of heads (a2a; a2a+p2p is taken as p2p); one, or one for each layer (default: p2p)",
        choices=["p2p", "all_gather", "a2a", "a2a+p2p"],
    ),
    F("--pipeline-model-parallel-size", "ranks that divide the layers"),
    F(
        "--num-layers-per-virtual-pipeline-stage",
        "each rank has several stages of so many layers, which take turns (interleaved 1F1B)",
    ),
    F("--num-virtual-stages-per-pipeline-rank", "each rank has so many stages, which take turns (interleaved 1F1B)"),
    F(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "microbatches that a virtual stage runs in a row (default: --pipeline-model-parallel-size)",
    ),
    F("--no-overlap-p2p-communication", "wait for each message between virtual stages before the computation goes on"),
    F("--decoder-first-pipeline-num-layers", "layers of the first pipeline rank (default: as many as the others)"),
    F("--decoder-last-pipeline-num-layers", "layers of the last pipeline rank (default: as many as the others)"),
    F("--account-for-embedding-in-pipeline-split", "the embedding counts as a layer: the first stage has one fewer"),
    F("--account-for-loss-in-pipeline-split", "the output layer counts as a layer: the last stage has one fewer"),
    F(
        "--pipeline-model-parallel-layout",
        "the layers of all stages, as a string (docs/splitting_the_model.md has its grammar); more "
        "stages than ranks are virtual stages",
    ),
    F("--expert-model-parallel-size", "ranks that divide a layer's experts"),
    F(
        "--expert-tensor-parallel-size",
        "ranks that split each expert's matrices (default: --tensor-model-parallel-size)",
    ),
    F(
        "--use-tp-pp-dp-mapping",
        "order ranks tp-cp-ep-pp-dp, so that pipeline stages are closer neighbours than data-parallel "
        "ranks (default: tp-cp-ep-dp-pp)",
    ),
)


def num_virtual_stages(args: argparse.Namespace) -> int | None:
    """Return the stages of each pipeline rank; None: one.

    Raises:
        ValueError: flags contradict each other, or the layers.
    """
    given = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    used = [flag for flag, value in given.items() if value is not None]
    if len(used) > 1:
        raise ValueError(f"one of {', '.join(given)} must be given, got {' and '.join(used)}")
    if args.pipeline_model_parallel_layout is not None:
        return None  # the layout says so itself
    number = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        number = _stages_of_so_many_layers(args)
    return None if number == 1 else number


def _stages_of_so_many_layers(args: argparse.Namespace) -> int:
    per_stage, ranks = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    if args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage must go without --decoder-first-pipeline-num-layers and "
            f"--decoder-last-pipeline-num-layers, got {per_stage}; use --num-virtual-stages-per-pipeline-rank"
        )
    layers = args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if per_stage < 1 or layers % (ranks * per_stage) != 0:
        raise ValueError(
            "--num-layers (and embedding and loss, where they count) must be a multiple of --pipeline-model-parallel-size times "
            f"--num-layers-per-virtual-pipeline-stage, got {layers}, {ranks} and {per_stage}"
        )
    return int(layers // (ranks * per_stage))


def parallel_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` for the split of the model that are not those of the same names."""
    comm_types = None if args.cp_comm_type == ["p2p"] else args.cp_comm_type
    num_virtual = num_virtual_stages(args)
    takes_turns = num_virtual is not None or args.pipeline_model_parallel_layout is not None
    return {
        "cp_comm_type": comm_types[0] if comm_types and len(comm_types) == 1 else comm_types,
        "virtual_pipeline_model_parallel_size": num_virtual,
        "overlap_p2p_comm": args.overlap_p2p_comm and takes_turns,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
    }


def check_stages_are_busy(config: TransformerConfig, batch: BatchConfig) -> None:
    """Check that virtual stages have microbatches enough to take turns, with each global batch size of a run.

    Raises:
        ValueError: they have not.
    """
    ranks = config.pipeline_model_parallel_size
    if (config.virtual_pipeline_model_parallel_size or 1) == 1:
        return
    for batches in (batch, *(batch.at(start) for start, _ in batch.schedule)):
        check_microbatches(
            batches.num_microbatches,
            num_ranks=ranks,
            group_size=config.microbatch_group_size_per_vp_stage or ranks,
        )


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
