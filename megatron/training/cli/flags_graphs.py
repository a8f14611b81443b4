"""Flags of CUDA graphs; names and defaults are Megatron-LM's, and only the graph of a whole iteration is served."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.full_cuda_graph import FullCudaGraphConfig
from megatron.training.cli.flag_rows import F, FlagGroup

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")


GRAPH_FLAGS = FlagGroup(
    "CUDA graphs",
    F(
        "--cuda-graph-impl",
        "full_iteration: replay forward, backward, reductions, clipping and update as one graph",
        choices=IMPLEMENTATIONS,
    ),
    F(
        "--cuda-graph-scope",
        "full_iteration, with --cuda-graph-impl local: the older spelling of --cuda-graph-impl full_iteration",
        dest="cuda_graph_scope",
    ),
    F("--cuda-graph-warmup-steps", "eager steps before the capture, at least 2"),
)


def captures_iterations(args: Namespace) -> bool:
    """Return whether the flags ask for a graph of the whole iteration, in either spelling."""
    whole = ["full_iteration"]
    spellings = (("full_iteration", None), ("full_iteration", whole), ("local", whole))
    return (args.cuda_graph_impl, args.cuda_graph_scope) in spellings


def full_cuda_graph_config(args: Namespace) -> FullCudaGraphConfig:
    """Map the flags of CUDA graphs."""
    return FullCudaGraphConfig(enabled=captures_iterations(args), warmup_steps=args.cuda_graph_warmup_steps)
