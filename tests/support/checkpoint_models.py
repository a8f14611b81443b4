"""Small models for the tests of checkpoints: every kind of parameter that a checkpoint must carry."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.config.placement import strategy_placements


class Block(nn.Module):
    """Odd sizes, two dtypes, a bias, a 0-dim parameter, a frozen one of one row, buffers of both kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.offset = nn.Parameter(torch.randn(1, width), requires_grad=False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.offset + self.scale * self.down(torch.tanh(self.up(self.gain.float() * x)))


class TiedModel(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self, *, vocab: int = 11, width: int = 5, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks: Any = nn.ModuleList([Block(width) for _ in range(num_blocks)])  # fully_shard adds methods
        self.output = nn.Linear(width, vocab, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def sharded_model(
    strategy: str, *, seed: int = 0, policy: MixedPrecisionPolicy | None = None, **sizes: int
) -> TiedModel:
    """A ``TiedModel`` whose blocks and root are units. Ranks: all."""
    torch.manual_seed(seed)
    model = TiedModel(**sizes)
    for unit in (*model.blocks, model):
        fully_shard(unit, placements=strategy_placements(strategy), mixed_precision_policy=policy)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups, as trainers make them."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "max_lr": 0.03},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0, "max_lr": 0.02},
    ]
    return fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.02))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> list[float]:
    """The losses of some steps; every rank sees the same batch, so that the mean of gradients is exact on 1, 2, 4."""
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 + step))
        loss = model(tokens.to(next(model.parameters()).device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Dtype, shape and bytes of all tensors of a model and its optimizer, by name; to compare. Ranks: all."""
    state = dict(model.state_dict())
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state.update({f"{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items()})
    return {name: _bits(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(whole.dtype), list(whole.shape), flat.numpy().tobytes()


def rank() -> int:
    return dist.get_rank()
