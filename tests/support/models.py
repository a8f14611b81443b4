"""Small models for the tests of the engine, the data that they train on, and what must hold of them at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FsdpContext, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.api.module import FsdpModule, find_context, fsdp_modules
from megatron.core.distributed.fsdp.checks.observer import RankObserver
from megatron.core.distributed.fsdp.checks.step_order import StepOrder
from megatron.core.distributed.fsdp.config.placement import STRATEGIES, strategy_placements
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from megatron.core.distributed.fsdp.layout.plan import GATHERS, KINDS, NUM_KINDS, SYNC, UPDATE

STRATEGY_NAMES = tuple(STRATEGIES)
# Features that go in, and classes that come out.
NUM_INPUTS, NUM_CLASSES = 5, 3


class Block(nn.Module):
    """A residual block with odd sizes, so that rows do not divide evenly among ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class CutBlock(nn.Module):
    """A residual block with one matrix that is most of it, so that ranks share its rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return out


class Net(nn.Module):
    """Blocks between an entry and a head that belong to the root, run in the order that ``order`` says.

    ``around`` is called with each block and its input; it may run the block under recomputation, or not at all.
    """

    def __init__(self, num_blocks: int = 3, width: int = 7, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.entry = nn.Linear(NUM_INPUTS, width)
        self.blocks: Any = nn.ModuleList(block(width) for _ in range(num_blocks))  # fully_shard adds methods
        self.head = nn.Linear(width, NUM_CLASSES)
        self.order = list(range(num_blocks))
        self.around: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for index in self.order:
            x = self.around(self.blocks[index], x)
        out: torch.Tensor = self.head(x)
        return out


def make_net(num_blocks: int = 3, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    """The same weights on every rank and in every call with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(num_blocks).to(dtype)


