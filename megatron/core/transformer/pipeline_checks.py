"""Checks of how a TransformerConfig divides its layers between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.transformer.pipeline_layers import StageLayers, stages_of
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def problems_of_stages(config: TransformerConfig) -> list[str]:
    """Return the messages of the fields about stages that contradict each other or the number of layers."""
    found = [message.format_map(vars(config)) for holds, message in _CONTRADICTIONS if holds(config)]
    if found:
        return found
    try:
        layout, size = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size
        if layout is not None and not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, config.pipeline_model_parallel_size)
        if layout is not None and (size or layout.virtual_pipeline_model_parallel_size) != (
            layout.virtual_pipeline_model_parallel_size
        ):
            return [
                "virtual_pipeline_model_parallel_size must be that of pipeline_model_parallel_layout, "
                f"{layout.virtual_pipeline_model_parallel_size}, got {size}; leave it out"
            ]
        return _without_layers(stages_of(config), config.pipeline_model_parallel_size)
    except ValueError as error:
        return [str(error)]


def _without_layers(stages: Sequence[StageLayers], num_ranks: int) -> list[str]:
    """Return a message if ranks between the first and the last one, which have embedding and output layer, have no layer."""
    idle = [
        str(rank)
        for rank in range(1, num_ranks - 1)
        if not any(stage.decoder or stage.mtp for stage in stages[rank::num_ranks])
    ]
    if not idle:
        return []
    ranks = f"rank{'s' * (len(idle) > 1)} {' and '.join(idle)}"
    return [
        f"each rank of pipeline_model_parallel_size ({num_ranks}) must have a layer, got none on {ranks}; give it one, or take"
        " fewer ranks"
    ]


def _has_numbers(config: TransformerConfig) -> bool:
    return (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) != (None, None)


def _accounts(config: TransformerConfig) -> bool:
    return config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split


_CONTRADICTIONS = (
    (
        lambda c: c.mtp_num_layers is not None and c.mtp_num_layers < 0,
        "mtp_num_layers must not be negative (0 or None: no multi-token prediction), got {mtp_num_layers}",
    ),
    (
        lambda c: c.virtual_pipeline_model_parallel_size is not None and c.virtual_pipeline_model_parallel_size < 1,
        "virtual_pipeline_model_parallel_size must be at least 1, got {virtual_pipeline_model_parallel_size}",
    ),
    (
        lambda c: (c.virtual_pipeline_model_parallel_size or 1) > 1 and c.pipeline_model_parallel_size == 1,
        "virtual_pipeline_model_parallel_size must go with pipeline_model_parallel_size > 1, got"
        " {virtual_pipeline_model_parallel_size} virtual stages and 1 rank",
    ),
    (
        lambda c: (
            c.microbatch_group_size_per_vp_stage is not None
            and c.microbatch_group_size_per_vp_stage < c.pipeline_model_parallel_size
        ),
        "microbatch_group_size_per_vp_stage must be at least pipeline_model_parallel_size"
        " ({pipeline_model_parallel_size}), got {microbatch_group_size_per_vp_stage}",
    ),
    (
        lambda c: c.pipeline_model_parallel_layout is not None and (_has_numbers(c) or _accounts(c)),
        "pipeline_model_parallel_layout must go without num_layers_in_first_pipeline_stage,"
        " num_layers_in_last_pipeline_stage, account_for_embedding_in_pipeline_split and"
        " account_for_loss_in_pipeline_split, got {pipeline_model_parallel_layout}; it says all of it",
    ),
    (
        lambda c: _has_numbers(c) and _accounts(c),
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage must go without"
        " account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split, got both",
    ),
    (
        lambda c: any(
            number is not None and number < 1
            for number in (c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage)
        ),
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage must be at least 1, got"
        " {num_layers_in_first_pipeline_stage} and {num_layers_in_last_pipeline_stage}",
    ),
)
"""Rows of (condition, message)."""
