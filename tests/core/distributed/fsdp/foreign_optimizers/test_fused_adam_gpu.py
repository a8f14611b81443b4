"""The real ``FusedAdam`` of apex and of transformer-engine on two GPUs: the unsharded updates, and checkpoints in another split."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import traceback
import warnings
from collections.abc import Mapping
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
from tests.support.launch import run_ranks
from tests.support.models import Net, assert_is_cut, difference, full, make_cut_net, my_piece, shard_net
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.gpu(2)

MODULES = {"apex": "apex.optimizers", "te": "transformer_engine.pytorch.optimizers"}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "apex": {},
    "apex, L2": {"adam_w_mode": False, "bias_correction": False},
    "apex, capturable": {"capturable": True},
    "te": {},
    "te, capturable": {"capturable": True},
    "te, bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "te, fp16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "te, fp8 momentum": {"exp_avg_dtype": torch.uint8},
    "te, master weights": {"master_weights": True},
    "te, remainders": {"master_weights": True, "store_param_remainders": True},
}
# Their scales are those of what one rank holds, so values are rounded otherwise; 8 bits have 2^-4 of updates of 0.01.
TOLERANCES = {"te, fp16 moments": 1e-3, "te, fp8 momentum": 0.05}


def _dtype(name: str) -> torch.dtype:
    """The dtype of main weights."""
    return torch.bfloat16 if "master_weights" in SETTINGS[name] else torch.float32


def _optimizer(name: str, net: Net) -> Any:
    cls = importlib.import_module(MODULES[name.partition(",")[0]]).FusedAdam
    vectors, matrices = ([p for p in net.parameters() if (p.dim() > 1) is big] for big in (False, True))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return cls(groups, lr=0.01, weight_decay=0.1, **SETTINGS[name])


def _start(name: str, strategy: str, *, seed: int = 0) -> tuple[Net, Any]:
    dtype = _dtype(name)
    policy = MixedPrecisionPolicy(main_params_dtype=dtype)
    net = shard_net(make_cut_net(seed=seed, dtype=dtype).cuda(), strategy, policy=policy)
    return net, fully_shard_optimizer(_optimizer(name, net))


def _backward(net: Net, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=True)
    features, classes = (tensor.cuda() for tensor in my_piece(step))
    logits = net(features.to(next(net.parameters()).dtype)).float()
    torch.nn.functional.cross_entropy(logits, classes).backward()


def _train(net: Net, optimizer: Any, first: int) -> None:
    for step in range(first, first + 2):
        _backward(net, optimizer, step)
        optimizer.step()


def _error(ours: Net, theirs: Net) -> float:
    """The largest difference of weights, relative to the largest of each. Ranks: all."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(difference(full(mine).float(), full(other).float()) for mine, other in pairs)


def _check(name: str) -> dict[str, float]:
    """Return the largest differences of weights, by what they are compared with. Ranks: all."""
    found = {}
    net, optimizer = _start(name, "optim_grads_params")
    plain = make_cut_net(dtype=_dtype(name)).cuda()
    start = {key: value.detach().clone() for key, value in plain.named_parameters()}
    assert_is_cut(net)
    other = _optimizer(name, plain)
    for step in range(3):
        _backward(net, optimizer, step)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            theirs.grad = full(ours.grad).clone()
        optimizer.step()
        other.step()
    assert not any(torch.equal(value, start[key]) for key, value in plain.named_parameters()), "nothing was trained"
    found["unsharded"] = _error(net, plain)
    with shared_folder() as folder:
        save_checkpoint(net, optimizer, folder)
        loaded = _start(name, "no_shard", seed=1)
        load_checkpoint(*loaded, folder)
    options = StateDictOptions(full_state_dict=True)
    set_later = _start(name, "optim_grads_params", seed=1)
    set_later[0].load_state_dict({key: full(value).clone() for key, value in net.named_parameters()})
    state = get_optimizer_state_dict(net, optimizer, options=options)
    set_optimizer_state_dict(*set_later, state, options=options)
    for each in ((net, optimizer), loaded, set_later):
        _train(*each, first=3)
    found["checkpoint"], found["state of DCP"] = _error(net, loaded[0]), _error(net, set_later[0])
    return found


def _on_ranks(names: list[str]) -> dict[str, dict[str, float] | str]:
    warnings.simplefilter("ignore")  # of the packages; raised on one rank alone, the other would wait for it
    found: dict[str, dict[str, float] | str] = {}
    for name in names:
        try:
            found[name] = _check(name)
        except Exception:  # of all ranks alike; one that fails alone ends in the launch's limit
            found[name] = traceback.format_exc()
    return found


@functools.cache
def _found() -> dict[str, dict[str, float] | str]:
    there = [name for name in SETTINGS if importlib.util.find_spec(MODULES[name.partition(",")[0]].partition(".")[0])]
    ranks: Any = run_ranks(2, _on_ranks, there, backend="nccl", timeout_s=120.0)
    return {name: max((rank[name] for rank in ranks), key=lambda each: isinstance(each, str)) for name in there}


def _skip_unless_there(name: str) -> None:
    package = MODULES[name.partition(",")[0]].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not there")


@pytest.mark.parametrize("name", SETTINGS)
def test_updates_are_those_of_the_unsharded_optimizer(name: str) -> None:
    """To the last bit, where state has no scales: kernels work element by element."""
    _skip_unless_there(name)
    found = _found()[name]
    assert not isinstance(found, str), found
    assert found["unsharded"] <= TOLERANCES.get(name, 0.0), found


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_from_what_was_saved(name: str) -> None:
    _skip_unless_there(name)
    found = _found()[name]
    assert not isinstance(found, str), found
    assert max(found["checkpoint"], found["state of DCP"]) <= TOLERANCES.get(name, 0.0), found
