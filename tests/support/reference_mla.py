"""Multi-latent attention written plainly, from DeepSeek-V2's formulas (arXiv:2405.04434, section 2.1) and YaRN's.

Nothing is shared with the framework: loops over heads and positions, all scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def reference_mla(weights: Mapping[str, torch.Tensor], config: Any, x: torch.Tensor) -> torch.Tensor:
    """The output [s, b, h] of the attention for inputs [s, b, h].

    Args:
        weights: by the names of the attention's parameters in checkpoints; which norms there are, they say.
        config: an MLATransformerConfig.
    """
    length, content, position = x.shape[0], config.qk_head_dim, config.qk_pos_emb_head_dim
    heads = config.num_attention_heads
    if config.q_lora_rank is None:
        queries = x @ weights["linear_q_proj.weight"].T
    else:
        latent = x @ weights["linear_q_down_proj.weight"].T
        queries = _normed(weights, "q_layernorm", latent, config) @ weights["linear_q_up_proj.weight"].T
    down = x @ weights["linear_kv_down_proj.weight"].T
    latent, shared = down[..., : config.kv_lora_rank], down[..., config.kv_lora_rank :]
    keys_values = _normed(weights, "kv_layernorm", latent, config) @ weights["linear_kv_up_proj.weight"].T
    angles, concentration = _angles(config, length)
    shared = _turned(shared, angles) * concentration
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if config.window_size is not None:
        hidden |= torch.ones(length, length, dtype=torch.bool).tril(-config.window_size[0] - 1)
    scale = 1 / math.sqrt(content + position)
    scale *= _mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    contexts = []
    for head in range(heads):
        width = content + position
        query = queries[..., head * width : (head + 1) * width]
        width = content + config.v_head_dim
        key_value = keys_values[..., head * width : (head + 1) * width]
        key, value = key_value[..., :content], key_value[..., content:]
        turned = _turned(query[..., content:], angles) * concentration
        scores = torch.einsum("qbd,kbd->bqk", query[..., :content], key) + torch.einsum("qbd,kbd->bqk", turned, shared)
        probs = (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        contexts.append(torch.einsum("bqk,kbd->qbd", probs, value))
    return torch.cat(contexts, dim=-1) @ weights["linear_proj.weight"].T


def _normed(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    if f"{name}.weight" not in weights:
        return x
    return x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * weights[f"{name}.weight"]


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn channels 2i and 2i + 1 of [s, b, r] as a complex number by the angles [s, r/2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _angles(config: Any, length: int) -> tuple[torch.Tensor, float]:
    """The angles [s, r/2], and the factor of the turned channels."""
    width, base, factor = config.qk_pos_emb_head_dim, config.rotary_base, config.rotary_scaling_factor
    frequencies = [base ** (-2 * i / width) for i in range(width // 2)]
    concentration = 1.0
    if config.rope_type == "yarn":

        def channel_of(turns: float) -> float:
            """The channel whose wave fits so often into the first context: base^(2i / width) = length / (2 pi turns)."""
            return width / 2 * math.log(config.original_max_position_embeddings / (2 * math.pi * turns), base)

        first = max(math.floor(channel_of(config.beta_fast)), 0)
        last = min(math.ceil(channel_of(config.beta_slow)), width - 1)
        for i, frequency in enumerate(frequencies):
            slowed = min(max((i - first) / (last - first), 0.0), 1.0)
            frequencies[i] = (1 - slowed) * frequency + slowed * frequency / factor
        concentration = _mscale(factor, config.mscale) / _mscale(factor, config.mscale_all_dim)
    return torch.outer(torch.arange(length, dtype=torch.float32), torch.tensor(frequencies)), concentration
