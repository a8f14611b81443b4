"""Each fused function beside the chain of PyTorch's operations that it stands for, with inputs for both.

Shapes: s = 6 sequence, b = 2 batch, g = 2 groups of 2 query heads of width d = 8, f = 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.bias_activation import bias_geglu, bias_gelu, bias_swiglu
from megatron.core.fusions.clamped_glu import clamped_glu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.fusions.fused_mla_rope import fused_rotate_and_join
from megatron.core.fusions.fused_norm import fused_norm
from megatron.core.fusions.fused_rope import fused_rotate, fused_split_and_rotate
from megatron.core.fusions.fused_softmax import scaled_masked_softmax
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...] | None, ...]
    """Of the tensors that get gradients; None where the argument is None."""


def _rms(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> Outputs:
    total = x if residual is None else x + residual
    return F.rms_norm(total, (16,), weight, 1e-3), total


def _layer_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Outputs:
    return F.layer_norm(x + residual, (16,), weight, bias, 1e-3), x + residual


def _tables(device: torch.device, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(6.0).outer(torch.arange(1.0, 1 + width // 2)).to(device)
    return angles.cos(), angles.sin()


def _split(mixed: torch.Tensor, *, interleaved: bool = False, rotated: int = 8) -> Outputs:
    query, key, value = mixed.unflatten(-1, (2, 4, 8)).split([2, 1, 1], dim=3)
    cos, sin = _tables(mixed.device, rotated)
    query, key = (apply_rotary(x, cos, sin, interleaved=interleaved) for x in (query.flatten(2, 3), key.squeeze(3)))
    return query, key, value.squeeze(3)


def _fused_split(mixed: torch.Tensor, *, interleaved: bool = False, rotated: int = 8) -> Outputs:
    tables = _tables(mixed.device, rotated)
    return fused_split_and_rotate(mixed, *tables, num_groups=2, head_width=8, interleaved=interleaved)


def _join(query: torch.Tensor, key_value: torch.Tensor, shared: torch.Tensor) -> Outputs:
    """Heads of 3 channels that are not turned and 4 that are; values of 5."""
    cos, sin = _tables(query.device, 4)
    turned = apply_rotary(shared, cos, sin, interleaved=True)
    query = torch.cat((query[..., :3], apply_rotary(query[..., 3:], cos, sin, interleaved=True)), dim=-1)
    return query, torch.cat((key_value[..., :3], turned[:, :, None].expand(-1, -1, 2, -1)), dim=-1), key_value[..., 3:]


def _fused_join(query: torch.Tensor, key_value: torch.Tensor, shared: torch.Tensor) -> Outputs:
    return fused_rotate_and_join(query, key_value, shared, *_tables(query.device, 4), content_width=3)


def _rotate(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x, *_tables(x.device, 4), interleaved=False)


def _bias_dropout_add(fused: bool, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    return get_bias_dropout_add(True, fused)((x, bias), residual, 0.0)


def _targets(logits: torch.Tensor) -> torch.Tensor:
    return (torch.arange(12, device=logits.device) * 7 % 31).view(2, 6).t()


def _losses(logits: torch.Tensor) -> torch.Tensor:
    rows, labels = logits.float().flatten(0, 1), _targets(logits).flatten()
    return F.cross_entropy(rows, labels, reduction="none").view(6, 2)


def _fused_losses(logits: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
    # Times 1: the gradient may overwrite what it is given, and that must not be the leaf that the test looks at.
    return fused_vocab_parallel_cross_entropy(logits * 1, _targets(logits), overwrite_logits=overwrite)


def _mask(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones(6, 6, dtype=torch.bool, device=scores.device).triu(1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return (scores.float() * 3.0).masked_fill(_mask(scores), -10000.0).softmax(-1).to(scores.dtype)


def _clamped(
    x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None, *, slope: float, limit: float, offset: float
) -> torch.Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = gate * torch.sigmoid(slope * gate) * (up + offset)
    return activated if probs is None else (activated * probs.unsqueeze(1)).to(x.dtype)


_OF_GPT_OSS: dict[str, Any] = {"slope": 1.702, "limit": 0.7, "offset": 1.0}


def _gated(x: torch.Tensor, bias: torch.Tensor | None, *, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return function(gate) * up


_tanh_gelu = partial(F.gelu, approximate="tanh")

CASES: dict[str, Case] = {
    "swiglu": Case(fused=bias_swiglu, plain=partial(_gated, function=F.silu), shapes=((6, 2, 32), None)),
    "wide swiglu": Case(fused=bias_swiglu, plain=partial(_gated, function=F.silu), shapes=((3, 2, 2 * 1050), None)),
    "heads of latent vectors": Case(fused=_fused_join, plain=_join, shapes=((6, 2, 2, 7), (6, 2, 2, 8), (6, 2, 4))),
    "bias swiglu": Case(fused=bias_swiglu, plain=partial(_gated, function=F.silu), shapes=((6, 2, 32), (32,))),
    "bias geglu": Case(fused=bias_geglu, plain=partial(_gated, function=_tanh_gelu), shapes=((6, 2, 32), (32,))),
    "clamped glu": Case(
        fused=partial(clamped_glu, **_OF_GPT_OSS),
        plain=partial(_clamped, **_OF_GPT_OSS),
        shapes=((6, 2, 32), (32,), None),
    ),
    "weighted clamped glu": Case(
        fused=partial(clamped_glu, **_OF_GPT_OSS),
        plain=partial(_clamped, **_OF_GPT_OSS),
        shapes=((12, 32), None, (12,)),
    ),
    "bias gelu": Case(fused=bias_gelu, plain=lambda x, bias: _tanh_gelu(x + bias), shapes=((6, 2, 16), (16,))),
    "rms norm": Case(
        fused=lambda x, r, w: fused_norm(x, r, w, None, eps=1e-3, centered=False),
        plain=_rms,
        shapes=((6, 2, 16), None, (16,)),
    ),
    "sum and rms norm": Case(
        fused=lambda x, r, w: fused_norm(x, r, w, None, eps=1e-3, centered=False),
        plain=_rms,
        shapes=((6, 2, 16), (6, 2, 16), (16,)),
    ),
    "sum and layer norm": Case(
        fused=lambda x, r, w, b: fused_norm(x, r, w, b, eps=1e-3, centered=True),
        plain=_layer_norm,
        shapes=((6, 2, 16), (6, 2, 16), (16,), (16,)),
    ),
    "split and rotate": Case(fused=_fused_split, plain=_split, shapes=((6, 2, 64),)),
    "split and rotate pairs": Case(
        fused=partial(_fused_split, interleaved=True), plain=partial(_split, interleaved=True), shapes=((6, 2, 64),)
    ),
    "split and rotate half of each head": Case(
        fused=partial(_fused_split, rotated=4), plain=partial(_split, rotated=4), shapes=((6, 2, 64),)
    ),
    "split and rotate pairs of half of each head": Case(
        fused=partial(_fused_split, interleaved=True, rotated=4),
        plain=partial(_split, interleaved=True, rotated=4),
        shapes=((6, 2, 64),),
    ),
    "rotate half of each head": Case(
        fused=partial(_rotate, fused_rotate), plain=partial(_rotate, apply_rotary), shapes=((6, 2, 3, 8),)
    ),
    "bias and residual": Case(
        fused=partial(_bias_dropout_add, True),
        plain=partial(_bias_dropout_add, False),
        shapes=((6, 2, 16), (16,), (6, 2, 16)),
    ),
    "cross entropy": Case(fused=partial(_fused_losses, overwrite=False), plain=_losses, shapes=((6, 2, 31),)),
    "cross entropy in place": Case(fused=partial(_fused_losses, overwrite=True), plain=_losses, shapes=((6, 2, 31),)),
    "masked softmax": Case(
        fused=lambda scores: scaled_masked_softmax(scores, _mask(scores), 3.0), plain=_softmax, shapes=((2, 4, 6, 6),)
    ),
}


def outputs_and_gradients(
    function: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """What the function gives, and the gradients of a fixed weighting of it for each input that is a tensor."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    values = [output.detach().clone() for output in outputs]
    weighted = [
        (output.float() * torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)).sum()
        for output in outputs
    ]
    torch.stack(weighted).sum().backward()
    return values, [None if leaf is None else leaf.grad for leaf in leaves]


def make_inputs(case: Case, device: str = "cpu") -> tuple[torch.Tensor | None, ...]:
    return tuple(None if shape is None else torch.randn(shape).to(device) for shape in case.shapes)
