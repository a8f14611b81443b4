"""``FusedAdam`` of apex and of transformer-engine on sharded parameters, by stand-ins that read memory as their kernels do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from tests.support.agreement import groups_of
from tests.support.fake_fused_adam import ApexFusedAdam, ApexFusedLAMB, TransformerEngineFusedAdam
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    assert_is_cut,
    difference,
    full,
    global_batch,
    local_of,
    loss_of,
    make_cut_net,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)

Make = Callable[..., torch.optim.Optimizer]
apex: Make = partial(ApexFusedAdam, lr=0.01, weight_decay=0.1)
te: Make = partial(TransformerEngineFusedAdam, lr=0.01, weight_decay=0.1)

FP32: dict[str, Make] = {
    "apex": apex,
    "apex, L2 without corrections": partial(apex, adam_w_mode=False, bias_correction=False),
    "apex, capturable": partial(apex, capturable=True),
    "te": te,
    "te, capturable": partial(te, capturable=True),
    "te, bf16 moments": partial(te, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
}
# Their scales are those of what one rank holds of a parameter.
SCALED: dict[str, Make] = {
    "te, fp16 moments": partial(te, exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16),
    "te, fp8 momentum": partial(te, exp_avg_dtype=torch.uint8),
}
# Over main weights in bf16.
BF16: dict[str, Make] = {
    "te, bf16 weights": te,
    "te, master weights": partial(te, master_weights=True),
    "te, remainders": partial(te, master_weights=True, store_param_remainders=True),
    "te, fp16 master weights": partial(te, master_weights=True, master_weight_dtype=torch.float16),
}
ALL = FP32 | SCALED | BF16


def _sharded(name: str, strategy: str = "optim_grads_params", *, seed: int = 0) -> Net:
    dtype = torch.bfloat16 if name in BF16 else torch.float32
    return shard_net(
        make_cut_net(seed=seed, dtype=dtype), strategy, policy=MixedPrecisionPolicy(main_params_dtype=dtype)
    )


def _optimizer(name: str, net: Net) -> Any:
    """With two param groups, the second of which is not decayed."""
    parameters = list(net.parameters())
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    return ALL[name]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])


def _train(net: Net, optimizer: Any, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(net, my_piece(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _start(name: str, strategy: str = "optim_grads_params", *, steps: int = 0, seed: int = 0) -> tuple[Net, Any]:
    net = _sharded(name, strategy, seed=seed)
    optimizer = fully_shard_optimizer(_optimizer(name, net))
    _train(net, optimizer, range(steps))
    return net, optimizer


def _weights(net: Net) -> dict[str, torch.Tensor]:
    return {name: full(parameter).clone() for name, parameter in net.named_parameters()}


def _error(ours: Net, theirs: Net) -> float:
    """The largest difference of weights. Ranks: all."""
    theirs_of = _weights(theirs)
    return max(difference(weight.float(), theirs_of[name].float()) for name, weight in _weights(ours).items())


def _train_beside(name: str, strategy: str, num_steps: int = 3) -> float:
    """Give the unsharded optimizer the sharded model's gradients, clipped; return the largest difference of weights."""
    net, optimizer = _start(name, strategy)
    plain = make_cut_net(dtype=torch.bfloat16 if name in BF16 else torch.float32)
    other = _optimizer(name, plain)
    if strategy != "no_shard":
        assert_is_cut(net)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(net, my_piece(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        assert full(norm) > 0.1
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            theirs.grad = full(ours.grad)
        optimizer.step()
        other.step()
        with torch.no_grad():  # the next forward has the new weights
            expected = copy.deepcopy(plain)
            expected.load_state_dict(_weights(net))
            features = global_batch(step, 1)[0][0].to(next(plain.parameters()).dtype)
            assert torch.equal(net(features), expected(features)), (name, strategy)
    return _error(net, plain)


@CHECKS.on(2)
def the_update_is_that_of_the_unsharded_optimizer_to_the_last_bit() -> None:
    for strategy in STRATEGY_NAMES:
        exact = (*FP32, "te, bf16 weights", "te, master weights", "te, remainders")
        for name in exact if strategy == "optim_grads_params" else ("apex", "te"):
            assert _train_beside(name, strategy) == 0.0, (name, strategy)


@CHECKS.on(2)
def state_with_a_scale_for_each_part_trains_alike() -> None:
    """Scales differ from those of whole parameters, so values are rounded otherwise: 8 bits have 2^-4, of updates of 0.01."""
    for name in (*SCALED, "te, fp16 master weights"):
        assert _train_beside(name, "no_shard") == 0.0, name
        error = _train_beside(name, "optim_grads_params")
        assert error < (0.05 if "fp8" in name else 2e-2 if name in BF16 else 1e-3), (name, error)


@CHECKS.on(2)
def a_bf16_model_follows_its_fp32_main_weights() -> None:
    for make in (apex, te):
        net = shard_net(make_net(2, dtype=torch.bfloat16))
        optimizer = fully_shard_optimizer(make(net.parameters()))
        before = _weights(net)
        for step in range(3):
            _train(net, optimizer, [step])
            copied = make_net(2, dtype=torch.bfloat16)
            copied.load_state_dict(_weights(net))
            features = my_piece(step)[0].bfloat16()
            with torch.no_grad():
                assert torch.equal(net(features), copied(features))
        assert all(p.dtype == torch.float32 for p in net.parameters())
        assert not any(torch.equal(weight, before[name]) for name, weight in _weights(net).items())


@CHECKS.on(2)
def gradients_in_another_dtype_than_main_weights_are_cast() -> None:
    for make in (apex, te):
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
        net = shard_net(make_net(2), policy=policy)
        optimizer = fully_shard_optimizer(make(net.parameters()))
        before = _weights(net)
        _train(net, optimizer, range(1))
        assert not any(torch.equal(weight, before[name]) for name, weight in _weights(net).items())


# ---- saving and loading ---------------------------------------------------------------------------------------------


def _assert_goes_on(name: str, ours: tuple[Net, Any], theirs: tuple[Net, Any], what: str) -> None:
    """The next steps of both are the same; nearly, where state is scaled anew for what a rank holds."""
    _train(*ours, range(3, 5))
    _train(*theirs, range(3, 5))
    error = _error(ours[0], theirs[0])
    assert error == 0.0 if name not in SCALED and "fp16" not in name else error < 0.03, (name, what, error)


@CHECKS.on(2)
def checkpoints_load_in_another_split() -> None:
    """State is saved in fp32 whatever it is kept in, so a checkpoint says nothing of ranks; loaded by new and used ones."""
    with shared_folder() as folder:
        for index, name in enumerate(name for name in ALL if "L2" not in name):
            saved = _start(name, "optim_grads_params", steps=3)
            save_checkpoint(*saved, f"{folder}/{index}")
            loaded = _start(name, "no_shard", steps=index % 2, seed=1)
            load_checkpoint(*loaded, f"{folder}/{index}")
            assert _error(saved[0], loaded[0]) == 0.0
            _assert_goes_on(name, saved, loaded, "checkpoint")


@CHECKS.on(2)
def checkpoints_load_across_libraries_and_ways_to_count() -> None:
    """Rates and counts become what the optimizer's kernel takes: numbers, or tensors on the device."""
    with shared_folder() as folder:
        for source, target in (("apex", "te"), ("te", "apex, capturable"), ("apex, capturable", "te")):
            path = f"{folder}/{source} {target}"
            saved = _start(source, steps=3)
            save_checkpoint(*saved, path)
            loaded = _start(target, "no_shard", seed=1)
            load_checkpoint(*loaded, path)
            _assert_goes_on(source, saved, loaded, target)


@CHECKS.on(2)
def state_that_the_optimizer_does_not_keep_is_refused() -> None:
    with shared_folder() as folder:
        for source, target, words in (
            ("te, master weights", "te, bf16 weights", r"of another kind: \S+\.master_param \(saved torch.float32, none here\)"),
            ("te, bf16 weights", "te, master weights", r"missing in the checkpoint: \S+\.master_param, "),
            ("te, master weights", "te, remainders", r"of another kind: \S+\.master_param \(saved torch.float32, here torch.int16\)"),
            ("te, remainders", "te, master weights", r"of another kind: \S+\.master_param \(saved torch.int16, here torch.float32\)"),
        ):  # fmt: skip
            path = f"{folder}/{source} {target}"
            save_checkpoint(*_start(source, steps=1), path)
            with pytest.raises(ValueError, match=words):
                load_checkpoint(*_start(target), path)


@CHECKS.on(2)
def the_state_dict_of_torch_is_loaded() -> None:
    for name in ("apex", "apex, capturable", "te", "te, fp8 momentum", "te, remainders"):
        saved = _start(name, steps=3)
        loaded = _start(name, seed=1)
        loaded[0].load_state_dict(saved[0].state_dict())
        loaded[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
        _assert_goes_on(name, saved, loaded, "state_dict")


@CHECKS.on(2)
def full_and_sharded_states_of_dcp_are_set() -> None:
    """It steps a new optimizer with a rate of zero to make state, and clears gradients with set_to_none."""
    for is_full in (False, True):
        options = StateDictOptions(full_state_dict=is_full)
        for name in ("apex", "te, capturable", "te, fp16 moments", "te, remainders"):
            saved = _start(name, "optim_grads_params", steps=3)
            loaded = _start(name, "no_shard" if is_full else "optim_grads_params")
            # A copy: it holds the optimizer's own tensors.
            state = copy.deepcopy(get_optimizer_state_dict(*saved, options=options))
            loaded[0].load_state_dict(_weights(saved[0]) if is_full else saved[0].state_dict())
            set_optimizer_state_dict(*loaded, state, options=options)
            _assert_goes_on(name, saved, loaded, "dcp")


# ---- calls ----------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def gradients_are_cleared_and_their_memory_is_freed() -> None:
    for name in ("apex", "te"):
        net, optimizer = _start(name)
        storages = [group.grads.main.storage for group in groups_of(net)]
        for arguments in ({}, {"set_to_none": True}):
            loss_of(net, my_piece(0)).backward()
            assert all(storage.allocated for storage in storages)
            optimizer.zero_grad(**arguments)
            assert all(p.grad is None for p in net.parameters())
            assert not any(storage.allocated for storage in storages)
        loss_of(net, my_piece(0)).backward()
        optimizer.zero_grad(set_to_none=False)
        assert not any(local_of(p.grad).any() for p in net.parameters())


@CHECKS.on(2)
def megatrons_optimizer_holds_it() -> None:
    """Its clipping changes gradients before the step, as with torch's optimizers."""
    for make in (apex, te):
        nets = shard_net(make_net(2)), shard_net(make_net(2))
        config = OptimizerConfig(lr=0.01, clip_grad=0.1)
        ours = MegatronOptimizer(fully_shard_optimizer(make(nets[0].parameters())), config)
        theirs = fully_shard_optimizer(make(nets[1].parameters()))
        for step in range(2):
            for net in nets:
                loss_of(net, my_piece(step)).backward()
            norm = torch.nn.utils.clip_grad_norm_(nets[1].parameters(), 0.1)
            torch.testing.assert_close(ours.step().grad_norm, full(norm))
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
        assert _error(*nets) < 1e-6


@CHECKS.on(1)
def prepared_once_however_often_it_is_asked() -> None:
    _, optimizer = _start("apex")
    kernel, num_hooks = optimizer.multi_tensor_adam, len(optimizer._optimizer_step_pre_hooks)
    assert fully_shard_optimizer(optimizer) is optimizer
    assert optimizer.multi_tensor_adam is kernel and len(optimizer._optimizer_step_pre_hooks) == num_hooks
    plain: Any = apex(make_net(2).parameters())
    kernel = plain.multi_tensor_adam
    assert fully_shard_optimizer(plain).multi_tensor_adam is kernel, "nothing of it is sharded"


@CHECKS.on(1)
def param_groups_that_are_added_later_are_trained() -> None:
    """Apex's step goes no further than the groups that its constructor saw."""
    for make in (apex, te):
        net = shard_net(make_net(2))
        first, *others = net.parameters()
        optimizer = fully_shard_optimizer(make([first]))
        optimizer.add_param_group({"params": others})
        fully_shard_optimizer(optimizer)
        before = _weights(net)
        _train(net, optimizer, range(1))
        assert not any(torch.equal(weight, before[name]) for name, weight in _weights(net).items())


@CHECKS.on(2)
def apex_alone_reads_addresses_that_are_not_there() -> None:
    """What ``fully_shard_optimizer`` is for, and that the stand-in is as strict as the kernel."""
    net = shard_net(make_net(2))
    optimizer = apex(net.parameters())
    loss_of(net, my_piece(0)).backward()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        optimizer.step()


REFUSED: tuple[tuple[str, Make, torch.dtype, str], ...] = (
    ("te", partial(te, master_weights=True), torch.float32, r"transformer_engine\.pytorch\.optimizers\.FusedAdam\(master_weights=True\) would keep a second fp32 copy"),
    ("apex", partial(apex, master_weights=True, capturable=True), torch.float32, r"apex\.optimizers\.FusedAdam\(master_weights=True\) would keep a second fp32 copy"),
    ("apex", apex, torch.bfloat16, r"apex\.optimizers\.FusedAdam keeps fp32 state, .*got \['torch\.bfloat16'\]; use fp32 main weights"),
    ("te", partial(te, use_decoupled_grad=True), torch.float32, r"\(use_decoupled_grad=True\) reads parameter\.decoupled_grad"),
    ("lamb", partial(ApexFusedLAMB, lr=0.1), torch.float32, r"apex's FusedLAMB does not know sharded parameters, got entry\.weight.*use apex\.optimizers\.FusedAdam"),
)  # fmt: skip


@CHECKS.on(1)
def settings_that_would_do_nothing_or_harm_are_refused_by_name() -> None:
    for _, make, dtype, words in REFUSED:
        net = shard_net(make_net(2, dtype=dtype), policy=MixedPrecisionPolicy(main_params_dtype=dtype))
        with pytest.raises(NotImplementedError, match=words):
            fully_shard_optimizer(make(net.parameters()))
        fully_shard_optimizer(make(make_net(2).parameters()))  # not over plain parameters


@pytest.mark.parametrize(("world", "check"), CHECKS.parameters)
def test_fused_adam(world: int, check: str) -> None:
    CHECKS.assert_passed(world, check)
