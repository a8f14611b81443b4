"""The step from main weight to model weight; the default casts to the compute dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch


class WeightCodec:
    """What a model weight is made of, and how it is made from the main weight. This one, the default, is a cast.

    A parameter asks for another codec by its attribute ``fsdp_codec``, set before ``fully_shard``, alike on all ranks.
    Parameters whose codecs are equal may share a group, so codecs compare by value and hold nothing that changes.

    Attributes:
        needs_all_main_weights: what is encoded depends on other parts of the main weight than those at its place, so that
            an optimizer cannot write it with its update.
    """

    needs_all_main_weights = False

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which the model weight rests and travels, one element for each of the weight's."""
        return compute

    def encoder(self, target: torch.Tensor) -> Callable[[torch.Tensor], object]:
        """Return the function that encodes a main weight [N] into ``target`` [N], whose memory stays where it is."""
        return target.copy_

    def wrap(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return what a layer multiplies, a view of the gathered elements [R, C]."""
        return gathered

    def rebind(self, wrapped: torch.Tensor, gathered: torch.Tensor) -> None:
        """Make what ``wrap`` returned a view of these elements."""
        wrapped.data = gathered


CAST = WeightCodec()
