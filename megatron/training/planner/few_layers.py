"""Models of few layers from which a whole one is drawn out: each further layer, or each further turn of a pattern, costs what the last one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

# Layers of each stage, where all are alike.
_FEW, _MORE = 2, 3
# Settings that say layer by layer, or for every so-manieth layer, of which kind it is, and their flags.
_BY_LAYER = {
    "moe_layer_freq": "--moe-layer-freq",
    "linear_attention_freq": "--linear-attention-freq",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "no_rope_freq": "--no-rope-freq",
}


@dataclass(frozen=True, kw_only=True)
class FewLayers:
    """Two smaller models.

    Attributes:
        few: flags of the smaller one.
        more: flags of the larger one.
        further: the whole model is ``few``, and so many times what ``more`` has besides.
    """

    few: tuple[str, ...]
    more: tuple[str, ...]
    further: float


def few_layers(config: TransformerConfig, stages: int) -> FewLayers | None:
    """Return smaller models for a model that is cut into so many stages; None where it is small, or has no such layers.

    All stages of a smaller model have as many layers, also where the last one of the whole model has fewer.
    """
    values = {name: getattr(config, name) for name in _BY_LAYER}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, (list, tuple))}
    if config.hybrid_layer_pattern is not None:
        return None
    num_layers = ceil(config.num_layers / stages)
    turn = lcm(1, *(value for value in values.values() if isinstance(value, int) and value > 0))
    begin, kinds = 0, list(zip(*lists.values(), strict=True))
    if kinds:
        of_stages = [_repeats(kinds[first : first + num_layers], turn) for first in range(0, len(kinds), num_layers)]
        begin, turn = max(begin for begin, _ in of_stages), lcm(*(period for _, period in of_stages))
    few, more = (begin + _FEW, begin + _MORE) if turn == 1 else (begin + turn, begin + 2 * turn)
    if more >= num_layers:
        return None
    return FewLayers(
        few=_flags(few, stages, lists),
        more=_flags(more, stages, lists),
        further=(num_layers - few) / (more - few),
    )


def _repeats(kinds: list[tuple[object, ...]], turn: int) -> tuple[int, int]:
    """Return after how many layers the rest repeats itself, and every how many, a multiple of ``turn``: what is least together."""
    best = len(kinds), turn
    for period in range(turn, len(kinds) // 2 + 1, turn):
        begin = len(kinds) - period
        while begin > 0 and kinds[begin - 1] == kinds[begin - 1 + period]:
            begin -= 1
        if begin + 2 * period < sum(best):
            best = begin, period
    return best


def _flags(layers: int, stages: int, lists: Mapping[str, list[Any]]) -> tuple[str, ...]:
    flags = ["--num-layers", str(layers * stages)]
    for name, value in lists.items():
        of_stage = ceil(len(value) / stages)
        longer = [*value, *value[-1:] * (of_stage * stages - len(value))]
        kept = [kind for first in range(0, len(longer), of_stage) for kind in longer[first : first + layers]]
        flags += [_BY_LAYER[name], str(kept).replace(" ", "")]
    return tuple(flags)
