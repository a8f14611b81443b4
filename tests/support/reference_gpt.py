"""A GPT written a second time, head by head and without any module of the framework, straight from a state dict.

Slow on purpose: what the framework fuses is spelled out here, so that the two share no mistake.
Shapes: b batch, s sequence, h hidden size, d head width.
"""

from __future__ import annotations

import math

import torch

from megatron.core.models.gpt.gpt_model import GPTModel

State = dict[str, torch.Tensor]


def reference_logits(
    model: GPTModel, state: State, inputs: torch.Tensor, angles: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    """Logits [b, s, v].

    Args:
        model: read for its settings only.
        angles: [s, r/2] rotation angles, or None.
        hidden: [s, s] or broadcastable bool, True where a key is hidden from a query.
    """
    x = state["embedding.word_embeddings.weight"][inputs]
    if "embedding.position_embeddings.weight" in state:
        x = x + state["embedding.position_embeddings.weight"][: inputs.shape[1]]
    for layer in range(model.config.num_layers):
        part = _under(state, f"decoder.layers.{layer}.")
        x = x + _attention(model, part, _norm(model, _under(part, "input_layernorm."), x), angles, hidden)
        x = x + _mlp(model, _under(part, "mlp."), _norm(model, _under(part, "pre_mlp_layernorm."), x))
    x = _norm(model, _under(state, "decoder.final_layernorm."), x)
    tied = model.share_embeddings_and_output_weights
    return x @ state["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T


def rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[..., s, d] turned channel pair by channel pair, as complex numbers."""
    out = x.clone()
    half = angles.shape[-1]
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        turned = torch.complex(x[..., i], x[..., j]) * torch.exp(1j * angles[:, pair])
        out[..., i], out[..., j] = turned.real, turned.imag
    return out


def _attention(
    model: GPTModel, part: State, x: torch.Tensor, angles: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    config = model.config
    width, groups = config.kv_channels, config.num_query_groups
    assert width is not None and groups is not None
    per_group = config.num_attention_heads // groups
    mixed = _linear(_under(part, "self_attention.linear_qkv."), x)
    chunks = mixed.split(width, dim=-1)
    contexts = []
    for group in range(groups):
        first = group * (per_group + 2)
        key, value = chunks[first + per_group], chunks[first + per_group + 1]
        key = _prepare(model, _under(part, "self_attention.k_layernorm."), key, angles)
        for head in range(per_group):
            query = _prepare(model, _under(part, "self_attention.q_layernorm."), chunks[first + head], angles)
            scale = config.softmax_scale or 1 / math.sqrt(width)
            scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -1e4)
            contexts.append(scores.softmax(-1) @ value)
    return _linear(_under(part, "self_attention.linear_proj."), torch.cat(contexts, dim=-1))


def _prepare(model: GPTModel, norm: State, head: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
    if norm:
        head = _norm(model, norm, head)
    return head if angles is None else rotate(head, angles, model.config.rotary_interleaved)


def _mlp(model: GPTModel, part: State, x: torch.Tensor) -> torch.Tensor:
    config = model.config
    x = _linear(_under(part, "linear_fc1."), x)
    if config.gated_linear_unit:
        width = x.shape[-1] // 2
        x = _activation(model, x[..., :width]) * x[..., width:]
    else:
        x = _activation(model, x)
    return _linear(_under(part, "linear_fc2."), x)


def _activation(model: GPTModel, x: torch.Tensor) -> torch.Tensor:
    function = model.config.activation_func
    if function is torch.nn.functional.gelu:
        if model.config.bias_activation_fusion:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if function is torch.nn.functional.silu:
        return x / (1 + torch.exp(-x))
    return x.clamp(min=0) ** (1 if function is torch.nn.functional.relu else 2)


def _norm(model: GPTModel, part: State, x: torch.Tensor) -> torch.Tensor:
    if model.config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.config.layernorm_epsilon)
    x = x * (part["weight"] + (1 if model.config.layernorm_zero_centered_gamma else 0))
    return x + part["bias"] if "bias" in part else x


def _linear(part: State, x: torch.Tensor) -> torch.Tensor:
    x = x @ part["weight"].T
    return x + part["bias"] if "bias" in part else x


def _under(state: State, prefix: str) -> State:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
