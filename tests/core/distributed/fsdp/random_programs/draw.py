"""Random programs from a seed: a model, how it is sharded, and the operations on it. The repr of a program is valid Python."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.core.distributed.fsdp.random_programs.model import CHECKPOINTS, KINDS, BlockSpec, ModelSpec

Operation = tuple[str, dict[str, Any]]
"""The name and arguments of a method of ``execute.Side`` or ``execute.Run``."""

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params", "optim_grads_params")
OUTER_STRATEGIES = ("no_shard", "optim")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw_loop", "flat", "flat_overlapped")
# Blocks that store a tensor for later. A reentrant checkpoint would detach it, unlike the unsharded model, which has no checkpoints.
_NOT_REENTRANT = ("loss", "loss_inside", "left")


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how it is trained, and the operations.

    Args:
        outer: how the outer axis is used; None for a mesh with one axis.
        watched: whether the optimizer is given to ``fully_shard_optimizer``.
        poisons: whether memory is filled with NaN when it is released.
    """

    seed: int
    num_ranks: int
    model: ModelSpec
    strategy: str
    outer: str | None
    optimizer: str
    watched: bool
    poisons: bool
    operations: tuple[Operation, ...]


def draw(seed: int, num_ranks: int) -> Program:
    """Return the program for a seed."""
    return _Draw(seed, num_ranks).program()


