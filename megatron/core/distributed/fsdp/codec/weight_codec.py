"""The step from main weight to model weight; the default casts to the compute dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch


class WeightCodec:
    """What a model weight is made of, and how it is made from the main weight. This one, the default, is a cast.

    A parameter asks for another codec by its attribute ``fsdp_codec``, set before ``fully_shard``, alike on all ranks.
    Parameters whose codecs are equal may share a group, so codecs compare by value and hold nothing that changes.

    Attributes:
        casts: the model weight is the main weight in another dtype, or the main weight itself.
        needs_all_main_weights: what is encoded depends on other parts of the main weight than those at its place, so that
            an optimizer cannot write it with its update, or only as ``Weights.begin_update`` says.
    """

    casts = True
    needs_all_main_weights = False

    @property
    def encodes_by_tensor(self) -> bool:
        """Whether an update must know which elements are which tensor's."""
        return False

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which the model weight rests and travels, one element for each of the weight's."""
        return compute

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Refuse a parameter that the codec cannot serve.

        Raises:
            ValueError: it cannot.
        """

    def encoder(self, target: torch.Tensor) -> Callable[[torch.Tensor], object]:
        """Return the function that encodes a main weight [N] into ``target`` [N], whose memory stays where it is."""
        return target.copy_


CAST = WeightCodec()


def codec_of(parameter: torch.Tensor, name: str) -> WeightCodec:
    """Return the codec that a parameter asks for by its attribute ``fsdp_codec``; a cast where it asks for none.

    Raises:
        TypeError: the attribute is no codec.
        ValueError: the codec cannot serve the parameter.
    """
    codec: object = getattr(parameter, "fsdp_codec", None)
    if codec is None:
        return CAST
    if not isinstance(codec, WeightCodec):
        raise TypeError(f"fsdp_codec of parameter {name} must be a codec, such as an Fp8Codec, got {codec!r}")
    codec.check(parameter, name)
    return codec
