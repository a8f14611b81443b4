"""What users see, keep and write between forward, backward and step (items 1, 2, 5 and 15)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import register_pytree_node

from megatron.core.distributed.fsdp import fully_shard_context
from tests.core.distributed.fsdp.situations.kinds import Kind, flat_adamw, grads, net, seeded, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp")
SOME = ("optim", "optim_grads_params", "hsdp")


def _started(kind: Kind, optimizer_of: Any = sgd) -> tuple[Any, Any]:
    """A net that has trained for two steps, so that the plan is in use, and its optimizer."""
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    train(kind, model, optimizer, range(2))
    return model, optimizer


# ---- between forward and backward -----------------------------------------------------------------------------------


@situation(strategies=ALL)
def training_follows_the_plain_model(kind: Kind) -> Any:
    model = kind.shard(net())
    losses = train(kind, model, sgd(model), range(4))
    return losses, weights(model), grads(model)


@situation(strategies=("two axes",))
def a_mesh_of_two_axes_is_hybrid_sharding(kind: Kind) -> Any:
    model = kind.shard(net())
    return train(kind, model, sgd(model), range(4)), weights(model)


@situation()
def zero_grad_between_forward_and_backward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    for step in range(2, 4):
        loss = kind.loss(model, step)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    return grads(model), weights(model)


@situation()
def zero_grad_without_set_to_none_between_forward_and_backward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    loss = kind.loss(model, 2)
    model.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    return grads(model), weights(model)


@situation()
def clipping_after_a_further_forward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    model(kind.batch(3)[0])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return norm, weights(model)


@situation()
def weights_written_after_a_forward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    model(kind.batch(2)[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return train(kind, model, optimizer, range(2, 4)), weights(model)


@situation(strategies=("no_shard", "optim_grads_params", "hsdp"))
def weights_are_written_by_index(kind: Kind) -> Any:
    """Rows, one column, elements under a mask; of a weight and of a bias."""
    model, optimizer = _started(kind)
    torch.manual_seed(5)
    nn.init.sparse_(model.head.weight, 0.4)
    with torch.no_grad():
        model.entry.weight[[1, 3]] = 0.5
        model.entry.weight[torch.tensor([0, 2]), 1] = torch.tensor([0.25, 0.75])
        model.entry.bias[torch.arange(7) > 4] = -1.0
        model.blocks[0].up.weight.index_put_((torch.tensor([2, 2]),), torch.ones(2, 7), accumulate=True)
    before = {name: weight.detach().clone() for name, weight in weights(model).items()}
    return before, train(kind, model, optimizer, range(2, 4)), weights(model)


@situation(refuses=r"the data of the sharded parameter entry.weight must not be replaced.*copy_")
def data_of_parameters_is_replaced(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return train(kind, model, optimizer, range(2, 4)), weights(model)


@situation(strategies=("no_shard", "optim_grads_params"))
def data_of_parameters_is_written_by_an_operator(kind: Kind) -> Any:
    """Python assigns what it has written to."""
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(3):
        model.zero_grad()
        kind.loss(model, step).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
            parameter.data *= 0.9
            parameter.data = parameter.data
    return train(kind, model, optimizer, range(3, 5)), weights(model)


def _replace_gradients(kind: Kind, optimizer_of: Any) -> Any:
    """Train, with other gradients in each step; and with some that are assigned, then written, then summed up further."""
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    kept = []
    for step in range(5):
        optimizer.zero_grad()
        kind.loss(model, step).backward()
        parameters = list(model.parameters())
        if step == 1:
            kept = [parameter.grad.data for parameter in parameters]
        if step == 2:
            for parameter in parameters:
                parameter.grad = parameter.grad * 0.5
        for parameter in parameters[step:]:
            grad = parameter.grad
            parameter.grad.data = parameter.grad.data * (0.1 + step)
            assert parameter.grad is grad
        if step == 3:
            kind.loss(model, 7).backward()
        optimizer.step()
    return kept, grads(model), train(kind, model, optimizer, range(2)), weights(model)


@situation(strategies=ALL)
def data_of_gradients_is_replaced(kind: Kind) -> Any:
    return _replace_gradients(kind, sgd)


@situation(strategies=("no_shard", "optim_grads_params"))
def data_of_gradients_is_replaced_for_a_flat_optimizer(kind: Kind) -> Any:
    return _replace_gradients(kind, lambda model: flat_adamw(kind, model))


@situation()
def weights_are_swapped_in_place_for_an_evaluation(kind: Kind) -> Any:
    """What the refusal above says to do; and reading ``data`` stays as it was."""
    model, optimizer = _started(kind)
    kept = [parameter.data.clone() for parameter in model.parameters()]
    losses = []
    for values in ([value * 0.5 for value in kept], kept):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
            losses.append(kind.mean(kind.loss(model, 3)))
    return losses, train(kind, model, optimizer, range(2, 4)), weights(model)


@situation()
def an_optimizer_built_between_forward_and_backward(kind: Kind) -> Any:
    model, _ = _started(kind)
    model.zero_grad()
    loss = kind.loss(model, 2)
    optimizer = sgd(model)
    loss.backward()
    optimizer.step()
    return train(kind, model, optimizer, range(3, 5)), weights(model)


@situation()
def a_state_dict_between_forward_and_backward(kind: Kind) -> Any:
    model, _ = _started(kind)
    loss = kind.loss(model, 2)
    state = model.state_dict()
    kinds = [kind.is_plain or isinstance(value, DTensor) for value in state.values()]
    loss.backward()
    return kinds, dict(state)


@situation()
def parameters_are_the_same_objects_before_and_after_a_forward(kind: Kind) -> Any:
    model, _ = _started(kind)
    before = list(model.parameters())
    loss = kind.loss(model, 2)
    between = list(model.parameters())
    loss.backward()
    return [a is b is c for a, b, c in zip(before, between, model.parameters(), strict=True)]


@situation()
def a_load_between_forward_and_forward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    train(kind, model, optimizer, range(2, 3))
    model(kind.batch(2)[0])
    model.load_state_dict(kept)
    return train(kind, model, optimizer, range(3, 5)), weights(model)


@situation()
def gradients_read_between_forward_and_backward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    loss = kind.loss(model, 3)
    seen = {name: None if grad is None else grad.clone() for name, grad in grads(model).items()}
    loss.backward()
    return seen, grads(model)


# ---- hooks on parameters --------------------------------------------------------------------------------------------


@situation()
def an_optimizer_in_backward(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for index in range(4):
        loss = kind.loss(model, index)
        losses.append(kind.mean(loss))
        loss.backward()
    return losses, weights(model), grads(model)


@situation()
def a_post_accumulate_hook_fires_once_a_backward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    train(kind, model, optimizer, range(2, 4))
    return sorted(seen)


@situation()
def a_post_accumulate_hook_that_was_removed(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    seen: list[int] = []
    handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda _: seen.append(1))
    train(kind, model, optimizer, range(2, 3))
    handle.remove()
    train(kind, model, optimizer, range(3, 4))
    return seen


@situation(refuses="hook")
def a_gradient_hook_on_a_parameter(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
    train(kind, model, optimizer, range(2, 4))
    return weights(model)


# ---- gradients that are kept ----------------------------------------------------------------------------------------


@situation(strategies=SOME)
def a_kept_gradient_survives_the_next_backward(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    kept = grads(model)
    optimizer.zero_grad()
    kind.loss(model, 3).backward()
    return kept, grads(model)


@situation(strategies=ALL)
def a_kept_gradient_is_read_after_zero_grad(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = kind.watched(sgd(model))
    train(kind, model, optimizer, range(2))
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    kept = grads(model)
    optimizer.zero_grad()
    with torch.no_grad():
        model(kind.batch(3)[0])
    return kept


@situation()
def gradients_are_swapped_between_two_losses(kind: Kind) -> Any:
    """Two losses whose gradients are compared and summed by hand, as in multi-task training."""
    model, optimizer = _started(kind)
    found = []
    for step in (2, 3):
        optimizer.zero_grad()
        kind.loss(model, step).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for parameter, first, second in zip(model.parameters(), *found, strict=True):
        parameter.grad = first + 0.5 * second
    optimizer.step()
    return weights(model)


def _put_gradients_placed_otherwise(kind: Kind, optimizer_of: Any) -> Any:
    """Products with sums over ranks, and what each rank holds a part of, are not in rows as parameters are."""
    model = kind.shard(net())
    optimizer = optimizer_of(model)
    for step in range(4):
        optimizer.zero_grad()
        kind.loss(model, step).backward()
        for index, parameter in enumerate(model.parameters()):
            grad = parameter.grad
            if index % 3 == 1:
                parameter.grad = grad * parameter.detach().sum()
            elif index % 3 == 2 and isinstance(grad, DTensor):
                mesh = grad.device_mesh
                part = grad.full_tensor() * (1 + mesh.get_rank()) / 3  # of two ranks
                parameter.grad = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
        optimizer.step()
    return weights(model)


@situation(strategies=ALL)
def gradients_are_put_that_are_placed_otherwise(kind: Kind) -> Any:
    return _put_gradients_placed_otherwise(kind, lambda model: kind.watched(sgd(model)))


@situation(strategies=ALL)
def gradients_are_put_that_are_placed_otherwise_for_a_flat_optimizer(kind: Kind) -> Any:
    return _put_gradients_placed_otherwise(kind, lambda model: flat_adamw(kind, model))


@situation(strategies=("no_shard", "optim_grads_params"))
def gradients_are_put_that_are_placed_otherwise_for_torchs_muon(kind: Kind) -> Any:
    model: Any = seeded(lambda: nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))))
    kind.shard(model, list(model))
    optimizer = kind.watched(torch.optim.Muon(model.parameters(), lr=0.01))
    for step in range(3):
        optimizer.zero_grad()
        model(kind.tensor(step, 4, 5)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * parameter.detach().sum()
        optimizer.step()
    return weights(model)


# ---- weights that the user unsharded --------------------------------------------------------------------------------


@situation()
def an_inner_module_runs_twice_while_the_root_is_unsharded(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    losses = []
    for step in range(2, 5):
        kind.unshard(model)
        loss = model.blocks[0](model.entry(kind.batch(step)[0])).square().mean()
        losses.append(kind.mean(loss))
        optimizer.zero_grad()
        loss.backward()
        kind.reshard(model)
        optimizer.step()
    return losses, weights(model)


@situation()
def a_layer_is_unsharded_before_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for block in model.blocks:
        kind.unshard(block)
    return train(kind, model, optimizer, range(3)), weights(model)


@situation()
def all_is_unsharded_and_then_trained(kind: Kind) -> Any:
    model, optimizer = _started(kind)
    for module in [*model.blocks, model]:
        kind.unshard(module)
    return train(kind, model, optimizer, range(2, 5)), weights(model)


@situation()
def what_was_unsharded_is_sharded_again_after_a_step(kind: Kind) -> Any:
    """So that what modules show is what the optimizer has written."""
    model = kind.shard(net())
    optimizer = sgd(model)
    for module in [*model.blocks, model]:
        kind.unshard(module)
    train(kind, model, optimizer, range(1))
    first = [kind.is_plain or isinstance(parameter, DTensor) for parameter in model.parameters()]
    kind.unshard(model.blocks[1])
    loss = kind.loss(model, 1)
    between = [kind.is_plain or isinstance(parameter, DTensor) for parameter in model.blocks.parameters()]
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return first, between, weights(model), train(kind, model, optimizer, range(2, 4)), weights(model)


@situation()
def a_block_is_unsharded_between_backward_and_forward(kind: Kind) -> Any:
    """Before the optimizer's step: the next forward uses what the step wrote."""
    model, optimizer = _started(kind)
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    parameters = list(model.parameters())
    kind.unshard(model.blocks[1])
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    optimizer.step()
    return train(kind, model, optimizer, range(3, 5)), weights(model)


