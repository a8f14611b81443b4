"""Megatron-Core's import path of the optimizer's step as a CUDA graph."""

from megatron.core.elsewhere import elsewhere

OptimizerCudaGraphWrapper = elsewhere(
    __name__,
    "OptimizerCudaGraphWrapper",
    "megatron.core.full_cuda_graph.FullCudaGraph captures the optimizer's step with the iteration",
)

__all__ = ["OptimizerCudaGraphWrapper"]
