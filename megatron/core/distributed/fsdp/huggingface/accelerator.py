"""The ``Accelerator`` of ``accelerate`` over sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import fsdp_modules, microbatch
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.huggingface.shard import fully_shard_pretrained

_FOLDER = "sharded_{}"
_DTYPES = {"no": None, "bf16": torch.bfloat16}
_SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")
_Accelerator: Any = accelerate.Accelerator


class FullyShardedAccelerator(_Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` whose ``prepare`` shards models by this engine, and gives optimizers the sharded parameters.

    Scripts keep their lines. State is saved by all ranks at once, and any number of ranks loads it. With
    ``mixed_precision="bf16"`` units compute, and gradients travel, in bf16, and main weights are fp32, as under ``accelerate``'s FSDP2.

    Args:
        args: of ``Accelerator``.
        shard: shards a model in place. None: ``fully_shard_pretrained``, for models of ``transformers`` and ``peft``. Models with
            sharded parts stay as they are.
        kwargs: of ``Accelerator``.

    Raises:
        ValueError: ``accelerate`` is to shard models too; a dtype, or a compilation by it, is asked for that is not served.
    """

    def __init__(self, *args: Any, shard: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._models: list[Any]
        self._optimizers: list[Any]
        kind = self.distributed_type.name
        if kind not in _SERVED:
            raise ValueError(
                f"FullyShardedAccelerator shards models itself, on ranks of the kinds {_SERVED}, got {kind}; leave the settings of "
                "FSDP, DeepSpeed and other engines out of accelerate's configuration"
            )
        if self.mixed_precision not in _DTYPES:
            raise ValueError(f"mixed_precision must be one of {[*_DTYPES]}, got {self.mixed_precision!r}; use bf16")
        backend = self.state.dynamo_plugin.backend.name
        if backend != "NO":
            raise ValueError(
                f"accelerate must compile no sharded model, got dynamo_backend={backend}; leave it out, and call compile() on the "
                "model's layers after prepare"
            )
        self._shard = shard or self._shard_pretrained
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard models, give optimizers their sharded parameters, and prepare the rest as ``Accelerator`` does. Ranks: all.

        Raises:
            ValueError: an optimizer has state of a model that is not sharded yet.
        """
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for model in (arg for arg in args if isinstance(arg, nn.Module)):
            if next(model.parameters(), None) is None:
                model.to(self.device)
            elif not _is_sharded(model):
                with _followed(model, optimizers):
                    self._shard(model)
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # so that it is wrapped in nothing
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in optimizers:  # not before: accelerate loads its empty state, of which it would warn
            fully_shard_optimizer(getattr(optimizer, "optimizer", optimizer))
        return prepared

    def _shard_pretrained(self, model: nn.Module) -> None:
        dtype = _DTYPES[self.mixed_precision]
        fully_shard_pretrained(model, mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Complete no gradients in this scope: a later microbatch does."""
        with microbatch(model, is_last=False):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients by their norm over all ranks, and return it. Ranks: all."""
        return _whole(super().clip_grad_norm_(parameters, max_norm, norm_type))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state with whole tensors, on the host of the first rank; nothing on others. Ranks: all."""
        whole = {}
        for name, value in model.state_dict().items():
            gathered = _whole(value)
            if self.is_main_process:
                whole[name] = gathered.cpu() if isinstance(gathered, torch.Tensor) else gathered
        return whole

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save models and optimizers as checkpoints of the engine, and the rest as ``Accelerator`` does. Ranks: all."""
        with self._sharded_aside():
            folder: str = super().save_state(*args, **kwargs)
        return folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what ``save_state`` saved, by any number of ranks. Ranks: all."""
        with self._sharded_aside():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _sharded_aside(self) -> Iterator[None]:
        """Hide sharded models and their optimizers from ``Accelerator``, which then calls the two hooks below."""
        everything = self._models, self._optimizers
        self._pairs = _pairs(*everything)
        sharded = [id(part) for pair in self._pairs for part in pair]
        self._models, self._optimizers = ([part for part in kind if id(part) not in sharded] for kind in everything)
        try:
            yield
        finally:
            self._models, self._optimizers = everything

    def _save_sharded(self, models: Any, weights: Any, folder: str) -> None:
        for index, (model, optimizer) in enumerate(self._pairs):
            save_checkpoint(model, optimizer, Path(folder) / _FOLDER.format(index))

    def _load_sharded(self, models: Any, folder: str) -> None:
        for index, (model, optimizer) in enumerate(self._pairs):
            load_checkpoint(model, optimizer, Path(folder) / _FOLDER.format(index))


def _is_sharded(model: nn.Module) -> bool:
    return any(True for _ in fsdp_modules(model))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def _followed(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Shard the model in this scope: optimizers let go of its parameters, and get the sharded ones of the same names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for optimizer in optimizers:
        if any(id(parameter) in names for parameter in optimizer.state):
            raise ValueError(
                f"prepare must get an optimizer without state for a model that it shards, got a {type(optimizer).__name__} that has "
                "made steps; prepare both first, then load_state"
            )
    try:
        for group in groups:
            group["params"] = [names.get(id(parameter), parameter) for parameter in group["params"]]
        yield
    finally:
        for group in groups:
            group["params"] = [model.get_parameter(p) if isinstance(p, str) else p for p in group["params"]]


def _pairs(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[tuple[nn.Module, Any]]:
    """Return sharded models, each with its optimizer.

    Raises:
        NotImplementedError: a model has more than one.
    """
    found = []
    for model in filter(_is_sharded, models):
        own = {id(parameter) for parameter in model.parameters()}
        of_model = [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]
        if len(of_model) > 1:
            raise NotImplementedError(
                f"a model whose state is saved must have one optimizer, got {len(of_model)} of a {type(model).__name__}; put their "
                "parameters into groups of one, or call save_checkpoint for each"
            )
        found.append((model, of_model[0] if of_model else None))
    return found