def make_cut_net(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    """The same, where ranks share rows of matrices: those of ``make_net`` lie whole on one of two ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(2, 37, CutBlock).to(dtype)


def assert_is_cut(net: nn.Module) -> None:
    """Check that this rank holds a part of some parameter, and nothing of another."""
    held = [(local_of(parameter).numel(), parameter.numel()) for parameter in net.parameters()]
    assert any(0 < local < whole for local, whole in held) and any(local == 0 for local, _ in held), held


def shard_net(
    net: Net,
    strategy: str = "optim_grads_params",
    *,
    policy: MixedPrecisionPolicy | None = None,
    poisons: bool = True,
    adopts: bool = True,
    least_memory: bool | None = None,
) -> Net:
    """The net with each block and the root a unit. Released memory is poisoned, so that a late read shows. Ranks: all.

    Args:
        adopts: the units have one context from now on, else when the root runs.
    """
    placements = strategy_placements(strategy)
    for module in (*net.blocks, net):
        fully_shard(module, placements=placements, mixed_precision_policy=policy, least_memory=least_memory)
    if adopts:
        context_of(net).change_options(poisons=poisons)
    return net


def make_pair(
    num_blocks: int = 3, strategy: str = "optim_grads_params", *, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Net, Net]:
    """An unsharded net and a sharded one of the same weights. Ranks: all."""
    net = make_net(num_blocks, dtype=dtype)
    return copy.deepcopy(net), shard_net(net, strategy, **options)


def context_of(module: nn.Module) -> FsdpContext:
    """The context of a sharded module."""
    assert isinstance(module, FsdpModule)
    return find_context(module)


def order_of(context: FsdpContext) -> StepOrder:
    """The collectives that a context has issued, as the checks count them."""
    assert isinstance(context.observer, RankObserver)
    return context.observer


def watch_collectives(context: FsdpContext, note: Callable[[str, int], Any]) -> None:
    """Call ``note`` with what and whose each collective of the context is, before it is issued; a sync counts as a gather."""
    before = context.observer.issued

    def issued(entry: int) -> None:
        index, kind = divmod(entry, NUM_KINDS)
        if kind < UPDATE:
            note(KINDS[GATHERS[1] if kind == SYNC else kind], index)
        before(entry)

    context.observer.issued = issued


def global_batch(step: int, num_pieces: int, *, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[num_pieces] (features [rows, inputs], classes [rows]) of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    features = torch.randn(num_pieces * rows, NUM_INPUTS, generator=generator)
    classes = torch.randint(NUM_CLASSES, (num_pieces * rows,), generator=generator)
    return [(features[at : at + rows], classes[at : at + rows]) for at in range(0, num_pieces * rows, rows)]


def loss_of(net: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean cross entropy of one piece of a batch, in fp32."""
    features, classes = piece
    dtype = next(net.parameters()).dtype if not isinstance(net, FsdpModule) else _compute_dtype(net)
    return nn.functional.cross_entropy(net(features.to(dtype)).float(), classes)


def _compute_dtype(net: FsdpModule) -> torch.dtype:
    return next(group.dtypes.compute for module in fsdp_modules(net) for group in module.parameter_groups)


def my_piece(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's piece of a global batch of one microbatch."""
    return global_batch(step, dist.get_world_size())[dist.get_rank()]


def mean_loss(net: nn.Module, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The loss of an unsharded net on a global batch: the mean over its pieces, summed in their order."""
    losses = [loss_of(net, piece) for piece in pieces]
    return torch.stack(losses).sum() / len(losses)


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor of a shard; zeros have no place to hide behind None. Ranks: all."""
    assert tensor is not None, "there is no gradient"
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_of(tensor: torch.Tensor | None) -> torch.Tensor:
    """The rows that this rank holds of a shard."""
    assert tensor is not None, "there is no gradient"
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def difference(got: torch.Tensor, expected: torch.Tensor, *, scale: torch.Tensor | None = None) -> float:
    """The largest difference, relative to the largest magnitude of ``scale``, or of what is expected."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not got.numel():
        return 0.0
    magnitude = (expected if scale is None else scale).abs().max().clamp_min(1e-30)
    return float((got - expected).abs().max() / magnitude)


def assert_same_gradients(sharded: nn.Module, unsharded: nn.Module, *, tolerance: float = 2e-6) -> None:
    """Check that this rank's rows of each gradient equal the other's, where None counts as zero; communicate nothing.

    The tolerance is that of sums over the global batch in another order; see test_parity for exact comparisons.
    """
    ours: dict[str, Any] = dict(sharded.named_parameters())
    for name, theirs in unsharded.named_parameters():
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        rows = local_rows(ours[name], expected)
        got = torch.zeros_like(rows) if ours[name].grad is None else local_of(ours[name].grad)
        if not expected.any():
            assert not got.any(), f"{name} must have no gradient"
            continue
        error = difference(got, rows, scale=expected)
        assert error <= tolerance, (name, error)


def assert_same_weights(sharded: nn.Module, unsharded: nn.Module, *, tolerance: float = 2e-6) -> None:
    """Check that this rank's rows of each weight equal the other's; communicate nothing."""
    ours: dict[str, Any] = dict(sharded.named_parameters())
    for name, theirs in unsharded.named_parameters():
        rows = local_rows(ours[name], theirs.detach())
        assert difference(local_of(ours[name]), rows, scale=theirs.detach()) <= tolerance, name


def assert_at_rest(module: nn.Module | FsdpContext) -> None:
    """Check that nothing is unsharded, held or owed, and that temporary memory is freed."""
    context = module if isinstance(module, FsdpContext) else context_of(module)
    assert not context.unsharder.live
    for group in context.groups:
        name = group.parameters[0].name
        assert group.weights.holders.forwards == group.weights.holders.backwards == 0, name
        assert not (group.trainable and group.grads.is_expected), name
        if group.weights.needs_gather:
            storage = group.weights.full_storage
            assert storage is not None
            assert not group.weights.is_unsharded and (storage.in_arena or not storage.allocated), name
        assert all(isinstance(held, DTensor) for held in group.param_slots.held()), f"modules must hold {name} sharded"
        if group.trainable:
            assert not group.grads.input.is_acquired and not group.grads.refresh_pending(), name
            assert group.grads.input.storage.in_arena or not group.grads.input.storage.allocated, name
            sums = group.grads.accumulator.storage
            assert sums is None or not sums.allocated, name
            assert all(parameter.grad is None for parameter in group.unsharded), name
