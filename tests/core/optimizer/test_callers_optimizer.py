"""What loops written for Megatron-Core do with an optimizer: its step in parts, chains, settings of some parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as OfItsPath
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class _Net(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(5, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.output = torch.nn.Linear(4, 5)
        for table in (self.embedding, self.output):
            table.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.hidden(self.embedding(tokens)).tanh()).logsumexp(-1).sum()


TOKENS = torch.tensor([0, 1, 1, 3])


def _train(optimizer: Any, nets: list[_Net], *, in_parts: bool = False, steps: int = 3) -> list[float]:
    norms = []
    for _ in range(steps):
        sum(optimizer.scale_loss(net(TOKENS)) * (index + 1) for index, net in enumerate(nets)).backward()
        if in_parts:
            assert optimizer.prepare_grads() is False
            norms.append(optimizer.clip_grad_norm(0.5).item())
            assert optimizer.get_grad_norm().item() == pytest.approx(min(0.5, norms[-1]), rel=1e-4)
            assert optimizer.step_with_ready_grads() is True
        else:
            norms.append(optimizer.step()[1].item())
        optimizer.zero_grad()
    optimizer.synchronize()
    return norms


def _sharded(seed: int) -> _Net:
    net = _Net(seed)
    fully_shard(net, placements=strategy_placements("optim_grads_params"))
    return net


@CHECKS.on(2)
def a_step_in_parts_and_a_chain_equal_a_step() -> None:
    config = OptimizerConfig(lr=0.05, clip_grad=0.5, weight_decay=0.1, loss_scale=8.0)
    whole = [_Net(0), _Net(1)]
    expected = _train(get_megatron_optimizer(config, whole), whole)
    weights = torch.nn.utils.parameters_to_vector(param for net in whole for param in net.parameters())
    for in_parts in (False, True):
        for chained in (False, True):
            nets = [_sharded(0), _sharded(1)]
            optimizer: Any = get_megatron_optimizer(config, nets)
            assert isinstance(optimizer, OfItsPath) and isinstance(optimizer.optimizer, FlatAdamW)
            if chained:
                optimizer = ChainedOptimizer([get_megatron_optimizer(config, [net]) for net in nets])
                assert len(optimizer.chained_optimizers) == 2 and not hasattr(optimizer, "optimizer")
            got = _train(optimizer, nets, in_parts=in_parts)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=0)
            found = [param.full_tensor().flatten() for net in nets for param in net.parameters()]  # type: ignore[attr-defined]
            torch.testing.assert_close(torch.cat(found), weights, rtol=1e-4, atol=1e-6)


@CHECKS.on(2)
def the_next_step_takes_weights_that_a_caller_wrote() -> None:
    """Also where the lower halves of fp32 weights are state, which a write makes stale."""
    net = _Net().bfloat16()
    fully_shard(
        net,
        placements=strategy_placements("optim_grads_params"),
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, store_param_remainders=True), [net])
    _train(optimizer, [net])
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.25)
    optimizer.reload_model_params()
    loss = net(TOKENS)
    expected = _Net().bfloat16()
    with torch.no_grad():
        for param in expected.parameters():
            param.fill_(0.25)
    assert loss.item() == expected(TOKENS).item()
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    loss.backward()
    whole = [param.grad.full_tensor() for param in net.parameters()]
    assert optimizer.count_zeros().item() == sum(int((grad == 0).sum()) for grad in whole) > 0
    optimizer.step()
    assert all(bool((param.full_tensor() == 0.25).all()) for param in net.parameters())  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="load_state_dict of the model"):
        optimizer.reload_model_params({})  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_a_chain_is_seen_as_one_optimizer() -> None:
    nets = [_Net(0), _Net(1)]
    config = OptimizerConfig(lr=0.05)
    chain = ChainedOptimizer([get_megatron_optimizer(config, [net]) for net in nets])
    scheduler = OptimizerParamScheduler(chain, 0.0, 0.05, 0.0, 0, 10, "linear", 0.01, 0.01, 10, "constant")
    _train(chain, nets)
    scheduler.step(5)
    assert (
        {group["lr"] for group in chain.param_groups} == {0.025} == {get_canonical_lr_for_logging(chain.param_groups)}
    )
    assert len(chain.state) == len(chain.get_parameters()) == 10 and (1, nets[1].hidden.weight) in chain.state
    other = ChainedOptimizer([get_megatron_optimizer(config, [net]) for net in (_Net(0), _Net(1))])
    other.load_state_dict(chain.state_dict())
    mine, theirs = list(chain.state.values()), list(other.state.values())
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(mine, theirs, strict=True))
    with pytest.raises(ValueError, match="each of the 2 optimizers, got 1"):
        other.load_state_dict(chain.state_dict()[:1])
    with pytest.raises(ValueError, match="equal configurations"):
        ChainedOptimizer([])
    with pytest.raises(AttributeError, match="ask chained_optimizers"):
        _ = chain.optimizer
    of_torch: Any = [torch.optim.SGD([weight], lr=0.1) for weight in (nets[0].hidden.weight, nets[1].hidden.weight)]
    shown = ChainedOptimizer(of_torch)
    shown.param_groups[1]["lr"] = 0.2
    assert of_torch[1].param_groups[0]["lr"] == 0.2 and shown.get_parameters()[0] is nets[0].hidden.weight
    single = ChainedOptimizer(other.chained_optimizers[:1])
    assert single.optimizer is other.chained_optimizers[0].optimizer and isinstance(single.state_dict(), dict)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("offload_to_cpu", "optimizer_cpu_offload=True"),
        ("save_parameter_state", "sharded_state_dict"),
        ("get_grad_stats_parallel_group", "get_grad_norm"),
    ],
)
def test_what_is_not_served_says_the_way_out(name: str, way_out: str) -> None:
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [_Net()])
    assert not hasattr(optimizer, name) and type(optimizer) is MegatronOptimizer is not DistributedOptimizer
    with pytest.raises(NotImplementedError, match=way_out):
        getattr(optimizer, name)()
    assert optimizer.chained_optimizers == [optimizer] and not optimizer.is_stub_optimizer
    assert not optimizer.has_grad_norm_group("mtp")


def test_some_parameters_have_settings_of_their_own() -> None:
    net = _Net()
    config = OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.3)
    overrides: dict[ParamKey, Any] = {
        **get_standard_config_overrides(config),
        ParamKey(name="hidden.*"): {"max_lr": 0.2, "min_lr": 0.02},
        ParamKey(attr=("is_embedding_or_output_parameter",)): {"start_wd": 0.1, "end_wd": 0.5},
        ParamKey(predicate=ParamPredicate("output", lambda param: param.shape == (5, 4))): {"wd_mult": 0.5},
    }
    optimizer = get_megatron_optimizer(config, [net], overrides)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.1, 0.01, 0, 10, "linear", 0.2, 0.4, 10, "linear")
    scheduler.step(5)
    names = {param: name for name, param in net.named_parameters()}
    found = {names[param]: group for group in optimizer.param_groups for param in group["params"]}
    rates = {name: (round(group["lr"], 6), round(group["weight_decay"], 6)) for name, group in found.items()}
    assert rates == {
        "embedding.weight": (0.055, 0.15),
        "hidden.weight": (0.11, 0.3),
        "hidden.bias": (0.11, 0.0),
        "output.weight": (0.055, 0.15),
        "output.bias": (0.055, 0.0),
    }
    scheduler.use_checkpoint = True
    scheduler.load_state_dict({**scheduler.state_dict(), "max_lr": 0.3})
    assert (found["hidden.weight"]["max_lr"], found["output.bias"]["max_lr"]) == (0.2, 0.3)


def test_without_overrides_biases_decay_too() -> None:
    (group,) = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.3), [_Net()], {}).param_groups
    assert len(group["params"]) == 5 and group["weight_decay"] == 0.3


@pytest.mark.parametrize("decoupled", [None, 0.4])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_overrides_of_the_standard_and_of_widths_are_what_is_done_without(kind: str, decoupled: float | None) -> None:
    net = _Net()
    config = OptimizerConfig(optimizer=kind, lr=0.1, min_lr=0.01, decoupled_lr=decoupled)
    net.config = type("Config", (), {"use_mup": True, "mup_width_mult": 4.0})()
    overrides = {**get_standard_config_overrides(config), **get_mup_config_overrides(config, 4.0, kind)}
    settings = []
    for given in (None, overrides):
        groups = get_megatron_optimizer(config, [net], given).param_groups
        names = ("max_lr", "min_lr", "lr", "weight_decay", "eps")
        settings.append({p: [group.get(name) for name in names] for group in groups for p in group["params"]})
    assert settings[0] == settings[1]


def test_overrides_that_contradict_or_are_unknown_are_refused() -> None:
    config = OptimizerConfig(lr=0.1)
    refused: tuple[tuple[Any, type[Exception], str], ...] = (
        ({"learning_rate": 1.0}, ValueError, "learning_rate"),
        ({"optimizer": "sgd"}, NotImplementedError, "optimizer='muon'"),
    )
    for override, error, words in refused:
        with pytest.raises(error, match=words):
            get_megatron_optimizer(config, [_Net()], {ParamKey(name="*"): override})
    with pytest.raises(ValueError, match=r"conflicting values 1\.0 and 2\.0"):
        combine_param_group_overrides([{"wd_mult": 1.0}, None, {"wd_mult": 2.0}])
    with pytest.raises(ValueError, match="optimizer_type"):
        get_mup_config_overrides(config, 2.0, "sgd")
