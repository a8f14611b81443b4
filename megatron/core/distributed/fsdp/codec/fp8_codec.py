"""``Fp8Codec``: weights that rest and travel in one byte for each element, with scales beside them.

    from megatron.core.distributed.fsdp import Fp8Codec

    linear.weight.fsdp_codec = Fp8Codec(recipe="tensorwise", wrapper=...)  # before fully_shard

What wraps bytes for transformer-engine's layers is in ``megatron/core/extensions/transformer_engine_weights.py``. Without
the engine the attribute has no effect.

See [Note: weights in bytes].
"""

from __future__ import annotations

from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeights
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights, WeightScales
from megatron.core.distributed.fsdp.codec.scaling import ScalingCodec


class Fp8Codec(ScalingCodec):
    """Weights in E4M3 bytes, scaled tensor by tensor or block by block.

    Args:
        recipe: ``delayed``: one scale for each weight, from the largest absolute values of earlier steps. ``tensorwise``:
            one, from the weight that is written. ``blockwise``: one for each block of 128 x 128 elements of it.
        wrapper: makes what layers multiply.
        margin: ``delayed`` leaves so many powers of two above the largest value.
        amax_history_len: steps that ``delayed`` looks back.
        amax_compute_algo: what ``delayed`` takes of them: the ``max``, or the ``most_recent``.
        power_of_two: scales are powers of two. None: for ``blockwise`` alone, as transformer-engine does.
        keeps_derived: keep what layers derive from the bytes (transposes) until the weights change, also while the
            unit is resharded: more memory, fewer transposes.

    Raises:
        ValueError: an argument is none of those above.

    The first scale of a weight is that of its own values, whatever the recipe: weights that were just made or loaded do
    not overflow. Evaluations and further forwards with the same weights change no scale. Weights of all groups of a
    context share one reduction for each version of the weights.
    """

    scales_class = WeightScales

    def weights_class(self, *, trainable: bool) -> type[ScaledWeights]:
        return ScaledWeights if trainable else FrozenWeights
