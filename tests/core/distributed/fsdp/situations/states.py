"""Writes to lists of weights, pickled optimizers, state dicts and DCP (item 10, second half)."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.core.distributed.fsdp.situations.kinds import (
    Kind,
    adamw,
    flat_adamw,
    grads,
    net,
    sgd,
    train,
    warnings_as_errors,
    weights,
)
from tests.core.distributed.fsdp.situations.table import situation

SOME = ("optim", "optim_grads_params", "hsdp")


# ---- writes between microbatches ------------------------------------------------------------------------------------


def _write_between(kind: Kind, write: Any) -> Any:
    """Write to the weights between two microbatches of a step, three steps long."""
    model = kind.shard(net())
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for index in range(2):
            with kind.microbatch(model, is_last=index == 1):
                loss = kind.loss(model, 2 * step + index)
                losses.append(kind.mean(loss))
                loss.backward()
            if index == 0:
                with torch.no_grad():
                    write(list(model.parameters()))
        optimizer.step()
    return losses, weights(model)


@situation(strategies=SOME, refuses="is_first=True")
def a_foreach_write_between_microbatches(kind: Kind) -> Any:
    return _write_between(kind, lambda parameters: torch._foreach_mul_(parameters, 0.9))


@situation(strategies=SOME, refuses="is_first=True")
def a_write_between_microbatches(kind: Kind) -> Any:
    return _write_between(kind, lambda parameters: [p.mul_(0.9) for p in parameters])


@situation(strategies=SOME, refuses="is_first=True|sharding strategy")
def a_foreach_copy_between_microbatches(kind: Kind) -> Any:
    return _write_between(kind, lambda ps: torch._foreach_copy_(ps, [torch.full_like(p, 0.1) for p in ps]))


# ---- pickles and copies ---------------------------------------------------------------------------------------------


def _state(optimizer: Any) -> list[Any]:
    return [state for _, state in sorted(optimizer.state_dict()["state"].items())]


@situation()
def a_pickled_optimizer(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    again = pickle.loads(pickle.dumps(optimizer))
    found = _state(again)
    return found, train(kind, model, optimizer, range(2, 4)), weights(model)


@situation()
def a_pickled_optimizer_that_is_watched(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = kind.watched(adamw(model))
    train(kind, model, optimizer, range(2))
    again = pickle.loads(pickle.dumps(optimizer))
    found = _state(again)
    return found, train(kind, model, optimizer, range(2, 4)), weights(model)


@situation()
def a_deep_copy_of_a_watched_optimizer(kind: Kind) -> Any:
    """The copy must not train the original's weights, nor clear its gradients."""
    model = kind.shard(net())
    optimizer = kind.watched(adamw(model))
    train(kind, model, optimizer, range(2))
    again = copy.deepcopy(optimizer)
    again.step()
    again.zero_grad()
    return weights(model), grads(model)


# ---- state dicts ----------------------------------------------------------------------------------------------------


def _set_full(kind: Kind, optimizer_of: Any) -> Any:
    options = StateDictOptions(full_state_dict=not kind.is_plain)
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    train(kind, model, optimizer, range(2))
    model_state = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = kind.shard(net())
    fresh_optimizer = optimizer_of(fresh)
    set_model_state_dict(fresh, model_state, options=options)
    set_optimizer_state_dict(fresh, fresh_optimizer, state, options=options)
    return _state(fresh_optimizer), train(kind, fresh, fresh_optimizer, range(2, 4)), weights(fresh)


@situation(strategies=SOME)
def a_full_optimizer_state_is_set_on_uneven_rows(kind: Kind) -> Any:
    return _set_full(kind, adamw)


@situation()
def a_full_state_of_a_watched_optimizer_is_set_on_uneven_rows(kind: Kind) -> Any:
    return _set_full(kind, lambda model: kind.watched(adamw(model)))