class _Draw:
    def __init__(self, seed: int, num_ranks: int) -> None:
        self._seed, self._num_ranks = seed, num_ranks
        self._random = random.Random(seed)
        self._operations: list[Operation] = []
        self._data = 100
        self._saved: list[str] = []
        self._saves_optimizer = False
        self._num_blocks = 0
        self._average = False
        self._selects = self._chance(0.25)  # torch refuses a second backward through selective checkpoints

    def program(self) -> Program:
        choice = self._random.choice
        model = self._model()
        self._num_blocks = len(model.blocks)
        for _ in range(self._random.randint(3, 7)):
            self._step()
        return Program(
            self._seed,
            self._num_ranks,
            model,
            choice(STRATEGIES),
            choice(OUTER_STRATEGIES) if self._num_ranks == 4 else None,
            choice(OPTIMIZERS),
            self._chance(0.8),
            self._chance(0.7),
            tuple(self._operations),
        )

    # ---- model ----------------------------------------------------------------------------------------------------

    def _model(self) -> ModelSpec:
        blocks = tuple(self._block() for _ in range(self._random.randint(2, 4)))
        order = list(range(len(blocks)))
        if self._chance(0.25):
            order.insert(self._random.randrange(len(order) + 1), self._random.randrange(len(blocks)))
        num_heads = self._random.choice((1, 1, 2))
        return ModelSpec(
            blocks,
            tuple(order),
            self._chance(0.3),
            num_heads,
            num_heads == 2 and self._chance(0.6),
            self._chance(0.15),
            self._random.randrange(1000),
        )

    def _block(self) -> BlockSpec:
        kind = self._random.choice(KINDS)
        recomputed = self._random.choice(("none", "none", *self._checkpoints()))
        if kind in _NOT_REENTRANT and recomputed == "reentrant":
            recomputed = "plain"
        return BlockSpec(kind, recomputed, self._chance(0.85), self._chance(0.12))

    def _checkpoints(self) -> tuple[str, ...]:
        return CHECKPOINTS if self._selects else CHECKPOINTS[:-1]

    # ---- operations -----------------------------------------------------------------------------------------------

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _add(self, name: str, **arguments: Any) -> None:
        self._operations.append((name, arguments))

    def _next_data(self) -> int:
        self._data += 1
        return self._data

    def _step(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 1, 2))):
            self._random.choice(self._between)(self)
        if self._chance(0.03):  # the next forward starts with unsharded weights
            self._add("unshard", index=self._any_block())
        self._add("begin_step")
        if self._chance(0.1):
            self._add("start_average")
            self._average = True
        while True:
            self._random.choice(self._within)(self)
            if self._chance(0.75):
                break
        self._random.choice(self._final)(self)
        if self._chance(0.15):
            self._around()
        if self._average:
            self._add("join_average")
            self._average = False
        if self._chance(0.05):
            self._add("zero", set_to_none=self._chance(0.5), by=self._random.choice(("model", "optimizer")))
        else:
            clip = self._random.choice(("none", "none", "norm", "norm_loop", "value"))
            self._add("update", clip=clip)
            if self._chance(0.95):
                self._add("zero", set_to_none=self._chance(0.6), by=self._random.choice(("model", "optimizer")))

    # Operations before a step.

    def _evaluate(self) -> None:
        grad = self._random.choice(("no_grad", "no_grad", "grad", "inference"))
        keeps = self._random.choice(("none", "none", "first_rank", "all", "circle", "first_circle"))
        self._add("evaluate", data=self._next_data(), grad=grad, is_eval=self._chance(0.5), keeps=keeps)

    def _reorder(self) -> None:
        order = list(range(self._num_blocks))
        self._random.shuffle(order)
        if len(order) > 1 and self._chance(0.4):
            order.pop()
        if self._chance(0.2):
            order.append(order[0])
        self._add("reorder", order=tuple(order))

    def _remove(self) -> None:
        if self._num_blocks > 1:
            self._num_blocks -= 1
            keeps = self._random.choice(("none", "first_rank", "all", "circle"))
            self._add("remove", index=self._random.randrange(self._num_blocks + 1), keeps=keeps)

    def _insert(self) -> None:
        self._add("insert", block=self._block(), seed=self._random.randrange(1000))
        self._num_blocks += 1

    def _freeze(self) -> None:
        self._add("freeze", index=self._random.randrange(self._num_blocks), frozen=self._chance(0.5))

    def _save(self) -> None:
        self._saved.append(f"s{len(self._saved)}")
        self._add("save", key=self._saved[-1], whole=self._chance(0.5))

    def _load(self) -> None:
        if self._saved:
            self._add("load", key=self._random.choice(self._saved))

    def _optimizer_state(self) -> None:
        self._add("load_optimizer" if self._saves_optimizer else "save_optimizer")
        self._saves_optimizer = True

    def _scale(self) -> None:
        self._add("scale", factor=self._random.choice((0.5, 0.9, 1.1)), foreach=self._chance(0.4))

    def _by_hand(self) -> None:
        index = self._any_block()
        self._add("unshard", index=index)
        self._add("reshard", index=index)

    def _any_block(self) -> int | None:
        """Return a block's index, or None for the whole model."""
        return self._random.choice((None, self._random.randrange(self._num_blocks)))

    def _checkpoint(self) -> None:
        index = self._random.randrange(self._num_blocks)
        self._add("recompute", index=index, mode=self._random.choice(self._checkpoints()))

    def _forget(self) -> None:
        self._add("forget", first_rank=self._chance(0.5), collects=self._random.choice(("none", "first_rank", "all")))

    def _alone(self) -> None:
        index = self._random.randrange(self._num_blocks)
        grad, keeps = self._random.choice(("no_grad", "grad")), self._random.choice(("none", "first_rank", "all"))
        self._add("run_alone", index=index, data=self._next_data(), grad=grad, keeps=keeps)

    def _fail_forward(self) -> None:
        index = self._random.randrange(self._num_blocks)
        keeps = self._random.choice(("none", "first_rank", "all", "circle"))
        self._add("fail_forward", index=index, data=self._next_data(), keeps=keeps, no_grad=self._chance(0.2))

    _between = (
        _evaluate,
        _evaluate,
        _reorder,
        _remove,
        _insert,
        _freeze,
        _save,
        _load,
        _load,
        _optimizer_state,
        _scale,
        _by_hand,
        _checkpoint,
        _forget,
        _alone,
        _fail_forward,
    )

    # Parts of a step.

    def _around(self) -> None:
        """Add operations that do not change gradients."""
        self._random.choice((_Draw._evaluate, _Draw._alone, _Draw._fail_forward, _Draw._forget))(self)

    def _microbatch(self, *, is_last: bool | None = None, is_first: bool | None = None) -> None:
        inside: tuple[Operation, ...] = ()
        if self._chance(0.1):
            self._around()
            inside = (self._operations.pop(),)
        num_backwards = 2 if self._chance(0.15) and not self._selects else 1
        self._add(
            "microbatch",
            data=self._next_data(),
            is_first=is_first,
            is_last=is_last,
            inside=inside,
            num_backwards=num_backwards,
            retains=self._chance(0.05),
        )

    def _accumulate(self) -> None:
        for _ in range(self._random.randint(0, 2)):
            self._microbatch()
            if self._chance(0.1):
                self._around()

    def _accumulate_in_scopes(self) -> None:
        """Leave gradients unreduced; the last microbatch comes afterwards."""
        tells_first = self._operations[-1][0] in ("begin_step", "start_average") and self._chance(0.4)
        for at in range(self._random.randint(1, 2)):
            self._microbatch(is_last=False, is_first=(at == 0) if tells_first else None)
            if self._chance(0.1):
                self._around()

    def _pipeline(self) -> None:
        """Two forwards, then two backwards."""
        is_last = self._random.choice((None, None, False))
        for slot in (1, 2):
            self._add("forward", slot=slot, data=self._next_data(), is_last=is_last)
            if self._chance(0.1):
                self._around()
        for slot in self._random.choice(((1, 2), (2, 1))):
            self._add("backward", slot=slot, retains=False, is_last=is_last)

    def _together(self) -> None:
        """Two forwards, and one backward of both losses."""
        for slot in (3, 4):
            self._add("forward", slot=slot, data=self._next_data(), is_last=None)
        self._add("backward_of_sum", slots=(3, 4))

    def _interleave(self) -> None:
        """1F1B: each backward comes after the next forward."""
        is_last = self._random.choice((None, False))
        self._add("forward", slot=0, data=self._next_data(), is_last=is_last)
        for at in range(2):
            self._add("forward", slot=1 - at, data=self._next_data(), is_last=is_last)
            self._add("backward", slot=at, retains=False, is_last=is_last)
        self._add("backward", slot=0, retains=False, is_last=is_last)

    def _give_up(self) -> None:
        self._microbatch(is_last=self._random.choice((None, False)))
        self._add("zero", set_to_none=self._chance(0.5), by=self._random.choice(("model", "optimizer")))

    def _fail_backward(self) -> None:
        index = self._random.randrange(self._num_blocks)
        keeps = self._random.choice(("none", "first_rank", "all"))
        set_to_none = self._chance(0.5)
        self._add("fail_backward", index=index, data=self._next_data(), keeps=keeps, set_to_none=set_to_none)

    _within = (
        (_accumulate,) * 5
        + (_accumulate_in_scopes,) * 3
        + (_pipeline, _together, _interleave, _give_up)
        + (_fail_backward,)
    )

    def _last_in_scope(self) -> None:
        self._microbatch(is_last=True)

    def _last_of_pipeline(self) -> None:
        """Two forwards, then two backwards; the second backward ends the step."""
        for slot in (1, 2):
            self._add("forward", slot=slot, data=self._next_data(), is_last=False)
        for slot in (1, 2):
            self._add("backward", slot=slot, retains=False, is_last=slot == 2)

    def _last_by_switch(self) -> None:
        """Accumulate with ``set_requires_gradient_sync``, as with FSDP2."""
        self._add("synchronize", on=False)
        self._microbatch()
        self._add("synchronize", on=True)
        self._microbatch()

    _final = (_microbatch, _microbatch, _last_in_scope, _last_of_pipeline, _last_by_switch)
