"""Which layers of a model a pipeline stage has.

With ``v`` virtual stages on each of ``p`` ranks a model is cut into ``p * v`` stages, numbered as the layers run; stage ``i`` is virtual
stage ``i // p`` of rank ``i % p``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout, this_rank

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The layers of one stage."""

    index: int
    """Its place in the order in which stages run."""

    decoder: range
    """Indices, in the whole model, of its transformer layers."""

    mtp: int = 0
    """Number of its layers of multi-token prediction; one stage has all of them."""

    has_final_norm: bool = False
    """Whether it has the norm behind the last transformer layer."""


def stages_of(config: TransformerConfig, *, num_ranks: int | None = None) -> tuple[StageLayers, ...]:
    """Return the layers of all stages of a model, in the order in which they run; without pipelining, of the one stage.

    Args:
        num_ranks: ranks of a pipeline; None: those of the configuration.

    Raises:
        ValueError: the stages cannot be filled as the configuration says.

    Ranks: pure.
    Source: Megatron-Core's rules for its fields of these names.
    """
    ranks = num_ranks or config.pipeline_model_parallel_size
    layout, mtp = _layout(config, ranks), config.mtp_num_layers or 0
    if layout is not None:
        layout.validate_layer_layout(config.num_layers, mtp)
        numbers = [stage.count(LayerType.decoder) for stage in layout.stages]
        of_mtp = [stage.count(LayerType.mtp) for stage in layout.stages]
    else:
        numbers = _numbers_of_layers(config, ranks)
        of_mtp = [0] * (len(numbers) - 1) + [mtp]
    ends = list(accumulate(numbers))
    # Multi-token prediction, which may be on a stage of its own, starts from what is normalised.
    normed = ends.index(config.num_layers) if mtp else len(numbers) - 1
    return tuple(
        StageLayers(
            index=index,
            decoder=range(end - number, end),
            mtp=count,
            has_final_norm=index == normed,
        )
        for index, (number, end, count) in enumerate(zip(numbers, ends, of_mtp, strict=True))
    )


def wide_messages(config: TransformerConfig) -> dict[str, int]:
    """Return ``wide_from`` and ``width`` of ``PipelineStage``, if multi-token prediction is apart from the loss; else {}.

    Its stage then sends the hidden states of the model and of its own layers to the stages behind it.
    """
    stages = stages_of(config)
    of_mtp = next((stage for stage in stages[:-1] if stage.mtp), None)
    return {} if of_mtp is None else {"wide_from": of_mtp.index + 1, "width": 1 + (config.mtp_num_layers or 0)}


def embedding_ranks(config: TransformerConfig, *, ties: bool) -> tuple[int, ...]:
    """Return the ranks of a pipeline that hold the word embedding or a copy of it; negative ones count from the end.

    Args:
        ties: the output layer uses the embedding's weight.
    """
    of_mtp = next((stage.index for stage in stages_of(config)[:-1] if stage.mtp), None)
    apart = None if of_mtp is None else of_mtp % config.pipeline_model_parallel_size
    if apart in (None, config.pipeline_model_parallel_size - 1):
        return 0, -1
    assert apart is not None
    return (0, apart, -1) if ties else (0, apart)


def stage_of(
    config: TransformerConfig, *, pp_rank: int, vp_stage: int | None, num_ranks: int | None = None
) -> StageLayers:
    """Return the layers of a virtual stage of a rank; ``num_ranks`` as for ``stages_of``.

    Raises:
        ValueError: ``vp_stage`` is None though ranks have several, or it is no stage.
    """
    num_virtual = config.virtual_pipeline_model_parallel_size or 1
    if (vp_stage is None and num_virtual > 1) or not 0 <= (vp_stage or 0) < num_virtual:
        raise ValueError(
            f"vp_stage must be from 0 to {num_virtual - 1} with {num_virtual} virtual stages on each rank, got {vp_stage}"
        )
    ranks = num_ranks or config.pipeline_model_parallel_size
    return stages_of(config, num_ranks=ranks)[(vp_stage or 0) * ranks + pp_rank]


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the number of transformer layers of a pipeline stage; ``pp_rank`` None: this rank's."""
    return len(_decoder_of(config, vp_stage, pp_rank))


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the index, in the whole model, of a pipeline stage's first layer; ``pp_rank`` None: this rank's stage."""
    return _decoder_of(config, vp_stage, pp_rank).start


def get_mtp_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the number of layers of multi-token prediction of a pipeline stage; ``pp_rank`` None: this rank's."""
    return stage_of(config, pp_rank=_rank(config, pp_rank), vp_stage=vp_stage).mtp


def _decoder_of(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> range:
    return stage_of(config, pp_rank=_rank(config, pp_rank), vp_stage=vp_stage).decoder


def _rank(config: TransformerConfig, pp_rank: int | None) -> int:
    if pp_rank is not None:
        return pp_rank
    return this_rank() if config.pipeline_model_parallel_size > 1 else 0


def _layout(config: TransformerConfig, ranks: int) -> PipelineParallelLayerLayout | None:
    given = config.pipeline_model_parallel_layout
    if given is None or isinstance(given, PipelineParallelLayerLayout):
        return given
    return PipelineParallelLayerLayout(given, ranks)


def _numbers_of_layers(config: TransformerConfig, ranks: int) -> list[int]:
    """Return the number of transformer layers of each stage, where no layout says so."""
    num_virtual = config.virtual_pipeline_model_parallel_size or 1
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    before, behind = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    # The embedding and the loss count as layers, of which the first and the last stage then have one fewer.
    left, ranks_left = config.num_layers + before + behind, ranks
    for own in (first, last):
        if own is not None:
            left, ranks_left = left - own, ranks_left - 1
    if ranks_left < 0 or left < 0 or (left % ranks_left if ranks_left else left):
        raise ValueError(_uneven(config, ranks, left, ranks_left))
    per_rank = [left // ranks_left if ranks_left else 0] * ranks
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    if uneven := [number for number in per_rank if number % num_virtual]:
        raise ValueError(
            "the layers of each pipeline rank must be a multiple of virtual_pipeline_model_parallel_size, got "
            f"{uneven[0]} layers and {num_virtual} virtual stages"
        )
    numbers = [number // num_virtual for number in per_rank] * num_virtual
    numbers[0] -= before
    numbers[-1] -= behind
    if min(numbers) < 0:
        raise ValueError("the first and the last pipeline stage must have room for embedding and loss, got 0 layers")
    return numbers


def _uneven(config: TransformerConfig, ranks: int, left: int, ranks_left: int) -> str:
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    counted = [
        name
        for name, counts in (
            ("embedding", config.account_for_embedding_in_pipeline_split),
            ("loss", config.account_for_loss_in_pipeline_split),
        )
        if counts
    ]
    what = f"{config.num_layers} layers" + (f" with {' and '.join(counted)} as layers" if counted else "")
    if first is None and last is None:
        return (
            "num_layers must be a multiple of the pipeline stages (pipeline_model_parallel_size), got "
            f"{what} and {ranks} stages; give num_layers_in_first_pipeline_stage, "
            "num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
        )
    return (
        "the layers that num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage leave must be a multiple of "
        f"the other pipeline ranks, got {left} of {what} for {ranks_left} ranks"
    )