@situation()
def a_full_state_of_a_fused_optimizer_is_set_on_uneven_rows(kind: Kind) -> Any:
    return _set_full(kind, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


@situation(strategies=SOME)
def a_full_state_of_the_flat_optimizer_is_set_on_uneven_rows(kind: Kind) -> Any:
    return _set_full(kind, lambda model: flat_adamw(kind, model))


@situation(strategies=SOME)
def a_full_optimizer_state_is_broadcast_from_the_first_rank(kind: Kind) -> Any:
    import torch.distributed as dist

    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    own = StateDictOptions(full_state_dict=not kind.is_plain, cpu_offload=not kind.is_plain)
    model_state = get_model_state_dict(model, options=own)
    state = get_optimizer_state_dict(model, optimizer, options=own)
    fresh = kind.shard(net())
    fresh_optimizer = adamw(fresh)
    options = StateDictOptions(full_state_dict=not kind.is_plain, broadcast_from_rank0=not kind.is_plain)
    is_first = kind.is_plain or dist.get_rank() == 0
    set_model_state_dict(fresh, model_state if is_first else {}, options=options)
    set_optimizer_state_dict(fresh, fresh_optimizer, state if is_first else {}, options=options)
    return _state(fresh_optimizer), train(kind, fresh, fresh_optimizer, range(2, 4)), weights(fresh)


@situation(strategies=SOME)
def a_sharded_optimizer_state_is_set(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    fresh = kind.shard(net())
    fresh_optimizer = adamw(fresh)
    set_model_state_dict(fresh, get_model_state_dict(model))
    set_optimizer_state_dict(fresh, fresh_optimizer, state)
    return _state(fresh_optimizer), train(kind, fresh, fresh_optimizer, range(2, 4)), weights(fresh)


def _through_dcp(kind: Kind, optimizer_of: Any, *, prepares: bool) -> Any:
    """Save with plain DCP in mid-training, load into a fresh model and optimizer, train on."""
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    train(kind, model, optimizer, range(2))
    if not kind.is_plain:  # what the plain model would be is to train on
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{kind.folder}/dcp")
        model = kind.shard(net())
        optimizer = optimizer_of(model)
        if prepares:  # as get_optimizer_state_dict does it
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for group in optimizer.param_groups:
                group["lr"], group["kept"] = 0.0, group["lr"]
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = group.pop("kept")
            optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{kind.folder}/dcp")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return train(kind, model, optimizer, range(2, 4)), weights(model)


@situation(refuses="holds no state: the optimizer starts again")
def a_plain_dcp_load_into_a_fresh_optimizer(kind: Kind) -> Any:
    """DCP restores nothing into an optimizer without state: ours says so in a warning, which counts as a refusal here."""
    with warnings_as_errors("megatron.core.distributed.fsdp.api.optimizer"):
        return _through_dcp(kind, lambda model: kind.watched(adamw(model)), prepares=False)


@situation()
def a_plain_dcp_load_into_an_optimizer_with_state(kind: Kind) -> Any:
    return _through_dcp(kind, lambda model: kind.watched(adamw(model)), prepares=True)


def _through_dcps_functions(kind: Kind, optimizer_of: Any) -> Any:
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    train(kind, model, optimizer, range(2))
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=f"{kind.folder}/dcp", no_dist=kind.is_plain)
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{kind.folder}/dcp", no_dist=kind.is_plain)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(kind, model, optimizer, range(2, 4)), weights(model)


@situation(strategies=SOME)
def dcp_with_pytorchs_state_dict_functions(kind: Kind) -> Any:
    return _through_dcps_functions(kind, adamw)


@situation(strategies=SOME)
def dcp_of_the_flat_optimizer_with_pytorchs_state_dict_functions(kind: Kind) -> Any:
    return _through_dcps_functions(kind, lambda model: flat_adamw(kind, model))


@situation(strategies=SOME)
def a_plain_dcp_load_into_a_fresh_flat_optimizer(kind: Kind) -> Any:
    if kind.name == "ours":
        return _through_dcp(kind, lambda model: flat_adamw(kind, model), prepares=False)
    return _through_dcp(kind, adamw, prepares=True)


# ---- torch.save and copies of state dicts ---------------------------------------------------------------------------


@situation(strategies=SOME)
def a_state_dict_goes_through_torch_save(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(kind, model, optimizer, range(2, 3))
    file.seek(0)
    state = torch.load(file, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(kind, model, optimizer, range(3, 5)), weights(model)


@situation(strategies=SOME)
def a_state_dict_is_copied_as_for_an_average_of_weights(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    average = copy.deepcopy(model.state_dict())
    parameters = [copy.deepcopy(parameter) for parameter in model.parameters()]
    for step in range(3):
        train(kind, model, optimizer, range(step, step + 1))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.5)
    return average, parameters, weights(model)


@situation()
def gradients_are_copied_and_pickled(kind: Kind) -> Any:
    model = kind.shard(net())
    kind.loss(model, 0).backward()
    copies = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
    pickled = [pickle.loads(pickle.dumps(parameter.grad)) for parameter in model.parameters()]
    model.zero_grad()
    kind.loss(model, 1).backward()
    return copies, pickled


@situation(refuses="state_dict")
def a_pickled_flat_optimizer(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = flat_adamw(kind, model)
    train(kind, model, optimizer, range(2))
    return _state(pickle.loads(pickle.dumps(optimizer)))
