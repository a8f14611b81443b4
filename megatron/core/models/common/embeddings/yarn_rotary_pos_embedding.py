"""Rotary position embedding for contexts longer than those of the first training: YaRN.

Shapes: s sequence, r rotated width.
Source: YaRN (arXiv:2309.00071) sections 3.2 to 3.4; the two factors ``mscale`` are DeepSeek-V2's (arXiv:2405.04434).
"""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class YarnRotaryEmbedding(RotaryEmbedding):
    """Tables of YaRN: slow channels turn ``scaling_factor`` times slower, fast ones as before, those between are blended.

    Args:
        rotary_percent: must be 1: all of ``kv_channels`` is rotated.
        scaling_factor: how many times longer contexts are; at most 1: the usual tables.
        original_max_position_embeddings: the longest context of the first training.
        beta_fast: turns within it from which on a channel stays as it is.
        beta_slow: turns within it up to which a channel is slowed down by the whole factor.
        mscale, mscale_all_dim: cosines and sines are multiplied by the ratio of the two ``yarn_mscale``; None for either:
            by ``yarn_mscale(scaling_factor)``.
        correction_range_round_to_int: the bounds of the blend are whole channels.
        others: as for ``RotaryEmbedding``.

    Raises:
        ValueError: as ``RotaryEmbedding``, or another ``rotary_percent``.

    Source: Megatron-Core's class of this name (signature).
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        use_cpu_initialization: bool = False,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float | None = 1.0,
        mscale_all_dim: float | None = 0.0,
        correction_range_round_to_int: bool = True,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        if rotary_percent != 1.0:
            raise ValueError(f"YaRN rotates whole heads: rotary_percent must be 1, got {rotary_percent}")
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            use_cpu_initialization=use_cpu_initialization,
            cp_group=cp_group,
        )
        self.scaling_factor = scaling_factor
        self.original_max_position_embeddings = original_max_position_embeddings
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self.correction_range_round_to_int = correction_range_round_to_int
        if mscale is None or mscale_all_dim is None:
            self.concentration = yarn_mscale(scaling_factor)
        else:
            self.concentration = yarn_mscale(scaling_factor, mscale) / yarn_mscale(scaling_factor, mscale_all_dim)

    def forward(  # type: ignore[override]
        self, max_seq_len: int, device: torch.device | None = None
    ) -> tuple[torch.Tensor, float]:
        """Return the angles [s, 1, 1, r], as ``RotaryEmbedding`` does, and the factor of cosines and sines."""
        return super().forward(max_seq_len, device), self.concentration

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        plain = super()._frequencies(device)
        # The channels that turn beta_fast and beta_slow times within the first training's context.
        first, last = self._channel(self.beta_fast), self._channel(self.beta_slow)
        if self.correction_range_round_to_int:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotated_width - 1)
        channels = torch.arange(len(plain), dtype=torch.float32, device=device)
        slowed = ((channels - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        return plain * (1.0 - slowed) + plain / self.scaling_factor * slowed

    def _channel(self, turns: float) -> float:
        """Return the channel (a pair of the head, counted from the fastest) that turns so often within the first context."""
        waves = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.rotated_width * math.log(waves) / (2 * math.log(self.rotary_base))


def yarn_mscale(scaling_factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which scores are concentrated in contexts ``scaling_factor`` times longer, at least 1."""
    return 1.0 if scaling_factor <= 1 else 0.1 * mscale * math.log(scaling_factor) + 1.0
