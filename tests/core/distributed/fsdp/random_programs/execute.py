"""Runs a program on a process group with two models: sharded, and unsharded with all ranks' data.

[Note: amplified rounding] The order of sums over ranks and microbatches differs, so results differ by rounding, and training can amplify it: a
diverging program saturates its ``tanh`` until gradients lose a factor of a hundred in two updates. No fixed tolerance fits such programs and all
others. Where a deviation exceeds ``ROUNDING``, the program runs again on unsharded models whose weights move by one unit in the last place at the
start and after each update. The sharded model may then deviate by ``MARGIN`` times as much as these do in the same comparison. Several are needed
because the amplification often has one direction, in which a single random perturbation may have almost no component. All deviations are relative to
the largest magnitude of a tensor.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FlatAdamW, fully_shard, fully_shard_optimizer, hybrid_placements, microbatch
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from tests.core.distributed.fsdp.random_programs.draw import Operation, Program
from tests.core.distributed.fsdp.random_programs.model import (
    WIDTH,
    Block,
    BlockSpec,
    RandomModel,
    Trip,
    batch,
    build,
)
from tests.support.models import context_of, difference, local_of

ROUNDING = 2e-6
"""Deviation that is always allowed: about 16 units in the last place of fp32."""

NUM_PERTURBED = 8
MARGIN = 4.0
LIMIT = 1e-2
"""Largest deviation that is ever allowed: a program that amplifies rounding further must be looked at."""


class WrongError(AssertionError):
    """Results of the sharded model differ from the unsharded model's."""


