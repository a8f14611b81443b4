"""Which layers of a model a pipeline stage has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.parallel_state import get_pipeline_model_parallel_rank

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def layers_of_stage(num_layers: int, *, num_stages: int, stage: int) -> range:
    """Return the indices, in the whole model, of the layers of a pipeline stage; all stages have the same number.

    Raises:
        ValueError: ``num_layers`` is not a multiple of ``num_stages``.

    Ranks: pure.
    """
    if num_layers % num_stages != 0:
        raise ValueError(
            f"num_layers must be a multiple of the pipeline stages (pipeline_model_parallel_size), got {num_layers} layers "
            f"and {num_stages} stages"
        )
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the number of layers of a pipeline stage; ``pp_rank`` None: this rank's, though all have the same."""
    return len(_stage_of(config, vp_stage, pp_rank))


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the index, in the whole model, of a pipeline stage's first layer; ``pp_rank`` None: this rank's stage."""
    return _stage_of(config, vp_stage, pp_rank).start


def _stage_of(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> range:
    if vp_stage is not None:
        raise NotImplementedError(f"vp_stage={vp_stage!r} is not served: a rank has one stage of a pipeline")
    stages = config.pipeline_model_parallel_size
    if pp_rank is None:
        pp_rank = get_pipeline_model_parallel_rank() if stages > 1 else 0
    return layers_of_stage(config.num_layers, num_stages=stages, stage=pp_rank)
