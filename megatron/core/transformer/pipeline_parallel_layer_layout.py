"""The layers of each pipeline stage, written as a string or as lists.

In a string the stages are separated by ``|``. The layers of a stage are letters: ``E`` the embedding, ``t`` a transformer
layer, ``m`` a layer of multi-token prediction, ``L`` the output layer with its loss. ``x*3`` repeats a letter, ``(...)*3`` what
is in the parentheses, also across stages; commas and spaces may be put anywhere. Of ``p`` ranks with ``v`` stages each, the stages are numbered
as the layers run: stage ``i`` is virtual stage ``i // p`` of rank ``i % p``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron.core.transformer.enums import LayerType

_OF_LETTERS = {"E": LayerType.embedding, "t": LayerType.decoder, "m": LayerType.mtp, "L": LayerType.loss}
_REPEATED_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d+)")


class PipelineParallelLayerLayout:
    """The layers of each stage of a pipeline.

    Args:
        layout: a string of the module's grammar, or a list [stages] of lists of ``LayerType`` or their names.
        pipeline_model_parallel_size: ranks of a pipeline.

    Attributes:
        layout: [ranks, virtual stages] lists of ``LayerType``.
        flatten_layout: all layers in the order in which they run.

    Raises:
        ValueError: ``layout`` does not follow the grammar, or the ranks do not divide its stages.

    Source: Megatron-Core's class of this name (grammar, signatures).
    """

    def __init__(self, layout: str | Sequence[Any], pipeline_model_parallel_size: int) -> None:
        self.input_data = layout
        stages = self.parse_str_to_list(layout) if isinstance(layout, str) else _converted(layout)
        size = pipeline_model_parallel_size
        if size < 1 or len(stages) % size != 0:
            raise ValueError(
                "pipeline_model_parallel_layout must have a multiple of pipeline_model_parallel_size stages, got "
                f"{len(stages)} stages in {layout!r} and {size} ranks"
            )
        self.pipeline_model_parallel_size = size
        self.virtual_pipeline_model_parallel_size = len(stages) // size
        self.layout = [stages[rank::size] for rank in range(size)]
        self.flatten_layout = [layer for stage in stages for layer in stage]

    @property
    def stages(self) -> list[list[LayerType]]:
        """The layers of each stage, in the order in which they run."""
        size = self.virtual_pipeline_model_parallel_size
        return [row[virtual] for virtual in range(size) for row in self.layout]

    def __repr__(self) -> str:
        return str(self.input_data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineParallelLayerLayout) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash(tuple(map(tuple, self.stages)))

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Check the layout of a model, and return whether its layers of multi-token prediction are apart from the loss.

        Raises:
            ValueError: it is not the layout of such a model.
        """
        layers, stages = self.flatten_layout, self.stages
        problems = {
            "begin with its one embedding (E)": layers[:1] == [LayerType.embedding]
            and layers.count(LayerType.embedding) == 1,
            "end with its one loss (L)": layers[-1:] == [LayerType.loss] and layers.count(LayerType.loss) == 1,
            f"have num_layers ({num_layers}) transformer layers (t)": layers.count(LayerType.decoder) == num_layers,
            f"have mtp_num_layers ({mtp_num_layers}) layers of multi-token prediction (m)": layers.count(LayerType.mtp)
            == (mtp_num_layers or 0),
            "have no encoder layers": LayerType.encoder not in layers,
            "have its layers m in one stage": sum(LayerType.mtp in stage for stage in stages) <= 1,
            "have its layers m behind all t": LayerType.mtp not in layers
            or LayerType.decoder not in layers[layers.index(LayerType.mtp) :],
            "have its layers m in the last virtual stage of a rank, and not on the first rank": len(stages) == 1
            or not any(
                LayerType.mtp in stage for stage in (*self.layout[0], *stages[: -self.pipeline_model_parallel_size])
            ),
        }
        if wrong := [must for must, holds in problems.items() if not holds]:
            raise ValueError(f"pipeline_model_parallel_layout must {'; '.join(wrong)}, got {self}")
        return LayerType.mtp in layers and LayerType.mtp not in stages[-1]

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a kind on a stage; None: the first virtual stage, this rank's stages."""
        return self.layout[_rank(pp_rank)][vp_stage or 0].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a kind on all stages before this one."""
        index = (vp_stage or 0) * self.pipeline_model_parallel_size + _rank(pp_rank)
        return sum(stage.count(layer_type) for stage in self.stages[:index])

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Return the indices, in the whole model, of the layers of a kind on a stage."""
        first = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(first, first + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def pretty_repr(self) -> str:
        """Return a table of the layers: a line for each rank, a column for each of its virtual stages."""
        header = ["", *(f"VPP rank {virtual}" for virtual in range(self.virtual_pipeline_model_parallel_size))]
        rows = [header, *([f"PP rank {rank}", *map(_in_words, row)] for rank, row in enumerate(self.layout))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    @staticmethod
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """Return the layout of a string."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Return the number of stages, of all ranks together."""
        return len(PipelineParallelLayerLayout.parse_str_to_list(layout))

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """Return the layers of each stage.

        Raises:
            ValueError: the string does not follow the grammar.
        """
        text = layout_str.replace(",", "").replace(" ", "")
        for repeated in (_REPEATED_GROUP, _REPEATED_LETTER):
            text = repeated.sub(lambda found: found.group(1) * int(found.group(2)), text)
        if wrong := sorted(set(text) - {*_OF_LETTERS, "|"}):
            raise ValueError(
                "pipeline_model_parallel_layout must be made of E, t, m, L, |, (...)*n and x*n, with no parentheses in others, "
                f"got {layout_str!r} with {' '.join(wrong)}"
            )
        return [[_OF_LETTERS[letter] for letter in stage] for stage in text.split("|")]


def _converted(layout: Sequence[Any]) -> list[list[LayerType]]:
    if not all(isinstance(stage, list | tuple) for stage in layout):
        raise ValueError(f"pipeline_model_parallel_layout must be a string or a list of lists, got {layout!r}")
    return [[_layer_type(layer, layout) for layer in stage] for stage in layout]


def _layer_type(layer: Any, layout: Sequence[Any]) -> LayerType:
    if isinstance(layer, LayerType):
        return layer
    if isinstance(layer, str) and (name := layer.strip().lower()) in LayerType.__members__:
        return LayerType[name]
    raise ValueError(
        f"layers of pipeline_model_parallel_layout must be of {', '.join(LayerType.__members__)}, got {layer!r} in {layout!r}"
    )


def _in_words(stage: Sequence[LayerType]) -> str:
    runs = [(layer.name, len(list(same))) for layer, same in groupby(stage)]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs) or "(empty stage)"


def this_rank() -> int:
    """Return this rank's index in the pipeline of ``parallel_state``, which imports configurations itself."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank

    rank: int = get_pipeline_model_parallel_rank()
    return rank


def _rank(pp_rank: int | None) -> int:
    return this_rank() if pp_rank is None else pp_rank
