"""Pipeline parallelism: schedules, communication between stages, and their execution."""

from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator, PipelineStage, hidden_shape
from megatron.core.pipeline_parallel.pipeline import Pipeline, StageComputation
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_schedules import forwards_only, one_forward_one_backward

__all__ = [
    "Pipeline",
    "PipelineCommunicator",
    "PipelineStage",
    "StageComputation",
    "forwards_only",
    "get_forward_backward_func",
    "hidden_shape",
    "one_forward_one_backward",
]
