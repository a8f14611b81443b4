"""Weights of one byte, sharded, equal whole ones to the last bit: bytes, scales, losses, gradients and updates.

The reference (``WholeNet``) has the recipes written down once more for whole matrices, and sums the ranks' gradients in
their order. Each fault at the end of this file must make the comparison fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    Fp8Codec,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.codec.float8 import UpdateEncoding
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights, Scales
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport, RankOrderTransport
from megatron.core.distributed.fsdp.comm.streams import Streams
from tests.support.float8_weights import (
    DequantizedWeight,
    Fp8Net,
    WholeNet,
    fp8_batch,
    fp8_loss,
    make_codec,
    make_fp8_net,
)
from tests.support.fp8_training import (
    NUM_STEPS,
    scaled_groups,
    shard,
    train_own_batches,
    train_pair,
)
from tests.support.models import STRATEGY_NAMES, context_of, full, local_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

RECIPES = ("delayed", "tensorwise", "blockwise")


@CHECKS.on(2)
def strategies_equal_whole_weights_to_the_last_bit() -> None:
    """In every recipe; the plan is followed from the second step on."""
    for strategy in STRATEGY_NAMES:
        for recipe in RECIPES:
            net = train_pair(make_codec(recipe), strategy)
            for group in scaled_groups(net):
                assert group.weights.main.local.dtype == torch.float32
                assert group.weights.full.local.dtype == torch.uint8
                assert group.grads.main.storage.dtype == torch.float32


@CHECKS.on(4)
def hybrid_sharding_equals_whole_weights_to_the_last_bit() -> None:
    """HSDP and HFSDP: main weights are cut over one axis, or over both."""
    for recipe in RECIPES:
        for outer in ("no_shard", "optim"):
            train_pair(make_codec(recipe), "optim_grads_params", outer)


@CHECKS.on(2)
def microbatches_of_a_step_multiply_the_same_bytes() -> None:
    for strategy in STRATEGY_NAMES:
        train_pair(make_codec("delayed"), strategy, num_microbatches=3)


@CHECKS.on(2)
def peer_copy_moves_bytes() -> None:
    for recipe in RECIPES:
        train_pair(make_codec(recipe), "optim_grads_params", transport="peer_copy")


@CHECKS.on(2)
def evaluations_change_no_scale() -> None:
    """Each forward outside of a microbatch begins a weight version; only a step changes weights."""

    def evaluate(net: Fp8Net) -> None:
        with torch.no_grad():
            for piece in fp8_batch(99, 2):
                net(piece[0])

    for recipe in RECIPES:
        train_pair(make_codec(recipe, amax_compute_algo="most_recent"), "optim_grads_params", disturb=evaluate)


@CHECKS.on(2)
def one_reduction_serves_all_weights_of_a_step() -> None:
    """None for each weight; also where units are several."""
    with _counted_maxima() as numels:
        net = train_pair(make_codec("blockwise"), "optim_grads_params")
    num_scales = sum(group.weights.scales.amax.numel() for group in scaled_groups(net))
    before = numels[:-NUM_STEPS]
    assert before.count(1) == len(before), "only whether any rank has values, once for each unit"
    assert numels[-NUM_STEPS:] == [num_scales] * NUM_STEPS, (numels, num_scales)


@CHECKS.on(2)
def weights_travel_as_bytes() -> None:
    """All-gathers of scaled groups move one byte for each element, none another dtype."""
    moved: list[tuple[torch.dtype, int]] = []
    all_gather = ProcessGroupTransport.all_gather

    def watched(self: Any, full: torch.Tensor, shard: torch.Tensor) -> None:
        moved.append((full.dtype, full.numel()))
        all_gather(self, full, shard)

    with patch.object(ProcessGroupTransport, "all_gather", watched):
        net = train_pair(make_codec("tensorwise"), "optim_grads_params")
    scaled, all_groups = scaled_groups(net), context_of(net).groups
    numels = {group.layout.total_numel for group in scaled}
    others = {group.layout.total_numel for group in all_groups if group not in scaled}
    assert not numels & others
    assert {dtype for dtype, numel in moved if numel in numels} == {torch.uint8}
    assert {dtype for dtype, numel in moved if numel in others} == {torch.bfloat16}
    world, report = dist.get_world_size(), context_of(net).describe()
    rest = [group.layout.total_numel // world * (1 if group in scaled else 2) for group in all_groups]
    assert report.model_weights == sum(rest)
    for group in scaled:
        assert group.weights.full_storage.nbytes == group.layout.total_numel


@CHECKS.on(2)
def flat_adamw_trains_as_adamw_does() -> None:
    """Bytes and scales included, with fp32 main weights; and with remainders."""
    for recipe in RECIPES:
        codec, nets = make_codec(recipe), []
        for make in (torch.optim.AdamW, FlatAdamW):
            net = shard(make_fp8_net(codec), "optim_grads_params")
            optimizer = make(net.parameters(), lr=0.01, weight_decay=0.1)
            for step in range(NUM_STEPS):
                fp8_loss(net, fp8_batch(step, 2)[dist.get_rank()]).backward()
                optimizer.step()
                optimizer.zero_grad()
            fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
            nets.append(net)
        for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
            assert torch.equal(local_of(ours), local_of(theirs))
        for ours, theirs in zip(*(scaled_groups(net) for net in nets), strict=True):
            assert torch.equal(ours.weights.model.local, theirs.weights.model.local)
            assert torch.equal(ours.weights.scales.scale, theirs.weights.scales.scale)
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    net = shard(make_fp8_net(make_codec("tensorwise")), "optim_grads_params", mixed_precision_policy=policy)
    optimizer = FlatAdamW(net.parameters(), lr=0.01, store_param_remainders=True)
    losses = []
    for _ in range(6):
        loss = fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(group.weights.main.local.dtype == torch.bfloat16 for group in scaled_groups(net))


def _undisturbed(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _steps_twice(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    """The second update halves the weights, so that the first one's maxima are larger."""
    (rates,) = optimizer.param_groups
    decay = rates["weight_decay"]
    optimizer.step()
    rates["weight_decay"] = 0.5 / rates["lr"]
    optimizer.step()
    rates["weight_decay"] = decay


