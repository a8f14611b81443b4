"""Random models: an embedding, blocks of many kinds, and heads, built from a description whose repr is valid Python."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, VOCABULARY, TOKENS = 6, 9, 3

KINDS = (
    "linear",
    "mlp",
    "saved",
    "context",
    "branch",
    "rank_branch",
    "loss",
    "loss_inside",
    "scalar",
    "dict",
    "inplace",
    "empty",
    "nested",
    "twice",
    "left",
    "odd",
    "transposed",
    "frozen_inside",
    "within_checkpoint",
)
CHECKPOINTS = ("none", "reentrant", "plain", "selective")


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A block: its kind, how it is recomputed, whether it is a unit, and whether it starts frozen."""

    kind: str
    checkpoint: str = "none"
    is_unit: bool = True
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model: its blocks, the order in which they run, and what is shared.

    Args:
        order: indices into ``blocks``; a repeated index runs its block again.
        tied: the first head's weight is the embedding's.
        num_heads: the number of heads. With ``pass_per_head``, the blocks run once for each head (a shared encoder).
        joined: the first two blocks are one unit.
    """

    blocks: tuple[BlockSpec, ...]
    order: tuple[int, ...]
    tied: bool = False
    num_heads: int = 1
    pass_per_head: bool = False
    joined: bool = False
    seed: int = 0


class Trip(Exception):
    """Raised on purpose in a forward or backward."""


class Environment:
    """Settings that a program changes while the model runs.

    Attributes:
        rank: the rank whose data the model currently processes.
        step: decides branches.
        trips_in: ("forward" or "backward", index of the block that raises there), or None.
        recomputes: whether checkpoints are in effect.
    """

    def __init__(self) -> None:
        self.rank, self.step = 0, 0
        self.trips_in: tuple[str, int] | None = None
        self.recomputes = False


class _SavedLinear(torch.autograd.Function):
    """A linear layer that saves its weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class _ContextLinear(torch.autograd.Function):
    """A linear layer that keeps its weight as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.x


class _TripInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise Trip("in backward")


class Block(nn.Module):
    """A residual block of a kind; returns a tensor [rows, width], or a dict that holds it."""

    def __init__(self, kind: str, environment: Environment) -> None:
        super().__init__()
        self.kind = kind
        self.environment = environment
        self.loss: torch.Tensor | None = None
        self.left: torch.Tensor | None = None
        if kind == "empty":
            return
        self.mix = nn.Linear(WIDTH, WIDTH)
        if kind == "mlp":
            self.norm, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 11),
                nn.Linear(11, WIDTH, bias=False),
            )
        elif kind in ("branch", "rank_branch"):
            self.other = nn.Linear(WIDTH, WIDTH)
        elif kind == "scalar":
            self.gate, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1))
        elif kind == "nested":
            self.inner: Any = Block("linear", environment)
        elif kind == "odd":
            self.wide, self.narrow = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        elif kind == "frozen_inside":
            self.other = nn.Linear(WIDTH, WIDTH)
            self.other.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, f"_{self.kind}", self._linear)(x)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out + self.mix(x)

    def _saved(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(_SavedLinear.apply(x, self.mix.weight) + self.mix.bias)

    def _context(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(_ContextLinear.apply(x, self.mix.weight) + self.mix.bias)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh((self.mix if self.environment.step % 2 else self.other)(x))

    def _rank_branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh((self.mix if (self.environment.step + self.environment.rank) % 2 else self.other)(x))

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        """Store a loss that depends on the output."""
        out = self._linear(x)
        self.loss = out.square().mean()
        return out

    def _loss_inside(self, x: torch.Tensor) -> torch.Tensor:
        """Store a loss that depends only on the weights."""
        self.loss = self.mix.weight.square().mean()
        return self._linear(x)

    def _scalar(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate + torch.tanh(self.mix(x) + self.shift)

    def _dict(self, x: torch.Tensor) -> dict[str, Any]:
        return {"out": [self._linear(x)], "none": None, "number": 3}

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self._linear(x))
        return out

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._linear(x))

    def _left(self, x: torch.Tensor) -> torch.Tensor:
        """Store a hidden tensor for a later layer."""
        hidden = torch.tanh(self.mix(x))
        self.left = hidden * 0.5
        return x + hidden

    def _odd(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(torch.tanh(self.wide(x))) + self.mix(x)
        return out

    def _transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.mix.weight) @ self.mix.weight.t() + self.mix.bias

    def _frozen_inside(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.other(self.mix(x)))

    def _within_checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        if not self.environment.recomputes:
            return self._linear(x)
        out: torch.Tensor = checkpoint(self._linear, x, use_reentrant=False)
        return out


def _policy(salt: int, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide by a hash of the operator's name and the salt: the same on all ranks and in recomputation."""
    saves = zlib.crc32(f"{salt} {op}".encode()) % 2
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class RandomModel(nn.Module):
    """Classifies rows of tokens [rows, tokens]; ``order`` and ``checkpoints`` may change between steps."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.environment = Environment()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks: Any = nn.ModuleList(Block(block.kind, self.environment) for block in spec.blocks)
        self.heads: Any = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(spec.num_heads))
        if spec.tied:
            self.heads[0].weight = self.embedding.weight
        for block, module in zip(spec.blocks, self.blocks, strict=True):
            if block.frozen:
                module.requires_grad_(False)
        self.order = list(spec.order)
        self.checkpoints = [block.checkpoint for block in spec.blocks]
        self.pass_per_head = spec.pass_per_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens).mean(1)
        encoded = None
        outputs: list[torch.Tensor] = []
        for head in self.heads:
            if encoded is None or self.pass_per_head:
                encoded = self._encode(embedded * (1.0 + 0.1 * len(outputs)))
            outputs.append(head(encoded))
        return torch.stack(outputs).sum(0)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        left: list[torch.Tensor] = []
        for index in self.order:
            block = self.blocks[index]
            if self.environment.trips_in == ("backward", index):
                x = _TripInBackward.apply(x)
            if self.environment.trips_in == ("forward", index):
                raise Trip("in forward")
            x = self._call(index, block, x)
            if left:
                x = x + left.pop()
            if block.kind == "left" and block.left is not None:
                left.append(block.left)
        return x

    def _call(self, index: int, block: Any, x: torch.Tensor) -> torch.Tensor:
        mode = self.checkpoints[index] if self.environment.recomputes and torch.is_grad_enabled() else "none"
        call: Callable[[torch.Tensor], Any] = block
        if block.kind == "dict":
            call = lambda x: block(x=x)["out"][0]  # noqa: E731
        if mode == "none":
            out: torch.Tensor = call(x)
        elif mode == "reentrant":
            out = checkpoint(call, x, use_reentrant=True)
        elif mode == "plain":
            out = checkpoint(call, x, use_reentrant=False)
        else:
            contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, index))
            out = checkpoint(call, x, use_reentrant=False, context_fn=contexts)
        return out.mul_(0.9) if block.kind == "inplace" else out

    def left_losses(self) -> list[torch.Tensor]:
        """Return and clear the losses that blocks stored in the last forward."""
        losses = []
        for block in self.blocks:
            if block.loss is not None and block.loss.requires_grad:
                losses.append(block.loss)
            block.loss = block.left = None
        return losses


def build(spec: ModelSpec) -> RandomModel:
    """Build the model; the same description gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return RandomModel(spec)


def batch(data: int, rank: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's (tokens [rows, tokens], classes [rows])."""
    generator = torch.Generator().manual_seed(1_000 * data + rank)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
    return tokens, torch.randint(VOCABULARY, (rows,), generator=generator)
