"""Faults in the engine that an audit must find; each is in force on all ranks of a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.mesh import group_mesh


def averages_over_one_rank_fewer(patch: pytest.MonkeyPatch) -> None:
    count_averaged = group_mesh.count_averaged

    def fewer(axes: Sequence[Transport], placements: Placements) -> Fraction:
        num_ranks = math.prod(axis.size for axis in axes)
        return Fraction(count_averaged(axes, placements) * (num_ranks - 1), num_ranks)

    patch.setattr(group_mesh, "count_averaged", fewer)


def model_weights_stay_old(patch: pytest.MonkeyPatch) -> None:
    """What an optimizer wrote to main weights does not reach the model weights."""
    patch.setattr(Weights, "sync", lambda self, *, casts=True: None)
    patch.setattr(Weights, "piece_of_update", property(lambda self: None, lambda self, piece: None), raising=False)


def a_reduction_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """The second reduce-scatter of all leaves each rank its own part."""
    reduce_scatter, calls = RankOrderTransport.reduce_scatter, []

    def own_part(self: Any, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, **options: Any) -> None:
        calls.append(self)
        if len(calls) != 2:
            reduce_scatter(self, out, full, scale=scale, **options)
            return
        own = full[self.rank * out.numel() :][: out.numel()] * scale
        out.copy_(out + own if options.get("accumulate") else own)

    patch.setattr(RankOrderTransport, "reduce_scatter", own_part)
