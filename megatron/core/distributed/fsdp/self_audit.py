"""Self-audit: train a few steps sharded and unsharded on the same data, and name the first number that differs.

The reference is the plain module in one process, in the dtypes in which the sharded one computes, without any code of the
engine but its casts of inputs and outputs. After gradients have been compared, the
sharded optimizer steps with the reference's: so rounding that an optimizer blows up (Adam divides by sizes of gradients)
is no difference of weights, and tolerances can be those of one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megatron.core.distributed.fsdp.api.module import FsdpModule, microbatch
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.checks.order_errors import OrderDiffersError
from megatron.core.distributed.fsdp.dtensor.placements import local_rows, memory_of
from megatron.core.distributed.fsdp.fsdp2.casts import cast_inputs_and_outputs
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard
from megatron.core.module_names import named_parameters, whole_names

_FP32_TOLERANCE = 1e-5
"""Of a tensor's size. Sums over ranks and microbatches have another order than in one process: a few roundings of 6e-8."""

_LOW_TOLERANCE = 2e-2
"""The same where a dtype of weights, gradients or their communication has less precision: bf16 rounds at 4e-3."""

_SMALL = 1e-2
"""A gradient is compared relative to its own size or to this share of the whole model's, if that is more: gradients that
are zero but for rounding (biases in front of a normalisation) differ by all of their size."""