@situation(strategies=("no_shard", "optim_grads_params"))
def a_block_is_unsharded_while_a_flat_optimizer_steps(kind: Kind) -> Any:
    """What its module shows after the step is what the step wrote."""
    model, optimizer = _started(kind, lambda model: flat_adamw(kind, model))
    optimizer.zero_grad()
    kind.loss(model, 2).backward()
    kind.unshard(model.blocks[1])
    optimizer.step()
    return weights(model), train(kind, model, optimizer, range(3, 5)), weights(model)


@situation()
def unsharded_weights_are_exported_between_steps(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    found = []
    for step in range(4):
        for module in [*model.blocks, model]:
            kind.unshard(module)
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        if step % 2:
            with torch.no_grad():
                found.append({"out": kind.mean(model(kind.batch(step)[0]).mean())})
        for module in [*model.blocks, model]:
            kind.reshard(module)
        train(kind, model, optimizer, range(step, step + 1))
    return found, weights(model)


@situation()
def unsharded_weights_stay_right_over_steps(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    losses = []
    for step in range(4):
        kind.unshard(model.blocks[1])
        losses += train(kind, model, optimizer, range(step, step + 1))
        kind.reshard(model.blocks[1])
    return losses, weights(model)


# ---- numbers of sharded tensors --------------------------------------------------------------------------------------


@situation(strategies=ALL)
def numbers_of_parameters_and_gradients(kind: Kind) -> Any:
    """On all ranks alike: the whole tensor's, not that of one rank's rows."""
    model = net()
    model.scale = nn.Parameter(torch.tensor([1.5]))
    kind.shard(model)
    kind.loss(model, 0).backward()
    found: list[Any] = []
    for tensor in (t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None):
        found += [tensor.sum().item(), float(tensor.norm()), float(tensor.norm(1)), tensor.mean().item()]
        found += [tensor.max().item(), int((tensor > 0).sum()), bool((tensor > 0.1).any()), bool((tensor > -9).all())]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return torch.tensor([*found, norm.item(), model.scale.item()]), grads(model)


# ---- writes in forward ----------------------------------------------------------------------------------------------


class _Clamping(nn.Linear):
    """A layer that writes to its own weight."""

    def __init__(self, write: Any) -> None:
        super().__init__(12, 12)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return super().forward(x)


class _Following(nn.Module):
    """A layer with a frozen target that follows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12))
        self.target = nn.Parameter(torch.randn(12, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.lerp_(self.weight, 0.5)
        return x @ self.weight + x @ self.target


def _writes_in_forward(kind: Kind, layer: Any) -> Any:
    model = seeded(lambda: nn.Sequential(layer(), nn.Linear(12, 2)))
    kind.shard(model, [model[0]])
    losses = train(
        kind, model, sgd(model), range(2), lambda model, step: model(kind.tensor(step, 4, 12)).square().mean()
    )
    return losses, weights(model)


_LOST = "forward must not write to the weights of its unit"


@situation(refuses=_LOST)
def a_layer_that_clamps_its_weight_in_forward(kind: Kind) -> Any:
    return _writes_in_forward(kind, lambda: _Clamping(lambda weight: weight.clamp_(-0.1, 0.1)))


@situation(refuses=_LOST)
def a_layer_that_scales_a_list_of_weights_in_forward(kind: Kind) -> Any:
    return _writes_in_forward(kind, lambda: _Clamping(lambda weight: torch._foreach_mul_([weight], 0.5)))


@situation(refuses=_LOST)
def a_frozen_weight_that_follows_in_forward(kind: Kind) -> Any:
    return _writes_in_forward(kind, _Following)


@situation(strategies=("no_shard", "optim", "optim_grads"))
def a_layer_that_clamps_weights_that_rest_whole(kind: Kind) -> Any:
    return _writes_in_forward(kind, lambda: _Clamping(lambda weight: weight.clamp_(-0.1, 0.1)))


# ---- what forward returns ------------------------------------------------------------------------------------------


class _Box:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _SlotBox(_Box):
    """As ``_Box``, but torch's pytree does not know it."""

    __slots__ = ()


register_pytree_node(_Box, lambda box: ([box.value], None), lambda values, _: _Box(*values))


class _Wrapping(nn.Module):
    """A layer that returns its output in something."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.second(torch.tanh(self.first(x))))


class _Unwrapping(nn.Module):
    def __init__(self, wrap: Any, unwrap: Any) -> None:
        super().__init__()
        self.layer, self.head, self.unwrap = _Wrapping(wrap), nn.Linear(6, 1), unwrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.unwrap(self.layer(x)))
        return out


def _wrapped(kind: Kind, wrap: Any, unwrap: Any) -> Any:
    model = seeded(lambda: _Unwrapping(wrap, unwrap))
    kind.shard(model, [model.layer])
    losses = train(
        kind, model, sgd(model), range(3), lambda model, step: model(kind.tensor(step, 4, 6)).square().mean()
    )
    return losses, weights(model)


def _nest(value: Any, times: int) -> Any:
    return [_nest(value, times - 1)] if times else value


def _unnest(value: Any) -> Any:
    return _unnest(value[0]) if isinstance(value, list) else value


@situation()
def an_output_in_a_deque(kind: Kind) -> Any:
    return _wrapped(kind, lambda out: deque([out]), lambda found: found[0])


@situation()
def an_output_in_a_registered_class(kind: Kind) -> Any:
    return _wrapped(kind, _Box, lambda found: found.value)


@situation()
def an_output_in_a_class_with_slots(kind: Kind) -> Any:
    return _wrapped(kind, _SlotBox, lambda found: found.value)


@situation()
def an_output_in_many_lists(kind: Kind) -> Any:
    return _wrapped(kind, lambda out: _nest(out, 12), _unnest)


# ---- two roots -----------------------------------------------------------------------------------------------------


def _actor_and_critic() -> Any:
    encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return nn.ModuleList([nn.Sequential(encoder, nn.Linear(6, outputs)) for outputs in (1, 2)])


def _train_in_turn(kind: Kind, both: Any) -> Any:
    optimizer = sgd(both)
    for step, which in enumerate((0, 0, 1, 0, 1, 1)):
        both[which](kind.tensor(step, 4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(both)


@situation(refuses=r"units must run under one root.*fully_shard_context")
def two_roots_with_one_encoder(kind: Kind) -> Any:
    both = seeded(_actor_and_critic)
    for unit in (both[0][0], both[0], both[1]):
        kind.shard_one(unit)
    return _train_in_turn(kind, both)


@situation()
def two_roots_with_one_encoder_in_one_context(kind: Kind) -> Any:
    both = seeded(_actor_and_critic)
    with fully_shard_context():
        for unit in (both[0][0], both[0], both[1]):
            kind.shard_one(unit)
    return _train_in_turn(kind, both)


# ---- inference mode ------------------------------------------------------------------------------------------------


def _sharded_in_inference_mode(kind: Kind, *, builds: bool) -> Any:
    model = None if builds else net()
    with torch.inference_mode():
        model = kind.shard(net() if model is None else model)
    if kind.is_plain:
        model = net()  # inference tensors cannot be trained
    return train(kind, model, sgd(model), range(3)), weights(model)


@situation()
def a_model_that_was_sharded_in_inference_mode(kind: Kind) -> Any:
    return _sharded_in_inference_mode(kind, builds=False)


@situation()
def a_model_that_was_built_and_sharded_in_inference_mode(kind: Kind) -> Any:
    return _sharded_in_inference_mode(kind, builds=True)
