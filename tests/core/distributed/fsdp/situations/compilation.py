"""``torch.compile`` of a sharded model, its layers and its loss (item 9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.core.distributed.fsdp.situations.kinds import Kind, net, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp")
SOME = ("optim", "optim_grads_params", "hsdp")

# To find which vectors the processor has, inductor would compile programs for seconds.
_SCALAR: dict[str, Any] = {"cpp.vec_isa_ok": False}


def _net() -> Any:
    """A net whose blocks are called without a Python function in between."""
    torch._dynamo.reset()
    model = net()
    return model


def _train(kind: Kind, model: Any, called: Any = None) -> Any:
    called = model if called is None else called
    optimizer = sgd(model)
    losses = train(kind, model, optimizer, range(4), lambda _, step: kind.loss(called, step))
    with torch.no_grad():
        out = kind.mean(called(kind.batch(0)[0]).square().mean())
    return losses, out, weights(model)


@situation(strategies=SOME)
def a_compiled_model(kind: Kind) -> Any:
    model = kind.shard(_net())
    return _train(kind, model, torch.compile(model, backend="aot_eager"))


@situation(strategies=ALL)
def a_compiled_model_by_inductor(kind: Kind) -> Any:
    model = kind.shard(_net())
    return _train(kind, model, torch.compile(model, backend="inductor", options=_SCALAR))


@situation(strategies=SOME)
def a_model_compiled_in_place(kind: Kind) -> Any:
    model = kind.shard(_net())
    model.compile(backend="aot_eager")
    return _train(kind, model)


@situation()
def a_model_compiled_before_it_is_sharded(kind: Kind) -> Any:
    model = _net()
    model.compile(backend="aot_eager")
    return _train(kind, kind.shard(model))


@situation(strategies=SOME)
def layers_compiled_in_place_before_they_are_sharded(kind: Kind) -> Any:
    model = _net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return _train(kind, kind.shard(model))


@situation(strategies=SOME)
def layers_compiled_in_place_after_they_are_sharded(kind: Kind) -> Any:
    model = kind.shard(_net())
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return _train(kind, model)


@situation()
def compiled_layers_are_sharded(kind: Kind) -> Any:
    """The layers are ``torch.compile``'s wrappers, as in torchtitan."""
    model = _net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return _train(kind, kind.shard(model))


@situation()
def compiled_layers_are_sharded_by_inductor(kind: Kind) -> Any:
    model = _net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="inductor", options=_SCALAR)
    return _train(kind, kind.shard(model))


@situation()
def sharded_layers_are_compiled(kind: Kind) -> Any:
    model = kind.shard(_net())
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return _train(kind, model)


@situation()
def a_wrapper_of_the_sharded_model_is_sharded(kind: Kind) -> Any:
    model = _net()
    for block in model.blocks:
        kind.shard_one(block)
    compiled = torch.compile(model, backend="aot_eager")
    kind.shard_one(compiled)
    return _train(kind, compiled)


@situation()
def parts_of_a_unit_are_compiled(kind: Kind) -> Any:
    model = _net()
    for block in model.blocks:
        block.up.compile(backend="aot_eager")
        block.down = torch.compile(block.down, backend="aot_eager")
    return _train(kind, kind.shard(model))


@situation(strategies=("no_shard", "optim_grads_params"))
def a_compiled_loss(kind: Kind) -> Any:
    model = kind.shard(_net())

    @torch.compile(backend="aot_eager")
    def loss_of(out: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, classes)

    def whole(_: Any, step: int) -> torch.Tensor:
        features, classes = kind.batch(step)
        return loss_of(model(features), classes)

    return train(kind, model, sgd(model), range(4), whole), weights(model)


@situation(strategies=("no_shard", "optim_grads_params"))
def a_compiled_loss_with_the_model_in_it(kind: Kind) -> Any:
    model = kind.shard(_net())

    @torch.compile(backend="aot_eager")
    def loss_of(features: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(features), classes)

    return train(kind, model, sgd(model), range(4), lambda _, step: loss_of(*kind.batch(step))), weights(model)


@situation(strategies=("no_shard", "optim_grads_params"))
def microbatches_of_a_compiled_model(kind: Kind) -> Any:
    model = kind.shard(_net())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for index in range(2):
            with kind.microbatch(model, is_last=index == 1):
                kind.loss(compiled, 2 * step + index).backward()
        optimizer.step()
    return weights(model)