_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number of the sharded run that is not the unsharded run's."""

    step: int
    """0: before the first step."""

    what: str
    """"order" (of collectives), "loss", "gradient", "weight" or "buffer"."""

    name: str
    """Of the parameter or buffer; of a loss the microbatch; of an order what the engine says."""

    size: float
    """Size of the difference by that of the expected tensor (of a weight: by that of its update)."""

    factor: float | None = None
    """What the expected tensor is multiplied by, where that explains a gradient."""

    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        on = f"on rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "on all ranks"
        size = "is missing" if self.size == math.inf else f"differs by {self.size:.2g} times its size"
        about = "" if self.factor is None else f": it is {self.factor:.4g} times what it must be"
        when = f"in step {self.step}" if self.step else "before the first step"
        if self.what == "order":
            return f"{when} {self.name}"
        return f"{when} the {self.what} {self.name} {size} {on}{about}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    num_steps: int
    """Steps that were compared, the last one included."""

    differences: tuple[Difference, ...] = ()
    """Those of the first kind of number that differs, in the order of the model; empty where all are equal."""

    largest: Mapping[str, float] = field(default_factory=dict)
    """The largest difference seen, by kind of number."""

    @property
    def passed(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        if self.passed:
            sizes = ", ".join(f"{what} {size:.1e}" for what, size in self.largest.items())
            return f"sharded and unsharded training agree in {self.num_steps} steps; largest differences: {sizes}"
        first, *others = map(str, self.differences[:_NAMES_SHOWN])
        hidden = len(self.differences) - len(others) - 1
        lines = [f"sharded training differs from unsharded: {first}", *(f"    also {line}" for line in others)]
        return "\n".join([*lines, f"    and {hidden} more"] if hidden else lines)


class Reference:
    """A plain model with main weights of their own dtypes, as the optimizer sees them.

    Args:
        model: trained unsharded; changed in place.
        main_dtypes: of each main weight, by the parameter's name.
        compute_dtypes: of parameters in forward, by name; those that they have where none is named.

    Attributes:
        mains: main weight by name; the model's own parameter where the dtypes match.
    """

    def __init__(
        self,
        model: nn.Module,
        main_dtypes: Mapping[str, torch.dtype],
        compute_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.model = model
        self.mains: dict[str, nn.Parameter] = {}
        self._cast: list[tuple[nn.Parameter, nn.Parameter]] = []
        compute_dtypes = compute_dtypes or {}
        for name, parameter in named_parameters(model):
            values = parameter.detach()
            parameter.data = values.to(compute_dtypes.get(name, parameter.dtype))
            if parameter.dtype == main_dtypes[name]:
                self.mains[name] = parameter
                continue
            main = nn.Parameter(values.to(main_dtypes[name]), requires_grad=parameter.requires_grad)
            main.__dict__.update(parameter.__dict__)  # what optimizers ask parameters for
            self.mains[name] = main
            self._cast.append((parameter, main))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add a backward's gradients to those of the main weights, in their dtype."""
        for parameter, main in self._cast:
            if parameter.grad is not None:
                own = parameter.grad.to(main.dtype)
                main.grad = own if main.grad is None else main.grad + own
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Write the main weights to the model."""
        for parameter, main in self._cast:
            parameter.copy_(main)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the main weights' gradients by name."""
        return {name: main.grad for name, main in self.mains.items() if main.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the main weights by name."""
        return {name: main.detach().clone() for name, main in self.mains.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers by name."""
        return _named_buffers(self.model)


class Comparison:
    """Compares the parts that this rank holds of a sharded model with whole tensors of the reference.

    Args:
        model: sharded.
        tolerance: of differences relative to a tensor's size; None: what the dtypes of each parameter group are worth.
        ignore: names of parameters and buffers that are not compared, with wildcards.

    Attributes:
        step: the one under way, from 1; 0 before training.

    Ranks: each by itself, but for ``agree``.
    """

    def __init__(self, model: nn.Module, *, tolerance: float | None = None, ignore: Sequence[str] = ()) -> None:
        self.model, self._tolerance, self._ignore = model, tolerance, tuple(ignore)
        self.step = 0
        self.largest: dict[str, float] = {}
        self._found: list[Difference] = []
        self._last: Mapping[str, torch.Tensor] = {}
        self._parameters: dict[str, Any] = {
            getattr(parameter, "canonical_name", name): parameter
            for name, parameter in named_parameters(model)
            if not self._is_ignored(name)
        }

    @property
    def main_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each main weight, by the parameter's name."""
        return {name: parameter.dtype for name, parameter in named_parameters(self.model)}

    @property
    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each weight in forward, by the parameter's name."""
        groups = {name: group_of(parameter) for name, parameter in named_parameters(self.model)}
        return self.main_dtypes | {name: group.dtypes.compute for name, group in groups.items() if group is not None}

    @contextmanager
    def noting_order(self) -> Iterator[None]:
        """Take it for a difference, within the scope, when the engine finds that ranks run units in different orders."""
        try:
            yield
        except OrderDiffersError as error:
            self._found.append(Difference(step=self.step, what="order", name=str(error), size=math.inf))

    def losses(self, got: Sequence[float], expected: Sequence[float]) -> None:
        """Compare losses."""
        tolerance = max(map(self._allowed, self._parameters.values()), default=_FP32_TOLERANCE)
        for index, (own, true) in enumerate(zip(got, expected, strict=True)):
            size = abs(own - true) / max(abs(true), 1e-30)
            name = "" if len(got) == 1 else f"of microbatch {index + 1} "
            self._add("loss", f"{name}({own:.7g} instead of {true:.7g})", size, tolerance)

    @torch.no_grad()
    def gradients(self, expected: Mapping[str, torch.Tensor | None]) -> None:
        """Compare ``param.grad``, and overwrite it by what was expected."""
        norms = {name: float(whole.float().norm()) for name, whole in expected.items() if whole is not None}
        least = _SMALL * math.hypot(*norms.values())
        for name, parameter in self._parameters.items():
            whole, grad = expected.get(name), parameter.grad
            if whole is None or grad is None:
                if whole is not None and norms[name] > 0:
                    self._add("gradient", name, math.inf, 0.0)
                elif grad is not None and _local(grad).any():
                    self._add("gradient", f"{name} (none is expected)", math.inf, 0.0)
                continue
            rows = self._rows(name, parameter, whole)
            self._compare("gradient", name, _local(grad), rows, max(norms[name], least), self._allowed(parameter))
            _local(grad).copy_(rows)

    @torch.no_grad()
    def weights(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare main weights, after the first time by what a step has changed in them; ``expected`` must not change."""
        for name, parameter in self._parameters.items():
            if name not in expected:
                self._add("weight", f"{name} (the unsharded model has none)", math.inf, 0.0)
                continue
            whole = expected[name].float()
            norm = float(whole.norm())
            update = float((whole - self._last[name].float().to(whole.device)).norm()) if name in self._last else norm
            # Weights are rounded in each step: what that may cost is no share of an update, which may be tiny.
            rounding = 4 * (self.step + 1) * torch.finfo(parameter.dtype).eps * norm
            scale = max(update, 1e-30)
            rows = self._rows(name, parameter, whole)
            allowed = self._allowed(parameter) + rounding / scale
            self._compare("weight", name, _local(parameter), rows, scale, allowed)
        self._last = expected

    @torch.no_grad()
    def buffers(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare buffers, where the reference has one of that name."""
        for name, buffer in _named_buffers(self.model).items():
            if name not in expected or self._is_ignored(name):
                continue
            own, true = buffer.float(), expected[name].to(buffer.device).float()
            if torch.equal(own, true):
                continue
            norm = float(true.nan_to_num(posinf=0.0, neginf=0.0).norm())
            self._compare("buffer", name, own, true, max(norm, 1e-30), self._tolerance or _FP32_TOLERANCE)

    def agree(self, group: ProcessGroup | None = None) -> tuple[Difference, ...]:
        """Return what differs on any rank, of the first kind of number that does. Ranks: all of the group; blocks."""
        everywhere: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, (self._found, list(self._parameters)), group=group)
        self._found = []
        kinds = ("order", "loss", "gradient", "weight", "buffer")
        found = [(one, rank) for rank, (of_rank, _) in enumerate(everywhere) for one in of_rank]
        held = {name for _, names in everywhere for name in names}
        lost = (name for name in self._last if name not in held and not self._is_ignored(name))
        found += [(Difference(step=self.step, what="weight", name=name, size=math.inf), -1) for name in lost]
        first = min((kinds.index(one.what) for one, _ in found), default=-1)
        merged: dict[str, Difference] = {}
        for one, rank in found:
            if one.what == kinds[first]:
                known = merged.get(one.name, one)
                larger = max(known, one, key=lambda d: d.size)
                merged[one.name] = replace(larger, ranks=(*known.ranks, *([rank] if rank >= 0 else [])))
        order = {name: at for at, name in enumerate(self._parameters)}
        return tuple(sorted(merged.values(), key=lambda one: order.get(one.name, len(order))))

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._ignore)

    def _allowed(self, parameter: nn.Parameter) -> float:
        if self._tolerance is not None:
            return self._tolerance
        group = group_of(parameter)
        dtypes = [parameter.dtype]
        if group is not None:
            dtypes += [group.dtypes.compute, group.dtypes.grad_comm, group.dtypes.main_grads]
        return _LOW_TOLERANCE if min(dtype.itemsize for dtype in dtypes) < 4 else _FP32_TOLERANCE

    def _rows(self, name: str, parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        if whole.shape != parameter.shape:
            raise ValueError(
                f"the reference of {name} must have the sharded parameter's shape {list(parameter.shape)}, got "
                f"{list(whole.shape)}; a model that is split in addition to data parallelism is audited from its command line: "
                "python tools/audit.py -- torchrun ... pretrain_gpt.py ..."
            )
        rows = local_rows(parameter, whole) if isinstance(parameter, DTensor) else whole
        return rows.to(parameter.device)

    def _compare(
        self, what: str, name: str, own: torch.Tensor, true: torch.Tensor, scale: float, tolerance: float
    ) -> None:
        got, expected = own.float(), true.float()
        difference = float((got - expected).norm())
        factor = None
        if what == "gradient" and difference > 0:
            multiple = float((got * expected).sum()) / max(float(expected.square().sum()), 1e-30)
            left = float((got - multiple * expected).norm())
            factor = multiple if left < _LOW_TOLERANCE * difference else None
        self._add(what, name, difference / scale, tolerance, factor)

    def _add(self, what: str, name: str, size: float, tolerance: float, factor: float | None = None) -> None:
        self.largest[what] = max(self.largest.get(what, 0.0), size)
        if not size <= tolerance:  # NaN too
            self._found.append(Difference(step=self.step, what=what, name=name, size=size, factor=factor))


def audit(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    shard: Callable[[nn.Module], Any] = fully_shard,
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    num_microbatches: int = 1,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    group: ProcessGroup | None = None,
) -> AuditReport:
    """Train a model sharded and unsharded on the same data, and report the first number that differs.

    Compared are, in each step, the losses of this rank's microbatches, then its parts of all gradients, weights and
    buffers. The unsharded model is trained on all ranks' batches, on each rank by itself: it must fit there. Its gradient
    is the mean over ranks and microbatches. Dropout is the same in both: it is seeded for each microbatch and rank.

    Args:
        build_model: returns the model with weights, in the dtypes that it is sharded in, not yet sharded; called twice.
        batches: [steps * num_microbatches] this rank's, in order; at least three steps, since the engine plans in the
            second.
        loss: (model, batch) -> scalar loss of a microbatch.
        shard: calls ``fully_shard`` on the model's units and the model as the run to be audited does, or wraps it in
            place; returns what ``loss`` is to call, or None for the model itself.
        build_optimizer: makes a ``torch.optim`` optimizer of the parameters, sharded or not; None: SGD.
        tolerance: of differences relative to the size of a tensor; None: what the dtypes are worth.
        ignore: names of parameters and buffers that are not compared, with wildcards ("*.running_mean").
        group: the ranks that train on different data; None: all.

    Raises:
        ValueError: ranks have different numbers of batches, or no whole number of steps; weights are on the meta device,
            or the model is split in addition to data parallelism.

    Ranks: all of ``group``; blocks. Random generators are as before afterwards.
    """
    data, rank = _all_batches(batches, num_microbatches, group), dist.get_rank(group)
    model = build_model()
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("build_model must return weights, got some on the meta device; build it on a device here")
    plain = _with_first_ranks_values(build_model(), model, group)
    buffers = {name: buffer.clone() for name, buffer in _named_buffers(plain).items()}
    sharded = shard(model)
    sharded = model if sharded is None else sharded
    comparison = Comparison(model, tolerance=tolerance, ignore=ignore)
    reference = Reference(plain, comparison.main_dtypes, comparison.compute_dtypes)
    _cast_alike(plain, model)
    make = build_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizers = [fully_shard_optimizer(make(sharded.parameters())), make(reference.mains.values())]
    comparison.weights(reference.weights())
    comparison.buffers(buffers)
    found = comparison.agree(group)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        while not found and comparison.step < len(batches) // num_microbatches:
            step = range(comparison.step * num_microbatches, (comparison.step + 1) * num_microbatches)
            comparison.step += 1
            everyone = range(len(data))
            expected = _backwards(
                partial(loss, plain), data, step, everyone, device, lambda _: _accumulating(reference)
            )
            with comparison.noting_order():
                got = _backwards(partial(loss, sharded), data, step, [rank], device, partial(_microbatch, model, step))
                comparison.losses(got[0].tolist(), expected[rank].tolist())
                comparison.gradients(reference.gradients())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                reference.publish()
                comparison.weights(reference.weights())
                comparison.buffers(reference.buffers())
            found = comparison.agree(group)
    return AuditReport(num_steps=comparison.step, differences=found, largest=comparison.largest)


def _named_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers by their names in the whole model."""
    whole = whole_names(model)
    return {whole(name): buffer for name, buffer in model.named_buffers()}


def _cast_alike(plain: nn.Module, model: nn.Module) -> None:
    """Let modules of ``plain`` cast their inputs and outputs as the units of ``model`` do under the same names."""
    others = dict(plain.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, FsdpModule) and name in others:
            cast_inputs_and_outputs(others[name], module._fsdp_unit.origin.policy)


def _backwards(
    loss: Callable[[Any], torch.Tensor],
    data: Sequence[Sequence[Any]],
    step: range,
    ranks: Sequence[int],
    device: torch.device,
    scope: Callable[[int], AbstractContextManager[None]],
) -> torch.Tensor:
    """Run the microbatches of these ranks, each in its scope; return their losses [ranks, microbatches]."""
    losses = torch.zeros(len(ranks), len(step), device=device)
    for index, at in enumerate(step):
        for row, rank in enumerate(ranks):
            torch.manual_seed(at * len(data) + rank)
            with scope(at):
                own = loss(_to(data[rank][at], device))
                (own / losses.numel()).backward()
            losses[row, index] = own.detach()
    return losses


@contextmanager
def _accumulating(reference: Reference) -> Iterator[None]:
    yield
    reference.accumulate()


def _microbatch(model: nn.Module, step: range, at: int) -> AbstractContextManager[None]:
    return microbatch(model, is_first=at == step[0], is_last=at == step[-1])


def _all_batches(batches: Sequence[Any], num_microbatches: int, group: ProcessGroup | None) -> list[list[Any]]:
    """Return the batches of all ranks [ranks][batches], on the CPU."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, [_to(batch, torch.device("cpu")) for batch in batches], group=group)
    lengths = [len(of_rank) for of_rank in everywhere]
    if len(set(lengths)) > 1 or not lengths[0] or lengths[0] % num_microbatches:
        raise ValueError(
            f"all ranks must have the batches of one or more whole steps of {num_microbatches} microbatches, got {lengths} "
            "batches by rank"
        )
    return everywhere


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


@torch.no_grad()
def _with_first_ranks_values(plain: nn.Module, model: nn.Module, group: ProcessGroup | None) -> nn.Module:
    """Give ``plain`` the weights and buffers of ``model`` on the group's first rank. Ranks: all of the group."""
    pairs = zip((*plain.parameters(), *plain.buffers()), (*model.parameters(), *model.buffers()), strict=True)
    for own, other in pairs:
        whole = other.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(whole, group=group, group_src=0)
        own.copy_(whole)
    return plain


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds; a plain tensor as it is."""
    return (memory_of(tensor._local_tensor, writes=False) if isinstance(tensor, DTensor) else tensor).detach()