def _writes_after_the_step(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        for parameter in net.blocks[1].parameters():
            parameter.mul_(0.5)


def _evaluates_after_the_step(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        net(fp8_batch(98, 1)[0][0])
        net(fp8_batch(99, 1)[0][0])


def _leaves_out_a_weight(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in net.named_parameters():
        if name == "blocks.0.up.weight":
            parameter.grad = None
    optimizer.step()


def _leaves_out_a_weight_at_last(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    _leaves_out_a_weight(net, optimizer)


def _leaves_out_a_block(net: Fp8Net, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.blocks[0].parameters():
        parameter.grad = None
    optimizer.step()


STEPS = (
    _undisturbed,
    _steps_twice,
    _writes_after_the_step,
    _evaluates_after_the_step,
    _leaves_out_a_weight,
    _leaves_out_a_weight_at_last,
    _leaves_out_a_block,
)


@contextmanager
def _counted_passes() -> Iterator[list[str]]:
    """Count pieces of weights that are read once more, to be measured or to be encoded."""
    passes: list[str] = []
    write, measure = Fp8Codec.write, Fp8Codec.raise_amax

    def counted_write(self: Fp8Codec, *args: Any, **kwargs: Any) -> None:
        passes.append("encoded")
        write(self, *args, **kwargs)

    def counted_measure(self: Fp8Codec, *args: Any) -> None:
        passes.append("measured")
        measure(self, *args)

    with patch.object(Fp8Codec, "write", counted_write), patch.object(Fp8Codec, "raise_amax", counted_measure):
        yield passes


@CHECKS.on(2)
def an_update_measures_and_writes_bytes_as_a_later_pass_does() -> None:
    """To the last bit, whatever comes between update and forward; and then weights are not read again."""
    for recipe, expected in (("delayed", set()), ("tensorwise", {"encoded"}), ("blockwise", {"encoded", "measured"})):
        for strategy in ("optim", "optim_grads_params"):
            _compare_updates(recipe, strategy, expected)


def _compare_updates(recipe: str, strategy: str, expected: set[str]) -> None:
    codec = make_codec(recipe, amax_history_len=2) if recipe == "delayed" else make_codec(recipe)
    nets = [shard(make_fp8_net(codec), strategy) for _ in range(2)]
    optimizers = [
        fully_shard_optimizer(torch.optim.AdamW(nets[0].parameters(), lr=0.01)),
        FlatAdamW(nets[1].parameters(), lr=0.01),
    ]
    takes = (None, _undisturbed, *STEPS, _undisturbed)
    for step, (before, take) in enumerate(pairwise(takes)):
        assert take is not None
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            with _counted_passes() as passes:
                loss = fp8_loss(net, fp8_batch(step, 2)[dist.get_rank()])
            loss.backward()
            losses.append(loss.detach())
            if optimizer is optimizers[1] and before in (_undisturbed, _steps_twice):
                assert set(passes) == expected, (recipe, strategy, step, passes)
            take(net, optimizer)
            optimizer.zero_grad()
        assert torch.equal(*losses), (recipe, strategy, step, losses)
        for ours, theirs in zip(*map(scaled_groups, nets), strict=True):
            assert torch.equal(ours.weights.main.local, theirs.weights.main.local), (recipe, strategy, step)
            if take is not _evaluates_after_the_step:
                continue
            for name in ("scale", "inverse", "history"):
                own, other = (getattr(group.weights.scales, name) for group in (ours, theirs))
                assert torch.equal(own, other), (recipe, strategy, step, name)
            assert torch.equal(ours.weights.model.local, theirs.weights.model.local)


@CHECKS.on(2)
def a_forward_waits_for_the_update_of_the_unit_at_hand() -> None:
    """Where updates write bytes: their maxima are reduced by the next update, which alone needs them.

    Weights that are written after their update are read before the first forward, so their update is waited for too.
    """
    net = shard(make_fp8_net(make_codec("delayed"), num_blocks=4), "optim_grads_params")
    optimizer = FlatAdamW(net.parameters(), lr=0.01, overlaps_forward=True)
    groups = scaled_groups(net)
    waited: list[object] = []
    at_first_block: list[int] = []
    net.blocks[0].register_forward_pre_hook(lambda *_: at_first_block.append(len(waited)))
    num_scales = sum(group.weights.scales.amax.numel() for group in groups)
    for step in range(5):
        if step > 1:
            for group in groups:  # as on a device, where an event says that the update is done
                group.weights.updated.event = object()
        if step == 4:
            with torch.no_grad():
                net.blocks[3].up.weight.mul_(0.5)  # type: ignore[operator]
        with (
            _counted_maxima() as in_forward,
            patch.object(Streams, "wait", lambda _, edge, event: waited.append(event) if event else None),
        ):
            loss = fp8_loss(net, fp8_batch(step, 2)[dist.get_rank()])
        loss.backward()
        with _counted_maxima() as in_step:
            optimizer.step()
        optimizer.zero_grad()
        assert (in_forward, in_step) == (([num_scales], []) if step == 0 else ([], [num_scales])), step
    # Of four groups the first block's, and the next one's.
    assert len(groups) == 4 and at_first_block == [0, 0, 2, 4 + 2, 8 + 2 + 1], at_first_block


def _scale_vectors(net: Fp8Net) -> list[torch.Tensor]:
    scales = [group.weights.scales for group in scaled_groups(net)]
    return [tensor.clone() for own in scales for tensor in (own.scale, own.inverse, own.history)]


def _folder() -> str:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return folders[0]


@CHECKS.on(2)
def a_resumed_run_goes_on_to_the_last_bit() -> None:
    """Under another strategy, too: checkpoints hold main weights, amax histories and scales.

    Without bytes as well: what is read from a file reaches model weights that an optimizer wrote last.
    """
    kinds = (("delayed", "optim"), ("delayed", "optim_grads_params"), ("blockwise", "no_shard"), (None, "optim"))
    for recipe, other in kinds:
        path = f"{_folder()}/checkpoint"
        settings = {"amax_compute_algo": "most_recent"} if recipe == "delayed" else {}
        codec = None if recipe is None else make_codec(recipe, **settings)
        net = shard(make_fp8_net(codec), "optim_grads_params")
        optimizer = FlatAdamW(net.parameters(), lr=0.02)
        train_own_batches(net, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.0  # bytes get the next step's scale, though no maximum changes
        train_own_batches(net, optimizer, range(2, 3))
        optimizer.param_groups[0]["lr"] = 0.02
        save_checkpoint(net, optimizer, path)
        expected = train_own_batches(net, optimizer, range(3, 6))
        again = shard(make_fp8_net(codec), other)
        other_optimizer = FlatAdamW(again.parameters(), lr=0.02)
        train_own_batches(again, other_optimizer, range(7, 9))  # scales and histories of another run
        load_checkpoint(again, other_optimizer, path)
        losses = train_own_batches(again, other_optimizer, range(3, 6))
        assert all(map(torch.equal, losses, expected)), (recipe, other, losses, expected)
        assert all(map(torch.equal, _scale_vectors(again), _scale_vectors(net)))


@CHECKS.on(2)
def bf16_and_fp8_runs_load_each_other() -> None:
    """Who lacks histories begins them with the weights that it loads, not with those that it had."""
    for recipe in ("delayed", "tensorwise"):
        folder = _folder()
        nets = {"fp8": shard(make_fp8_net(make_codec(recipe)), "optim"), "bf16": shard(make_fp8_net(None), "optim")}
        for name, net in nets.items():
            optimizer = FlatAdamW(net.parameters(), lr=0.02)
            train_own_batches(net, optimizer, range(2 if name == "fp8" else 3))
            save_checkpoint(net, optimizer, f"{folder}/{name}")
        for source, codec in (("fp8", None), ("bf16", make_codec(recipe))):
            net = shard(make_fp8_net(codec), "optim_grads_params")
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(100.0)
            optimizer = FlatAdamW(net.parameters(), lr=0.02)
            train_own_batches(net, optimizer, range(1))
            load_checkpoint(net, optimizer, f"{folder}/{source}")
            for own, saved in zip(net.parameters(), nets[source].parameters(), strict=True):
                assert torch.equal(full(own), full(saved))
            loss = fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
            whole = WholeNet(codec)
            whole.main = {name: full(parameter).float() for name, parameter in net.named_parameters()}
            whole.write()
            assert torch.equal(loss, fp8_loss(whole.net, fp8_batch(0, 2)[dist.get_rank()]))


@CHECKS.on(2)
def a_weight_that_is_not_a_number_leaves_the_scales_alike() -> None:
    """On all ranks, though one of them sees it: all multiply the same bytes, and the loss says it."""
    for recipe in RECIPES:
        net = shard(make_fp8_net(make_codec(recipe)), "optim_grads_params")
        fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
        (weight,) = (p for name, p in net.named_parameters() if name == "blocks.0.up.weight")
        if dist.get_rank() == 1:
            with torch.no_grad():
                local_of(weight)[0, 0] = float("nan")
        assert fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()]).isnan()
        for group in scaled_groups(net):
            scale = group.weights.scales.scale
            other = scale.clone()
            dist.broadcast(other, src=0)
            assert torch.equal(scale, other) and scale.isfinite().all()


@CHECKS.on(1, 2)
def what_layers_derive_is_kept_until_the_weights_change() -> None:
    """If asked: over microbatches and while the unit is resharded, or rests whole on its only rank, and never longer."""
    for keeps in (False, True):
        net = train_pair(make_codec("tensorwise", keeps_derived=keeps), "optim_grads_params", num_microbatches=2)
        for group in scaled_groups(net):
            assert all((weight._transpose is not None) is keeps for weight in group.unsharded)
        fp8_loss(net, fp8_batch(0, dist.get_world_size())[dist.get_rank()])
        assert all(weight._transpose is None for group in scaled_groups(net) for weight in group.unsharded)


@CHECKS.on(2)
def loaded_state_dicts_begin_new_scales() -> None:
    net = shard(make_fp8_net(make_codec("delayed")), "optim_grads_params")
    fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()])
    other = make_fp8_net(None)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(64.0)
    net.load_state_dict(other.state_dict())
    loss, whole = fp8_loss(net, fp8_batch(0, 2)[dist.get_rank()]), WholeNet(make_codec("delayed"))
    whole.main = {name: parameter.detach().float() for name, parameter in other.named_parameters()}
    whole.write()
    assert torch.equal(loss, fp8_loss(whole.net, fp8_batch(0, 2)[dist.get_rank()]))


@CHECKS.on(2)
def layers_multiply_views_of_gathered_bytes() -> None:
    """Also after the arena has moved; at rest modules hold fp32 shards."""
    net = train_pair(make_codec("blockwise"), "optim_grads_params")
    block: Any = net.blocks[0]
    block.unshard()
    weight = block.up.weight
    (group,) = (group for group in scaled_groups(net) if group.name_of(0).startswith("blocks.0"))
    assert isinstance(weight, DequantizedWeight) and weight.dtype == torch.bfloat16
    assert weight._data.data_ptr() == group.weights.full.view(0).data_ptr()
    assert weight._inverse.untyped_storage().data_ptr() == group.weights.scales.inverse.untyped_storage().data_ptr()
    assert all(other._inverse.storage_offset() % 64 == 0 for group in scaled_groups(net) for other in group.unsharded)
    block.reshard()


# ---- faults that the comparisons must see ---------------------------------------------------------------------------


def _local_maxima() -> Any:
    return patch.object(RankOrderTransport, "maximum", lambda self, tensor: None)


def _stale_transposes() -> Any:
    return patch.object(ScaledWeights, "_drop_derived", lambda self: None)


def _stale_bytes() -> Any:
    sync = ScaledWeights.sync

    def casts_alone(self: ScaledWeights, *, casts: bool = True) -> None:
        if casts and self.restarts:
            sync(self)

    return patch.object(ScaledWeights, "sync", casts_alone)


def _lost_history() -> Any:
    copy = Scales.copy_
    return patch.object(Scales, "copy_", lambda self, other: copy(self, self))


def _first_scale_of_one() -> Any:
    return patch.object(ScaledWeights, "restart_scales", lambda self: self._to_restore.clear())


def _scale_of_another_weight() -> Any:
    follow = ScaledWeights.take_scales

    def shifted(self: ScaledWeights, scales: Scales) -> None:
        follow(self, scales)
        self._scale = self._scale[::-1]

    return patch.object(ScaledWeights, "take_scales", shifted)


def _no_maxima_from_updates() -> Any:
    return patch.object(UpdateEncoding, "encode", lambda self, main, weight, begin, end: None)


def _bytes_from_before_a_write() -> Any:
    measure = ScaledWeights.measure

    def trusting(self: ScaledWeights, *, again: bool) -> None:
        self.freshness.note_model_written()
        measure(self, again=again)

    return patch.object(ScaledWeights, "measure", trusting)


def _bytes_with_the_scale_before() -> Any:
    begin = ScaledWeights.begin_update

    def late(self: ScaledWeights, *, is_whole: bool) -> UpdateEncoding | None:
        encoding = begin(self, is_whole=is_whole)
        return None if encoding is None else encoding._replace(scale=self.scales.scale)

    return patch.object(ScaledWeights, "begin_update", late)


def _maxima_of_two_steps() -> Any:
    begin = ScaledWeights.begin_update

    def forgetful(self: ScaledWeights, *, is_whole: bool) -> UpdateEncoding | None:
        self.was_updated = False
        return begin(self, is_whole=is_whole)

    return patch.object(ScaledWeights, "begin_update", forgetful)


FAULTS_OF_UPDATES = {
    "an update measures nothing": _no_maxima_from_updates,
    "bytes from before a write": _bytes_from_before_a_write,
    "bytes with the scale of the step before": _bytes_with_the_scale_before,
    "maxima of two updates": _maxima_of_two_steps,
}


@CHECKS.on(2)
def faults_of_updates_are_seen() -> None:
    for name, fault in FAULTS_OF_UPDATES.items():
        with fault():
            assert _is_seen(lambda: _compare_updates("delayed", "optim_grads_params", set())), name


FAULTS = {
    "maxima of this rank's part alone": (_local_maxima, "tensorwise"),
    "transposed bytes of an earlier step": (_stale_transposes, "tensorwise"),
    "bytes of an earlier step": (_stale_bytes, "tensorwise"),
    "a first scale of one": (_first_scale_of_one, "delayed"),
    "the scale of another weight": (_scale_of_another_weight, "tensorwise"),
}


@CHECKS.on(2)
def faults_are_seen() -> None:
    for name, (fault, recipe) in FAULTS.items():
        for strategy in ("optim", "optim_grads_params"):
            with fault():
                assert _is_seen(lambda recipe=recipe, strategy=strategy: train_pair(make_codec(recipe), strategy)), (  # type: ignore[misc]
                    name,
                    strategy,
                )


def _is_seen(compare: Callable[[], object]) -> bool:
    """Whether a comparison fails on any rank."""
    seen = False
    try:
        compare()
    except AssertionError:
        seen = True
    everyone = [seen] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    return any(everyone)


@contextmanager
def _counted_maxima() -> Iterator[list[int]]:
    numels: list[int] = []
    maximum = ProcessGroupTransport.maximum

    def counted(self: Any, tensor: torch.Tensor) -> None:
        numels.append(tensor.numel())
        maximum(self, tensor)

    with patch.object(ProcessGroupTransport, "maximum", counted):
        yield numels


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
