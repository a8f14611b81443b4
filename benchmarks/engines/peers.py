"""The engines that ours is compared with, and the limit for all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from benchmarks.engines.engine import Engine, EngineSettings, adamw
from benchmarks.engines.plain_gpt import Embedding, Head, Layer, Linear, PlainGpt, materialize


class Ideal(Engine):
    """The limit for a sharding engine: bf16 weights resident, no communication, AdamW over 1/N of fp32 state.

    Its weights never change, since what its optimizer updates is not gathered: it gives a time, no training run.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.model = _on_meta(settings, torch.bfloat16)
        materialize(self.model, settings.device)
        generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
        shards = []
        for parameter in self.model.parameters():
            numel = -(-parameter.numel() // settings.mesh.size())
            shard = nn.Parameter(parameter.detach().flatten()[:numel].float())
            # Random, not zeros: arithmetic on zeros draws less power and runs faster.
            shard.grad = torch.empty_like(shard).normal_(0.0, 1e-3, generator=generator)
            shards.append(shard)
        self.optimizer = adamw(shards, settings)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)  # the shards' gradients stay: no backward writes them


class Fsdp2(Engine):
    """Fully sharded by PyTorch's ``fully_shard``: fp32 sharded weights, bf16 for compute and on the wire."""

    model: PlainGpt

    def __init__(self, settings: EngineSettings) -> None:
        policy = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        self.model = _on_meta(settings, torch.float32)
        for unit in self.model.units():
            materialize(unit, settings.device)  # whole, then sharded: no rank holds more than one whole unit
            fsdp2_fully_shard(unit, mesh=settings.mesh, mp_policy=policy)
        fsdp2_fully_shard(self.model, mesh=settings.mesh, mp_policy=policy)
        self.optimizer = adamw(self.model.parameters(), settings)

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_is_last_backward(is_last)  # type: ignore[operator]
        return nullcontext()


class MegatronFsdp(Engine):
    """Fully sharded by the package megatron-fsdp: bf16 weights, fp32 main weights, bf16 on the wire, overlap on."""

    def __init__(self, settings: EngineSettings) -> None:
        package = import_megatron_fsdp("megatron_fsdp")
        # Without a mesh it makes its own over all ranks, with the axes that it needs.
        self.model = package.fully_shard_model(
            _on_meta(settings, torch.bfloat16),
            fsdp_unit_modules=[Embedding, Layer, Head],
            zero_dp_strategy="optim_grads_params",
            init_model_with_meta_device=True,
            mixed_precision_policy=_megatron_fsdp_policy(package),
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            preproc_state_dict_for_dcp_ckpt=False,
        )
        # It takes a step on zeros to make the optimizer's state, which must neither decay weights nor count as a step.
        optimizer = adamw(self.model.parameters(), settings)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer = package.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_model_auto_sync(is_last)  # type: ignore[operator]
        return nullcontext()


class MegatronFsdpV2(Engine):
    """Fully sharded by megatron-fsdp's ``experimental`` rewrite, with the same dtypes."""

    model: PlainGpt

    def __init__(self, settings: EngineSettings) -> None:
        policy = _megatron_fsdp_policy(import_megatron_fsdp("megatron_fsdp"))
        package = import_megatron_fsdp("megatron_fsdp.experimental")
        flat = [package.Flat()]
        placements = package.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
        self.model = _on_meta(settings, torch.bfloat16)
        for unit in self.model.units():
            materialize(unit, settings.device)
            package.fully_shard(unit, settings.mesh, placements, policy)
        package.fully_shard(self.model, settings.mesh, placements, policy)
        self.optimizer = adamw(self.model.parameters(), settings)
        package.fully_shard_optimizer(self.optimizer)


def megatron_fsdp_is_missing(settings: EngineSettings) -> str | None:
    """Return why megatron-fsdp cannot run here, None if it can."""
    if settings.device.type != "cuda":
        return "needs CUDA devices"
    try:
        import_megatron_fsdp("megatron_fsdp")
    except ImportError as error:
        return f"megatron-fsdp is not installed ({error})"
    return None


def import_megatron_fsdp(name: str) -> ModuleType:
    """Import a module of the package megatron-fsdp as it is without Megatron-LM.

    It looks for Megatron-LM's ``megatron.core`` and would take this repository's modules of that name for it, some of
    which it would find and some not.

    Raises:
        ImportError: it is not installed.
    """
    with _without("megatron"):
        return importlib.import_module(name)


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Make imports of the package and of its modules fail in a scope, as if it were not installed."""
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *hidden]))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(hidden)


def _megatron_fsdp_policy(package: ModuleType) -> Any:
    return package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )


def _on_meta(settings: EngineSettings, dtype: torch.dtype) -> PlainGpt:
    with torch.device("meta"):
        return PlainGpt(settings.shape, linear=Linear, dtype=dtype, seed=settings.seed)