class Side:
    """A model, its optimizer and the objects that a program keeps. This class is the unsharded model with all ranks' data."""

    is_sharded = False

    def __init__(self, program: Program, model: RandomModel) -> None:
        self.program, self.model = program, model
        self.environment = model.environment
        self.shard()
        self.optimizer = self.make_optimizer()
        self.losses: dict[int, torch.Tensor] = {}
        self.seen: list[float] = []
        self.kept: list[Any] = []
        self.saved: dict[str, Any] = {}
        self.saved_optimizer: Any = None
        joined = 2 if program.model.joined else 0  # a unit of several modules runs as a whole
        self.runs_alone = [at >= joined and block.is_unit for at, block in enumerate(program.model.blocks)]
        self.average: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    # ---- methods that the sharded side overrides ---------------------------------------------------------------------

    def shard(self) -> None:
        """Shard the model."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer over all trainable parameters."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind = self.program.optimizer
        if kind in ("sgd", "momentum"):
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0, weight_decay=0.01)
        # Use a large eps: otherwise a gradient of mere rounding errors would cause a full-size update.
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2, weight_decay=0.1, foreach=kind != "adamw_loop")

    def scope(self, is_first: bool | None, is_last: bool | None) -> contextlib.AbstractContextManager[None]:
        """A microbatch's scope; None: no scope."""
        return contextlib.nullcontext()

    def _loss(self, data: int) -> torch.Tensor:
        """The mean loss over all ranks' data."""
        losses = []
        for rank in range(dist.get_world_size()):
            self.environment.rank = rank
            losses.append(self._loss_on(data, rank))
            if rank == dist.get_rank():
                self.seen.append(float(losses[-1].detach()))
        return torch.stack(losses).mean()

    def _loss_on(self, data: int, rank: int) -> torch.Tensor:
        self.model.left_losses()
        tokens, classes = batch(data, rank)
        loss = nn.functional.cross_entropy(self.model(tokens), classes)
        for left in self.model.left_losses():
            loss = loss + 0.1 * left
        return loss

    def _keep(self, what: Any, keeps: str) -> None:
        """Keep something on all ranks or the first one, or leave it to the garbage collector."""
        is_first = dist.get_rank() == 0
        if keeps == "all" or (keeps == "first_rank" and is_first):
            self.kept.append(what)
        elif keeps == "circle" or (keeps == "first_circle" and is_first):
            circle: list[Any] = [what]
            circle.append(circle)

    def operate(self, name: str, arguments: dict[str, Any]) -> None:
        self.seen = []
        getattr(self, name)(**arguments)

    # ---- operations -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.environment.step += 1

    def microbatch(
        self,
        data: int,
        is_first: bool | None,
        is_last: bool | None,
        inside: tuple[Operation, ...],
        num_backwards: int,
        retains: bool,
    ) -> None:
        """Run forward, the operations in ``inside``, and one or two backwards, in one scope."""
        with self.scope(is_first, is_last):
            loss = self._loss(data)
            for name, arguments in inside:
                getattr(self, name)(**arguments)
            for at in range(num_backwards):
                loss.backward(retain_graph=retains or at < num_backwards - 1)
        if retains:
            self.losses[-1] = loss

    def forward(self, slot: int, data: int, is_last: bool | None) -> None:
        with self.scope(None, is_last):
            self.losses[slot] = self._loss(data)

    def backward(self, slot: int, retains: bool, is_last: bool | None) -> None:
        with self.scope(None, is_last):
            self.losses[slot].backward(retain_graph=retains)

    def backward_of_sum(self, slots: tuple[int, int]) -> None:
        sum(self.losses.pop(slot) for slot in slots).backward()

    def synchronize(self, on: bool) -> None:
        """Enable or disable gradient reduction in backward."""

    def update(self, clip: str) -> None:
        parameters = list(self.model.parameters())
        if clip in ("norm", "norm_loop"):
            norm = nn.utils.clip_grad_norm_(parameters, 0.3, foreach=clip == "norm")
            self.seen.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        elif clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.02)
        self.optimizer.step()

    def zero(self, set_to_none: bool, by: str) -> None:
        (self.model if by == "model" else self.optimizer).zero_grad(set_to_none=set_to_none)

    def evaluate(self, data: int, grad: str, is_eval: bool, keeps: str) -> None:
        if is_eval:
            self.model.eval()
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext}[grad]():
            loss = self._loss(data)
        self.model.train()
        self._keep(loss, keeps)

    def run_alone(self, index: int, data: int, grad: str, keeps: str) -> None:
        if not self.runs_alone[index]:
            return
        self.environment.rank = dist.get_rank()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(data))
        with torch.no_grad() if grad == "no_grad" else contextlib.nullcontext():
            out = self.model.blocks[index](x)
        self.model.left_losses()
        out = out["out"][0] if isinstance(out, dict) else out
        self.seen.append(float(out.detach().sum()))
        self._keep(out, keeps)

    def fail_forward(self, index: int, data: int, keeps: str, no_grad: bool) -> None:
        self.environment.trips_in = ("forward", index)
        try:
            with torch.no_grad() if no_grad else contextlib.nullcontext():
                self._loss(data)
        except Trip as trip:
            self._keep(trip, keeps)
        self.environment.trips_in = None

    def fail_backward(self, index: int, data: int, keeps: str, set_to_none: bool) -> None:
        """Fail in backward and clear all gradients: which gradients a failed backward leaves is undefined."""
        self.environment.trips_in = ("backward", index)
        loss = self._loss(data)
        self.environment.trips_in = None
        try:
            loss.backward()
        except Trip as trip:
            self._keep(trip, keeps)
        self.model.zero_grad(set_to_none=set_to_none)

    def reorder(self, order: tuple[int, ...]) -> None:
        self.model.order = list(order)

    def remove(self, index: int, keeps: str) -> None:
        is_flat = self.program.optimizer.startswith("flat")
        if is_flat and not self.runs_alone[index]:  # it needs all parameters of a unit
            return
        block = self.model.blocks[index]
        gone = {id(parameter) for parameter in block.parameters()}
        del self.model.blocks[index]
        del self.model.checkpoints[index], self.runs_alone[index]
        self.model.order = [at - (at > index) for at in self.model.order if at != index]
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
        for parameter in block.parameters():
            self.optimizer.state.pop(parameter, None)
        if is_flat:  # its parameter list is fixed
            self.optimizer = self.make_optimizer()
        self.optimizer.zero_grad()
        self._keep(block, keeps)

    def insert(self, block: BlockSpec, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = Block(block.kind, self.environment)
        if block.frozen:
            module.requires_grad_(False)
        self.shard_block(module, block.is_unit)
        self.model.blocks.append(module)
        self.model.checkpoints.append(block.checkpoint)
        self.runs_alone.append(True)
        self.model.order.append(len(self.model.blocks) - 1)
        self.optimizer = self.make_optimizer()

    def shard_block(self, module: Block, is_unit: bool) -> None:
        """Shard a block that is added later; it is always a unit."""

    def freeze(self, index: int, frozen: bool) -> None:
        self.model.blocks[index].requires_grad_(not frozen)
        for parameter in self.model.blocks[index].parameters():
            if not parameter.requires_grad:
                parameter.grad = None

    def recompute(self, index: int, mode: str) -> None:
        if self.model.blocks[index].kind in ("loss", "loss_inside", "left") and mode == "reentrant":
            mode = "plain"
        self.model.checkpoints[index] = mode

    def save(self, key: str, whole: bool) -> None:
        self.saved[key] = {
            name: (value.full_tensor() if whole and isinstance(value, DTensor) else value).detach().clone()
            for name, value in self.model.state_dict().items()
        }

    def load(self, key: str) -> None:
        if self.saved[key].keys() == self.model.state_dict().keys():
            self.model.load_state_dict(self.saved[key])

    def save_optimizer(self) -> None:
        self.saved_optimizer = self._optimizer_shapes(), copy.deepcopy(self.optimizer.state_dict())

    def load_optimizer(self) -> None:
        shapes, state = self.saved_optimizer
        if shapes == self._optimizer_shapes():
            self.optimizer.load_state_dict(copy.deepcopy(state))

    def _optimizer_shapes(self) -> list[torch.Size]:
        return [parameter.shape for group in self.optimizer.param_groups for parameter in group["params"]]

    def scale(self, factor: float, foreach: bool) -> None:
        with torch.no_grad():
            if foreach:
                torch._foreach_mul_(list(self.model.parameters()), factor)
            else:
                for parameter in self.model.parameters():
                    parameter.mul_(factor)

    def unshard(self, index: int | None) -> None:
        """Call ``unshard`` explicitly."""

    def reshard(self, index: int | None) -> None:
        """Call ``reshard`` explicitly."""

    def forget(self, first_rank: bool, collects: str) -> None:
        if not first_rank or dist.get_rank() == 0:
            self.kept.clear()
        if collects == "all" or (collects == "first_rank" and dist.get_rank() == 0):
            gc.collect()

    def start_average(self) -> None:
        """Start a thread that sums the weights while the step computes; it does not change the model."""
        # Not the model's parameters: after an explicit unshard those are whole weights, whose memory the next forward frees.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.average = [torch.zeros_like(parameter.detach()) for parameter in parameters]
        self._stops.clear()

        def add_up() -> None:
            for _ in range(20):
                with torch.no_grad():
                    for total, parameter in zip(self.average, parameters, strict=True):
                        total.mul_(0.5).add_(parameter.detach(), alpha=0.5)
                if self._stops.wait(0.0):
                    break

        self._thread = threading.Thread(target=add_up)
        self._thread.start()

    def join_average(self) -> None:
        self._stops.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self.average = None, []


class PerturbedSide(Side):
    """The unsharded model with weights that move by one unit in the last place. See [Note: amplified rounding]."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program, build(program.model))
        self._generator = torch.Generator().manual_seed(seed)
        self._perturb()

    def update(self, clip: str) -> None:
        super().update(clip)
        self._perturb()

    @torch.no_grad()
    def _perturb(self) -> None:
        for parameter in self.model.parameters():
            goes_up = torch.rand(parameter.shape, generator=self._generator) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(goes_up, torch.inf, -torch.inf)))


class ShardedSide(Side):
    """The sharded model, with this rank's data."""

    is_sharded = True

    def shard(self) -> None:
        self._settings: dict[str, Any] = {"placements": strategy_placements(self.program.strategy)}
        if self.program.outer is not None:
            axes = ("outer", "inner")
            self._settings = {
                "mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=axes),
                "placements": hybrid_placements(self.program.strategy, self.program.outer, axes),
            }
        spec, blocks = self.program.model, list(self.model.blocks)
        self.environment.recomputes, self.environment.rank = True, dist.get_rank()
        for block in blocks:
            self._shard_inner(block)
        if spec.joined:
            fully_shard(blocks[:2], **self._settings)
        for block, of in list(zip(blocks, spec.blocks, strict=True))[2 if spec.joined else 0 :]:
            if of.is_unit:
                fully_shard(block, **self._settings)
        fully_shard(self.model, **self._settings)
        if self.program.poisons:
            context_of(self.model).change_options(poisons=True)

    def _shard_inner(self, block: Any) -> None:
        if block.kind == "nested":
            fully_shard(block.inner, **self._settings)

    def shard_block(self, module: Block, is_unit: bool) -> None:
        self._shard_inner(module)
        fully_shard(module, **self._settings)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.program.optimizer.startswith("flat"):
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            overlaps = self.program.optimizer == "flat_overlapped"
            return FlatAdamW(parameters, lr=0.01, eps=1e-2, weight_decay=0.1, overlaps_forward=overlaps)
        optimizer = super().make_optimizer()
        return fully_shard_optimizer(optimizer) if self.program.watched else optimizer

    def scope(self, is_first: bool | None, is_last: bool | None) -> contextlib.AbstractContextManager[None]:
        if is_last is None:
            return contextlib.nullcontext()
        return microbatch(self.model, is_first=is_first, is_last=is_last)

    def _loss(self, data: int) -> torch.Tensor:
        loss = self._loss_on(data, dist.get_rank())
        self.seen.append(float(loss.detach()))
        return loss

    def synchronize(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def update(self, clip: str) -> None:
        super().update(clip)
        if isinstance(self.optimizer, FlatAdamW):
            self.optimizer.synchronize()

    def _unit(self, index: int | None) -> Any:
        module: Any = self.model if index is None else self.model.blocks[index]
        return module if hasattr(module, "unshard") else self.model

    def unshard(self, index: int | None) -> None:
        self._unit(index).unshard()

    def reshard(self, index: int | None) -> None:
        self._unit(index).reshard()


class Run:
    """A program on both sides, and on perturbed ones where they are needed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.plain = Side(program, build(program.model))
        self.sharded = ShardedSide(program, build(program.model))
        self.sides: list[Side] = [self.plain, self.sharded]
        self._num_done = 0

    def operate(self, name: str, arguments: dict[str, Any]) -> None:
        """Run an operation on both sides, and compare the results that need no communication.

        Raises:
            WrongError: results differ.
        """
        if name == "update":
            self._compare(self._gradients)
        for side in self.sides:
            side.operate(name, arguments)
        self._num_done += 1
        self._compare(self._seen)
        if name in ("update", "load", "scale", "load_optimizer"):
            self._compare(self._weights)

    def _compare(self, deviations: Callable[[Side], Iterator[tuple[str, float]]]) -> None:
        """Compare a side's (name, deviation) pairs with what rounding explains. See [Note: amplified rounding]."""
        unequal = [(name, deviation) for name, deviation in deviations(self.sharded) if not deviation <= ROUNDING]
        if not unequal:
            return
        amplified = max(deviation for side in self._perturbed() for _, deviation in deviations(side))
        allowed = min(max(ROUNDING, MARGIN * amplified), LIMIT)
        for name, deviation in unequal:
            if not deviation <= allowed:
                raise WrongError(f"{name} differs by {deviation:.2g} of the largest, {allowed:.2g} is allowed")

    def _perturbed(self) -> list[Side]:
        """Return the perturbed sides, which have run as far as the others."""
        if len(self.sides) == 2:
            for seed in range(NUM_PERTURBED):
                side = PerturbedSide(self.program, seed)
                self.sides.append(side)
                for name, arguments in self.program.operations[: self._num_done]:
                    side.operate(name, arguments)
        return self.sides[2:]

    def _seen(self, side: Side) -> Iterator[tuple[str, float]]:
        for expected, got in zip(self.plain.seen, side.seen, strict=True):
            yield "a loss, output or norm", abs(got - expected) / max(1.0, abs(expected))

    def _pairs(self, side: Side) -> Iterator[tuple[str, Any, Any]]:
        expected = dict(self.plain.model.named_parameters())
        got = dict(side.model.named_parameters())
        if expected.keys() != got.keys():
            raise WrongError(f"names differ: {expected.keys() ^ got.keys()}")
        for name, parameter in expected.items():
            yield name, parameter, got[name]

    def _gradients(self, side: Side) -> Iterator[tuple[str, float]]:
        scale = max(
            (float(p.grad.abs().max()) for p in self.plain.model.parameters() if p.grad is not None), default=0.0
        )
        for name, expected, got in self._pairs(side):
            if (expected.grad is None) != (got.grad is None):
                has, lacks = ("unsharded", "sharded") if got.grad is None else ("sharded", "unsharded")
                raise WrongError(f"{name} has a gradient {has}, and none {lacks}")
            if expected.grad is not None:
                yield f"gradient of {name}", _deviation(got, got.grad, expected.grad, 0.1 * scale)

    def _weights(self, side: Side) -> Iterator[tuple[str, float]]:
        for name, expected, got in self._pairs(side):
            yield name, _deviation(got, got, expected.detach(), 0.01)  # one number may come close to zero


def _deviation(parameter: Any, got: Any, expected: torch.Tensor, floor: float) -> float:
    rows = local_rows(parameter, expected) if isinstance(parameter, DTensor) else expected
    return difference(local_of(got), rows, scale=torch.clamp(expected.abs().max(), min=max(floor, 1e-30)))


REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)


def execute(program: Program) -> tuple[str, str]:
    """Run the program and return (word, detail): "equal", "refused", "wrong" or "crash". Ranks: all.

    The caller compares the ranks' results, and so detects errors that only some ranks raise.
    """
    at = "start"
    run = None
    try:
        run = Run(program)
        for index, (name, arguments) in enumerate(program.operations):
            at = f"{index} {name}"
            run.operate(name, arguments)
    except WrongError as error:
        return "wrong", f"[{at}] {error}"
    except REFUSALS as error:
        return "refused", f"[{at}] {type(error).__name__}: {error}"
    except Exception as error:
        return "crash", f"[{at}] {type(error).__name__}: {error}"
    finally:
        if run is not None:
            for side in run.sides:
                side.join_average()
    return "equal", ""
