"""Pipeline parallelism: schedules, communication between stages, and their execution."""

from megatron.core.pipeline_parallel.interleaved_pipeline import InterleavedPipeline, StagePipeline
from megatron.core.pipeline_parallel.interleaved_schedule import (
    check_microbatches,
    interleaved_forwards_only,
    interleaved_one_forward_one_backward,
)
from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator, PipelineStage, hidden_shape
from megatron.core.pipeline_parallel.pipeline import Pipeline, StageComputation
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_schedules import forwards_only, one_forward_one_backward

__all__ = [
    "InterleavedPipeline",
    "Pipeline",
    "PipelineCommunicator",
    "PipelineStage",
    "StageComputation",
    "StagePipeline",
    "check_microbatches",
    "forwards_only",
    "get_forward_backward_func",
    "hidden_shape",
    "interleaved_forwards_only",
    "interleaved_one_forward_one_backward",
    "one_forward_one_backward",
]
