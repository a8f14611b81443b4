"""Megatron-Core's functions that rotate queries and keys by angles.

The model itself rotates by tables of cosines and sines (``rotary_pos_embedding.apply_rotary``). Shapes: s sequence, b batch,
t tokens of packed samples, n heads, d head width, r rotated width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import DEFAULT_GROUP, group_of, group_rank, group_size

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    config: TransformerConfig,
    cu_seqlens: torch.Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
    mla_rotary_interleaved: bool = False,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first r channels of heads by angles, in the dtype of the heads.

    Args:
        t: [s, b, n, d]; with ``cu_seqlens`` [t, n, d].
        freqs: angles [s, 1, 1, r], as ``RotaryEmbedding`` returns them; pairs where ``config.rotary_interleaved``.
        cu_seqlens: where samples begin, and the end of the last: positions begin anew in each.
        mscale: factor of cosines and sines.
        cp_group: with ``cu_seqlens`` the ranks that split samples, which must be one; None: that of ``parallel_state``.
        inverse: rotate back.
        max_seqlen: without effect.

    Raises:
        NotImplementedError: packed samples are split over ranks, or multi-latent attention's order of channels is asked for.
    """
    if mla_rotary_interleaved or mla_output_remove_interleaving:
        raise NotImplementedError("apply_rotary_pos_emb: the channel order of multi-latent attention is not served")
    if cu_seqlens is not None:
        if group_size(group_of(None, "cp") if cp_group is None else cp_group) > 1:
            raise NotImplementedError(
                "apply_rotary_pos_emb(cu_seqlens=...) is not served over a context-parallel group"
            )
        starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=t.shape[0])
        freqs = freqs[torch.arange(t.shape[0], device=freqs.device) - starts].view(t.shape[0], 1, -1)
    return _apply_rotary_pos_emb_bshd(t, freqs, config.rotary_interleaved, mscale=mscale, inverse=inverse)


def _apply_rotary_pos_emb_bshd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
) -> torch.Tensor:
    """Rotate the first r channels of t [s, ..., d] by angles [s, ..., r]."""
    if mla_rotary_interleaved or mla_output_remove_interleaving:
        raise NotImplementedError(
            "_apply_rotary_pos_emb_bshd: the channel order of multi-latent attention is not served"
        )
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    if inverse:
        sin = -sin
    return torch.cat((turned * cos + _rotate_half(turned, rotary_interleaved) * sin, rest), dim=-1)


def _rotate_half(x: torch.Tensor, rotary_interleaved: bool) -> torch.Tensor:
    """Return (-second, first) of each pair of channels, in their places."""
    if rotary_interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: ProcessGroup | None) -> torch.Tensor:
    """Return this rank's two parts of 2 * ranks parts along ``seq_dim``: its own from the front, and the same from the end.

    Raises:
        ValueError: no group is given.
    """
    if cp_group is None or cp_group is DEFAULT_GROUP:
        raise ValueError("get_pos_emb_on_this_cp_rank needs a context-parallel group, got none")
    parts = pos_emb.chunk(2 * group_size(cp_group), dim=seq_dim)
    rank = group_rank(cp_group)
    return torch.cat((parts[rank], parts[-1 - rank]), dim=seq_dim)
