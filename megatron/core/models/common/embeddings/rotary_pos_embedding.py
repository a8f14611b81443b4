"""Rotary position embedding: tables of cosines and sines, and their application to queries and keys.

Shapes: s sequence, b batch, n heads, d head width, r rotated width (d * rotary_percent, even).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    apply_rotary_pos_emb,
    get_pos_emb_on_this_cp_rank,
)
from megatron.core.process_groups_config import group_size
from megatron.core.transformer.context_parallel import positions_on_this_cp_rank

__all__ = [
    "RotaryEmbedding",
    "_apply_rotary_pos_emb_bshd",
    "apply_rotary",
    "apply_rotary_pos_emb",
    "get_pos_emb_on_this_cp_rank",
    "scale_frequencies",
]


class RotaryEmbedding(torch.nn.Module):
    """Tables of rotary position embedding, computed in fp32 and cached for each device.

    It has no parameters and no buffers: tables are made at first use, on the device of that use, so that they are right for a
    model that was built on the meta device.

    Args:
        kv_channels: width of one head.
        rotary_percent: fraction of the head, from the front, that is rotated.
        seq_len_interpolation_factor: divides positions.
        use_cpu_initialization: without effect: tables are made where they are used.
        cp_group: the ranks that split a sequence; each gets the tables of its own positions.
        rope_scaling: divide low frequencies by ``rope_scaling_factor`` as Llama 3.1 does.

    Raises:
        ValueError: the rotated width is not even and positive.

    Attributes:
        concentration: factor of cosines and sines.

    Source: RoFormer (arXiv:2104.09864); Llama 3.1's scaling with an original length of 8,192.
    """

    concentration: float = 1.0

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.rotated_width = int(kv_channels * rotary_percent) if rotary_percent < 1.0 else kv_channels
        if self.rotated_width < 2 or self.rotated_width % 2 != 0:
            raise ValueError(
                f"kv_channels * rotary_percent must be even and positive, got {kv_channels} * {rotary_percent} ="
                f" {self.rotated_width}; change rotary_percent or kv_channels"
            )
        if seq_len_interpolation_factor is not None and seq_len_interpolation_factor <= 0:
            raise ValueError(
                f"seq_len_interpolation_factor must be above 0, got {seq_len_interpolation_factor}: positions are divided by it"
            )
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.rotary_base = rotary_base
        self.rope_scaling, self.rope_scaling_factor = rope_scaling, rope_scaling_factor
        self.cp_group = cp_group
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._held: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def get_cos_sin(self, max_seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [s, r/2], fp32, of this rank's positions below ``max_seq_len``.

        Args:
            max_seq_len: length of the whole sequence, of which each context-parallel rank has a part.

        Raises:
            ValueError: a sequence of this length cannot be cut evenly over the ranks.
        """
        if group_size(self.cp_group) == 1:
            return self._all_positions(max_seq_len, device)
        if (device, max_seq_len) not in self._held:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = self._all_positions(max_seq_len, device)
                held = positions_on_this_cp_rank(max_seq_len, self.cp_group, device)
                self._held[device, max_seq_len] = (cos[held], sin[held])
        return self._held[device, max_seq_len]

    def _all_positions(self, max_seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._tables[device][0].shape[0] if device in self._tables else 0
        if known < max_seq_len:
            # Doubled, since generation needs one more position each time. Tables made in inference_mode could not be saved
            # for backward later.
            with torch.inference_mode(False), torch.no_grad():
                angles = self._angles(max(max_seq_len, 2 * known), device)
                self._tables[device] = (angles.cos() * self.concentration, angles.sin() * self.concentration)
        cos, sin = self._tables[device]
        return cos[:max_seq_len], sin[:max_seq_len]

    def forward(self, max_seq_len: int, device: torch.device | None = None) -> torch.Tensor:
        """Compute the angles [s, 1, 1, r] of this rank's positions, each twice: as two halves, or pairs if interleaved."""
        device = device or torch.get_default_device()
        angles = self._angles(max_seq_len, device)
        if group_size(self.cp_group) > 1:
            angles = angles[positions_on_this_cp_rank(max_seq_len, self.cp_group, device)]
        repeated = (
            angles.repeat_interleave(2, dim=-1) if self.rotary_interleaved else torch.cat((angles, angles), dim=-1)
        )
        return repeated[:, None, None, :]

    def _angles(self, max_seq_len: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device)
        if self.seq_len_interpolation_factor is not None:
            positions = positions * (1 / self.seq_len_interpolation_factor)
        return torch.outer(positions, self._frequencies(device))

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        exponents = torch.arange(0, self.rotated_width, 2, dtype=torch.float32, device=device) / self.rotated_width
        frequencies = 1.0 / (self.rotary_base**exponents)
        return scale_frequencies(frequencies, self.rope_scaling_factor) if self.rope_scaling else frequencies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}, "_held": {}}


def scale_frequencies(
    frequencies: torch.Tensor,
    factor: float,
    *,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: int = 8192,
) -> torch.Tensor:
    """Scale frequencies for contexts ``factor`` times longer: high ones stay, low ones are divided, others are blended.

    Source: Llama 3.1 ("llama3" rope scaling).
    """
    turns = original_length * frequencies / (2 * math.pi)
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / factor)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first r channels of heads [s, b, ..., d] by tables [s, r/2]; contiguous, in the dtype of x."""
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    rotated: torch.Tensor = _Rotate.apply(x, cos.view(shape), sin.view(shape), interleaved)  # type: ignore[no-untyped-call, unused-ignore]
    return rotated


class _Rotate(torch.autograd.Function):
    """The rotation as an autograd function; backward is the inverse rotation, so only the tables are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_outputs[0], cos, sin, ctx.interleaved, -1.0), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x1, x2, out1, out2 = x[..., first], x[..., second], out[..., first], out[..., second]
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
