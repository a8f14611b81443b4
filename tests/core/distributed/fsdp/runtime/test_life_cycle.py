"""Copies and pickles of sharded modules are refused; deleting one gives its memory back at once, without the collector."""

from __future__ import annotations

import copy
import io
import pickle
import time
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.distributed.fsdp import (
    FsdpContext,
    FsdpParameterGroup,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.matrices.replayed_work import no_garbage_collection
from tests.support.models import Net, context_of, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class Memory:
    """Watches the memory of a context's units, without keeping it."""

    def __init__(self, *contexts: FsdpContext) -> None:
        self.storages: dict[str, StorageWeakRef] = {}
        self.objects: list[weakref.ref[object]] = []
        for at, context in enumerate(contexts):
            self.objects.append(weakref.ref(context))
            self._watch({f"arena {at}.{index}": arena for index, arena in enumerate(context.planner.arenas)})
            for group in context.groups:
                self.objects.append(weakref.ref(group))
                self._watch({f"{kind} of {at}.{group.index}": flat for kind, flat in _flats(group).items()})

    def _watch(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.storages[name] = StorageWeakRef(tensor.untyped_storage())

    def alive(self) -> list[str]:
        """The names of storages that still exist."""
        return [name for name, storage in self.storages.items() if not storage.expired()]

    def settled(self, expected: set[str]) -> set[str]:
        """The kinds of storages that exist once gloo's thread has let go of the last collective's buffers.

        It does so a moment after the collective is done, however long that is on a busy machine.
        """
        deadline = time.monotonic() + 60.0
        while (kinds := {name.split(" of ")[0] for name in self.alive()}) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return kinds

    def assert_gone(self) -> None:
        assert not self.settled(set())
        assert all(reference() is None for reference in self.objects)


def _flats(group: FsdpParameterGroup) -> dict[str, torch.Tensor]:
    flats = {
        "gathered weight": group.weights.full.local,
        "model weight": group.weights.model.local,
        "main weight": group.weights.main.local,
    }
    if group.trainable:
        flats |= {
            "staging": group.grads.input.storage.flat,
            "main gradient": group.grads.main.storage.flat,
        }
        if group.grads.accumulator.storage is not None:
            flats["partial sum"] = group.grads.accumulator.storage.flat
    return flats


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 3) -> None:
    for step in range(num_steps):
        for at in range(2):
            with microbatch(net, is_first=at == 0, is_last=at == 1):
                loss_of(net, my_piece(2 * step + at)).backward()
        optimizer.step()
        optimizer.zero_grad()


@CHECKS.on(1)
def copies_are_refused() -> None:
    net = shard_net(make_net())
    for module in (net, net.blocks[0], nn.Sequential(net)):
        for copy_of in (copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(NotImplementedError, match=r"must not be (copied|pickled)"):
                copy_of(module)
    loss_of(net, my_piece(0)).backward()  # the attempt has changed nothing


@CHECKS.on(1)
def a_copy_from_before_is_independent() -> None:
    net = make_net()
    before = copy.deepcopy(net)
    shard_net(net)
    fully_shard(before)
    assert not {id(group) for group in context_of(net).groups} & {id(group) for group in context_of(before).groups}


@CHECKS.on(1, 2)
def deleting_a_model_that_never_ran_frees_it() -> None:
    with no_garbage_collection():
        net = shard_net(make_net())
        memory = Memory(context_of(net))
        del net
        memory.assert_gone()


@CHECKS.on(1, 2)
def deleting_a_model_after_training_frees_it() -> None:
    """With the optimizer gone too, nothing is left; with the loss of a forward still there, its graph holds it."""
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        for dtype in (torch.float32, torch.bfloat16):
            with no_garbage_collection():
                net = shard_net(make_net(dtype=dtype), strategy, policy=MixedPrecisionPolicy())
                optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()))
                _train(net, optimizer)
                loss = loss_of(net, my_piece(9))
                memory = Memory(context_of(net))
                del net, optimizer
                assert memory.alive()
                del loss
                memory.assert_gone()


@CHECKS.on(2)
def an_optimizer_keeps_main_weights_alone() -> None:
    """What a step needs besides them (gathered weights, staging, arenas, model weights in bf16) goes with the model."""
    with no_garbage_collection():
        net = shard_net(make_net(dtype=torch.bfloat16))
        optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()))
        _train(net, optimizer)
        memory = Memory(context_of(net))
        assert any(name.startswith("arena") for name in memory.alive())
        del net
        assert memory.settled({"main weight"}) == {"main weight"}
        optimizer.zero_grad()
        del optimizer
        memory.assert_gone()


@CHECKS.on(2)
def a_failed_step_keeps_nothing() -> None:
    with no_garbage_collection():
        net = shard_net(make_net())
        _train(net, fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1)))

        def trip(*_: object) -> None:
            raise ValueError("trips")

        handle = net.blocks[1].register_forward_pre_hook(trip)
        with pytest.raises(ValueError, match="trips"):
            loss_of(net, my_piece(0))
        handle.remove()
        memory = Memory(context_of(net))
        del net, handle
        memory.assert_gone()


@CHECKS.on(1, 2)
def siblings_of_a_shared_context_are_freed_once_a_plan_goes_without_them() -> None:
    with no_garbage_collection():
        with fully_shard_context() as context:
            nets: list[Net] = [fully_shard(make_net(seed=seed)) for seed in range(2)]
        for step in range(3):
            with microbatch(context):
                (loss_of(nets[0], my_piece(step)) + loss_of(nets[1], my_piece(step))).backward()
        first = weakref.ref(context.groups[0])
        assert len(context.groups) == 2
        memory = Memory(context)
        nets.pop(0)
        for step in range(4):  # the other goes on
            loss_of(nets[0], my_piece(5 + step)).backward()
        assert len(context.groups) == 1 and first() is None
        del nets, context
        memory.assert_gone()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_life_cycle(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
