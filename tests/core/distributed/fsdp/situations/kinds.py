"""One interface to an unsharded model, to PyTorch's FSDP2 and to this engine, so that a situation is written once."""

from __future__ import annotations

import dataclasses
import logging.handlers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import FlatAdamW, fully_shard, fully_shard_optimizer, hybrid_placements, microbatch
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.models import NUM_CLASSES, NUM_INPUTS, Net, global_batch, make_net

KINDS = ("plain", "fsdp2", "ours")
ZERO3 = "optim_grads_params"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a situation uses instead of calling a sharding library.

    Args:
        name: "plain" (one unsharded model that sees the batches of all ranks), "fsdp2" or "ours".
        strategy: of ours; "hsdp" and "two axes" also give FSDP2 a mesh of 2 x 1 devices.
        folder: an empty folder that all ranks share.
    """

    name: str
    strategy: str
    folder: str

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"

    # ---- sharding -----------------------------------------------------------------------------------------------

    def shard(self, model: Any, units: Sequence[Any] | None = None) -> Any:
        """Shard the units (those of a ``Net`` by default), then the model; return the model."""
        units = list(model.blocks) if units is None else list(units)
        for unit in [*units, model]:
            self.shard_one(unit)
        return model

    def shard_one(self, module: Any) -> Any:
        """Shard one module, or a list of modules as one unit."""
        if self.name == "ours":
            fully_shard(module, **self._our_settings())
        elif self.name == "fsdp2":
            from torch.distributed.fsdp import fully_shard as fully_shard_2

            fully_shard_2(module, mesh=self._mesh())
        return module

    def _mesh(self) -> Any:
        if self.strategy in ("hsdp", "two axes"):
            return init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def _our_settings(self) -> dict[str, Any]:
        if self.strategy == "two axes":
            return {"mesh": self._mesh()}
        if self.strategy == "hsdp":
            return {"mesh": self._mesh(), "placements": hybrid_placements(ZERO3, "no_shard", ("outer", "inner"))}
        return {"placements": strategy_placements(self.strategy)}

    def watched(self, optimizer: Any) -> Any:
        """Return the optimizer, made to check its steps where the library offers that."""
        return fully_shard_optimizer(optimizer) if self.name == "ours" else optimizer

    @contextmanager
    def microbatch(self, model: Any, *, is_last: bool) -> Iterator[None]:
        """Mark forward and backward in this scope as a microbatch that is, or is not, a step's last one."""
        if self.name == "ours":
            with microbatch(model, is_last=is_last):
                yield
            return
        if self.name == "fsdp2":
            model.set_requires_gradient_sync(is_last)
        yield

    def unshard(self, module: Any) -> None:
        """Gather one module's weights until ``reshard``."""
        if not self.is_plain:
            module.unshard()

    def reshard(self, module: Any) -> None:
        if not self.is_plain:
            module.reshard()

    # ---- data ---------------------------------------------------------------------------------------------------

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (features [rows, inputs], classes [rows]) of this rank; the plain model's hold those of all ranks."""
        pieces = global_batch(step, dist.get_world_size())
        if self.is_plain:
            features, classes = zip(*pieces, strict=True)
            return torch.cat(features), torch.cat(classes)
        return pieces[dist.get_rank()]

    def tensor(self, step: int, *shape: int) -> torch.Tensor:
        """Return this rank's rows [shape] of a random tensor; the plain model's are those of all ranks."""
        generator = torch.Generator().manual_seed(2000 + step)
        rows = torch.randn(dist.get_world_size() * shape[0], *shape[1:], generator=generator)
        return rows if self.is_plain else rows.chunk(dist.get_world_size())[dist.get_rank()]

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' values."""
        value = value.detach().clone()
        if not self.is_plain:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    def loss(self, model: Any, step: int) -> torch.Tensor:
        """Return the mean cross entropy of a ``Net`` on the step's batch."""
        features, classes = self.batch(step)
        return nn.functional.cross_entropy(model(features), classes)


def net(num_blocks: int = 3) -> Net:
    """A net with the same weights in each call."""
    return make_net(num_blocks)


def seeded(build: Callable[[], Any], seed: int = 0) -> Any:
    """Build with a fixed seed, which is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def sgd(model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def flat_adamw(kind: Kind, model: Any) -> torch.optim.Optimizer:
    """``adamw``, of ours by whole shards."""
    return FlatAdamW(model.parameters(), lr=0.01, weight_decay=0.1) if kind.name == "ours" else adamw(model)


def train(kind: Kind, model: Any, optimizer: Any, steps: range, loss_of: Any = None) -> list[torch.Tensor]:
    """Train and return the losses [steps], each the mean over the ranks."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (loss_of or kind.loss)(model, step)
        losses.append(kind.mean(loss))
        loss.backward()
        optimizer.step()
    return losses


def weights(model: Any) -> dict[str, Any]:
    """The parameters by name; the table gathers them."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}


def grads(model: Any) -> dict[str, torch.Tensor | None]:
    """The gradients by name, None where there is none."""
    return {name.replace("_orig_mod.", ""): parameter.grad for name, parameter in model.named_parameters()}


@contextmanager
def warnings_as_errors(logger: str) -> Iterator[None]:
    """Raise what the named logger warns of in this scope, once the scope ends."""
    handler = logging.handlers.BufferingHandler(capacity=1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)
    if handler.buffer:
        raise RuntimeError(handler.buffer[0].getMessage())


__all__ = [
    "KINDS",
    "NUM_CLASSES",
    "NUM_INPUTS",
    "ZERO3",
    "Kind",
    "adamw",
    "flat_adamw",
    "grads",
    "net",
    "seeded",
    "sgd",
    "train",
    "warnings_as_errors",
    "weights",
]
