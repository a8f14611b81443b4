"""A plain GPT without parallelism, the same for every engine that is compared.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, PyTorch's attention, untied embeddings. Linear layers are
of a class that the engine chooses, so that ours can write weight gradients in place.

Shapes: t tokens of one sequence, h hidden size, v vocabulary, a attention heads, g key-value heads, d head size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.linear_function import linear_with_main_grad

_NORM_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """Sizes of a model."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 32_000

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


SHAPES = {
    "7.2b": GptShape(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8),
    "1.1b": GptShape(num_layers=22, hidden_size=2048, ffn_hidden_size=5632, num_heads=32, num_kv_heads=4),
    "tiny": GptShape(num_layers=3, hidden_size=64, ffn_hidden_size=160, num_heads=4, num_kv_heads=2, vocab_size=256),
}


class _Seeded(nn.Module):
    """A module with one weight, whose initial values depend on the seed, its place in the model and its shape alone."""

    resets_to_the_same_values = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, key: str) -> None:
        super().__init__()
        self._key = key
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))

    def reset_parameters(self) -> None:
        """Fill the weight with its initial values, rounded to bf16 whatever its dtype: all engines start equal."""
        digest = hashlib.sha256(self._key.encode()).digest()
        generator = torch.Generator(device=self.weight.device).manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.empty(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        values.normal_(0.0, _INIT_STD, generator=generator)
        with torch.no_grad():
            self.weight.copy_(values.to(torch.bfloat16))


class Linear(_Seeded):
    """A linear layer y = x A^T whose weight gradient autograd computes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class MainGradLinear(_Seeded):
    """A linear layer y = x A^T by the framework's function, which writes weight gradients into the engine's memory."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_with_main_grad(x, self.weight)


class Embedding(_Seeded):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RmsNorm(nn.Module):
    resets_to_the_same_values = True

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, _NORM_EPSILON)


class Layer(nn.Module):
    """One transformer layer: [b, t, h] and rotary tables [t, d] -> [b, t, h]."""

    def __init__(self, shape: GptShape, linear: type[_Seeded], dtype: torch.dtype, key: str) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.ffn_hidden_size
        self.shape = shape
        self.attention_norm = RmsNorm(h, dtype)
        self.qkv = linear((h + 2 * shape.num_kv_heads * shape.head_dim, h), dtype, f"{key}.qkv")
        self.proj = linear((h, h), dtype, f"{key}.proj")
        self.mlp_norm = RmsNorm(h, dtype)
        self.gate_up = linear((2 * f, h), dtype, f"{key}.gate_up")
        self.down = linear((h, f), dtype, f"{key}.down")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.proj(self._attend(self.attention_norm(x), cos, sin))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        output: Tensor = x + self.down(F.silu(gate) * up)
        return output

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (b, t, h) = self.shape, x.shape
        kv = shape.num_kv_heads * shape.head_dim
        q, k, v = (
            part.view(b, t, -1, shape.head_dim).transpose(1, 2) for part in self.qkv(x).split((h, kv, kv), dim=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).reshape(b, t, h)


class Head(nn.Module):
    """The last norm, the output layer and the loss: [b, t, h] and labels [b, t] -> []."""

    def __init__(self, shape: GptShape, linear: type[_Seeded], dtype: torch.dtype, key: str) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden_size, dtype)
        self.output = linear((shape.vocab_size, shape.hidden_size), dtype, f"{key}.output")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainGpt(nn.Module):
    """Tokens [b, t] and labels [b, t] -> the mean loss [], in fp32.

    Args:
        shape: sizes.
        linear: the class of its linear layers.
        dtype: dtype of its parameters.
        seed: of the initial weights, which ``reset_parameters`` of the submodules fills in.
    """

    def __init__(self, shape: GptShape, *, linear: type[_Seeded], dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding((shape.vocab_size, shape.hidden_size), dtype, f"{seed}.embedding")
        self.layers = nn.ModuleList(Layer(shape, linear, dtype, f"{seed}.{i}") for i in range(shape.num_layers))
        self.head = Head(shape, linear, dtype, f"{seed}.head")
        self._rotary: tuple[Tensor, Tensor] | None = None  # made on first use: no buffer for an engine to treat

    def units(self) -> Iterator[nn.Module]:
        """List the modules that each engine shards as units, in run order: embedding, layers, head."""
        yield self.embedding
        yield from self.layers
        yield self.head

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self._rotary is None or self._rotary[0].shape[0] != tokens.shape[1]:
            self._rotary = _rotary_tables(tokens.shape[1], self.shape.head_dim, x)
        cos, sin = self._rotary
        for layer in self.layers:
            x = layer(x, cos, sin)
        loss: Tensor = self.head(x, labels)
        return loss


def materialize(unit: nn.Module, device: torch.device) -> None:
    """Move the unit from the meta device to ``device`` and fill it with its initial weights."""
    unit.to_empty(device=device)
    for module in unit.modules():
        if isinstance(module, _Seeded | RmsNorm):
            module.reset_parameters()


def _rotary_tables(num_tokens: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [t, d] in the dtype of ``like``. Source: RoFormer (arXiv:2104.09864), halves rotated."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_tokens, device=like.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
