"""``FullyShardedDataParallel``: its default units, its methods, and the effect of each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FsdpModule, FullyShardedDataParallel, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.buffers.sharded_grad import PendingGradient
from megatron.core.distributed.fsdp.comm.streams import Edge
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from megatron.core.distributed.fsdp.tuner import Measured, Trial, engine_choices, engine_facts, measure
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support.agreement import assert_same_gradients, assert_same_parameters
from tests.support.models import STRATEGY_NAMES, assert_at_rest, full, watch_collectives
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt

CHECKS = RankChecks(__name__)
TIED = {"share_embeddings_and_output_weights": True}


def _wrap(model: GPTModel, units: Any = None, **settings: Any) -> FullyShardedDataParallel:
    settings = {"data_parallel_sharding_strategy": "optim_grads_params", **settings}
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, **settings)
    return FullyShardedDataParallel(model.config, config, model, units)


def _loss(model: Any, rank: int, step: int, *, sums: bool = False) -> torch.Tensor:
    tokens = torch.randint(VOCAB_SIZE, (2, 7 + rank), generator=torch.Generator().manual_seed(10 * step + rank))
    losses: torch.Tensor = model(tokens[:, :-1], None, None, labels=tokens[:, 1:])
    return losses.sum() if sums else losses.mean()


def _mine(model: Any, step: int, **options: Any) -> torch.Tensor:
    return _loss(model, dist.get_rank(), step, **options)


def _plainly(model: Any, step: int, *, divisor: float | None = None, sums: bool = False) -> None:
    for rank in range(dist.get_world_size()):
        (_loss(model, rank, step, sums=sums) / (divisor or dist.get_world_size())).backward()


# ---- units ----------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def settings_that_differ_between_ranks_are_named() -> None:
    """Overlap and sizes decide in which order collectives are issued."""
    off = {"no_overlap_param_gather": dist.get_rank() == 1}
    with pytest.raises(ValueError, match=r"overlap_param_gather of the ddp_config must be .*, got True on ranks \[0\]"):
        _wrap(build_gpt(), **off)


def _owned(module: Any) -> set[str]:
    return {parameter.name for group in module.parameter_groups for parameter in group.parameters}


@CHECKS.on(2)
def units_are_the_layers_the_embedding_and_the_output_layer() -> None:
    model = build_gpt()
    _wrap(model)
    units = [name for name, module in model.named_modules() if isinstance(module, FsdpModule)]
    assert units == ["", "embedding", "decoder.layers.0", "decoder.layers.1", "output_layer"]
    assert _owned(model) == {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert _owned(model.output_layer) == {"weight"}
    assert _owned(model.embedding) == {"word_embeddings.weight", "position_embeddings.weight"}


@CHECKS.on(2)
def units_are_chosen_by_class_or_name() -> None:
    for choice in ([TransformerLayer], ["TransformerLayer"], [TransformerLayer, "LanguageModelEmbedding"]):
        model = build_gpt()
        _wrap(model, choice)
        units = [name for name, module in model.named_modules() if isinstance(module, FsdpModule)]
        embedding = ["embedding"] if len(choice) == 2 else []
        assert units == ["", *embedding, "decoder.layers.0", "decoder.layers.1"]
    with pytest.raises(ValueError, match=r"must be classes of modules in the model, got \['Conv2d', 'Missing'\]"):
        _wrap(build_gpt(), [torch.nn.Conv2d, "Missing", TransformerLayer])


@CHECKS.on(2)
def layers_of_one_unit_change_no_number_and_move_together() -> None:
    recompute: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    cases: list[tuple[str, dict[str, Any]]] = [
        ("optim_grads_params", {}),
        ("optim_grads_params", recompute),
        ("optim", {}),
    ]
    for strategy, fields in cases:
        found = {}
        for layers in (1, 2, 3):
            wrapped = _wrap(
                build_gpt(num_layers=5, **fields),
                data_parallel_sharding_strategy=strategy,
                overlap_param_gather=True,
                overlap_grad_reduce=True,
                fsdp_layers_per_unit=layers,
            )
            (context,) = wrapped._contexts()
            context.change_options(poisons=True)
            issued: list[str] = []
            watch_collectives(context, lambda what, group, issued=issued: issued.append(what))  # type: ignore[misc]
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
            numbers = []
            for step in range(4):
                issued.clear()
                optimizer.zero_grad()
                for index in range(2):
                    with microbatch(wrapped.module, is_first=index == 0, is_last=index == 1):
                        loss = _mine(wrapped, 2 * step + index)
                        loss.backward()
                    numbers.append(loss.detach())
                optimizer.step()
            found[layers] = numbers + [full(value).clone() for value in wrapped.state_dict().values()]
            units = 3 + -(-5 // layers)  # with those of the embedding, the output layer and the root
            assert len(wrapped.parameter_groups) == issued.count("last reduction") == units, (strategy, layers, issued)
            if strategy == "optim_grads_params":
                assert issued.count("forward's all-gather") == 2 * units, (layers, issued)
                last_gather = len(issued) - issued[::-1].index("backward's all-gather")
                assert issued[:last_gather].count("last reduction") >= units - 3, (
                    "gradients are reduced beside backward"
                )
        for layers in (2, 3):
            assert all(map(torch.equal, found[layers], found[1])), (strategy, layers)


@CHECKS.on(1, 2, 4)
def gpt_trains_as_unsharded() -> None:
    """Also with tied embeddings, whether the embedding, the output layer or both are units."""
    choices: list[Any] = [None]
    if dist.get_world_size() == 2:
        choices += [[TransformerLayer], [TransformerLayer, LanguageModelEmbedding], ["ColumnParallelLinear"]]
    for arguments in ({}, TIED):
        for units in choices:
            plain, model = build_gpt(arguments), build_gpt(arguments)
            wrapped = _wrap(model, units, overlap_param_gather=True, overlap_grad_reduce=True)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (wrapped, plain)]
            for context in wrapped._contexts():
                context.change_options(poisons=True)
            for step in range(3):
                for m, optimizer in zip((wrapped, plain), optimizers, strict=True):
                    optimizer.zero_grad()
                    if m is plain:
                        _plainly(plain, step)
                    else:
                        _mine(wrapped, step).backward()
                assert_same_gradients(model, plain)
                for optimizer in optimizers:
                    optimizer.step()
                assert_same_parameters(model, plain)
            for context in wrapped._contexts():
                assert_at_rest(context)


# ---- arguments ------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def what_is_not_served_is_refused() -> None:
    model = build_gpt()
    config = DistributedDataParallelConfig()
    with pytest.raises(ValueError, match="data-parallel group in dp_cp or dp, got None in both"):
        FullyShardedDataParallel(model.config, config, model, pg_collection=ProcessGroupCollection())
    assert not isinstance(model, FsdpModule)


@CHECKS.on(2)
def groups_come_from_the_collection() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    gathers = dist.new_group([0, 1])
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params")
    for groups, size, gather_group in (
        (ProcessGroupCollection(dp=alone), 1, alone),
        (ProcessGroupCollection(dp=alone, dp_cp=dist.group.WORLD, dp_cp_ag=gathers), 2, gathers),
        (None, 2, dist.group.WORLD),
    ):
        model = build_gpt()
        wrapped = FullyShardedDataParallel(
            model.config, config, model, device=torch.device("cpu"), pg_collection=groups
        )
        assert {group.group_mesh.mesh.size() for group in wrapped.parameter_groups} == {size}
        separate = wrapped.dist_index.get_fsdp_group(independent_all_gather=True)
        assert separate is (gathers if gather_group is gathers else None)
        if size == 2:
            (transport,) = wrapped.parameter_groups[0].group_mesh.axes
            assert transport.gather_group is gather_group  # type: ignore[attr-defined]


@CHECKS.on(2)
def a_memory_budget_reaches_the_plan() -> None:
    for budget, keeps in ((None, False), (10**9, True)):
        wrapped = _wrap(build_gpt(), fsdp_memory_budget=budget)
        (context,) = wrapped._contexts()
        for step in range(2):
            _mine(wrapped, step).backward()
        assert context.planner.plan is not None and bool(context.planner.plan.stays_unsharded_nbytes) == keeps
    with pytest.raises(
        ValueError, match=r"must be bytes where there is no device with memory of its own, got 0\.5 on cpu"
    ):
        _wrap(build_gpt(), fsdp_memory_budget=0.5)


@CHECKS.on(1, 2)
def the_transport_is_told_and_a_model_can_be_closed() -> None:
    wrapped = _wrap(build_gpt())
    assert wrapped.transport_names == (["gloo"] if dist.get_world_size() == 2 else ["local"])
    wrapped.close()
    _mine(wrapped, 0).backward()


@CHECKS.on(1, 2)
def per_token_loss_sums_gradients_over_ranks() -> None:
    for strategy in STRATEGY_NAMES:
        plain, model = build_gpt(), build_gpt(calculate_per_token_loss=True)
        wrapped = _wrap(model, data_parallel_sharding_strategy=strategy)
        _mine(wrapped, 0, sums=True).backward()
        _plainly(plain, 0, divisor=1.0, sums=True)
        assert_same_gradients(model, plain)
        wrapped.scale_gradients(0.25)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        assert_same_gradients(model, plain)
        wrapped.scale_gradients(torch.tensor(4.0))
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(4.0)
        assert_same_gradients(model, plain)


# ---- settings -------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def strategies_and_dtypes_reach_the_units() -> None:
    f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64
    for settings, expected in (
        ({}, (bf16, f32, bf16, bf16)),
        ({"megatron_fsdp_main_grads_dtype": f32}, (bf16, f32, f32, f32)),
        ({"megatron_fsdp_main_grads_dtype": f32, "megatron_fsdp_version": 2}, (bf16, f32, f32, bf16)),
        ({"grad_reduce_in_fp32": True}, (bf16, f32, f32, f32)),
        ({"grad_reduce_in_fp32": True, "megatron_fsdp_grad_comm_dtype": bf16}, (bf16, f32, f32, bf16)),
        ({"megatron_fsdp_main_params_dtype": None}, (bf16, bf16, bf16, bf16)),
        ({"megatron_fsdp_main_params_dtype": f64, "megatron_fsdp_main_grads_dtype": f32}, (bf16, f64, f32, f32)),
    ):
        wrapped = _wrap(build_gpt().bfloat16(), **settings)
        for group in wrapped.parameter_groups:
            dtypes = group.dtypes
            assert (dtypes.compute, dtypes.main_params, dtypes.main_grads, dtypes.grad_comm) == expected, settings
    for strategy in STRATEGY_NAMES:
        wrapped = _wrap(build_gpt(), data_parallel_sharding_strategy=strategy)
        for group in wrapped.parameter_groups:
            assert group.weights.needs_gather is (strategy == "optim_grads_params")
            assert (group.weights.main.local.numel() < group.layout.total_numel) is (strategy != "no_shard")


@contextmanager
def _watched(model: GPTModel) -> Iterator[list[tuple[str, str]]]:
    """Record ("gather", unit) and ("run", unit) in order, with a unit's name and a dot after it."""
    events: list[tuple[str, str]] = []
    prefetch = Unsharder.prefetch

    def prefetching(self: Unsharder, group: Any, **options: Any) -> None:
        was = group.weights.is_unsharded
        prefetch(self, group, **options)
        if group.weights.is_unsharded and not was:
            events.append(("gather", group.prefix))

    Unsharder.prefetch = prefetching  # type: ignore[method-assign]
    units = {f"{name}." if name else "": m for name, m in model.named_modules() if isinstance(m, FsdpModule)}
    handles = [
        unit.register_forward_pre_hook(lambda *_, name=name: events.append(("run", name)))
        for name, unit in units.items()
    ]
    try:
        yield events
    finally:
        Unsharder.prefetch = prefetch  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _most_waiting(events: list[tuple[str, str]]) -> int:
    """Return the largest number of units that were gathered and had not run yet when one began to run."""
    gathered: set[str] = set()
    ran: set[str] = set()
    most = 0
    for kind, name in events:
        (gathered if kind == "gather" else ran).add(name)
        most = max(most, len(gathered - ran) if kind == "run" else 0)
    return most


@CHECKS.on(2)
def weights_are_gathered_ahead_as_far_as_asked() -> None:
    seen = {}
    cases: dict[str, dict[str, Any]] = {
        "off": {"no_overlap_param_gather": True},
        "unasked": {},
        "one": {"overlap_param_gather": True},
        "none": {"overlap_param_gather": True, "fsdp_forward_prefetch_depth": 0},
        "three": {"overlap_param_gather": True, "fsdp_forward_prefetch_depth": 3},
        "backward": {"overlap_param_gather": True, "fsdp_backward_prefetch_depth": 3},
        "many": {"overlap_param_gather": True, "suggested_communication_unit_size": 1_000_000},
    }
    for name, settings in cases.items():
        model = build_gpt(num_layers=4)
        wrapped = _wrap(model, **settings)
        for step in range(3):
            _mine(wrapped, step).backward()
        with _watched(model) as events, torch.no_grad():
            _mine(wrapped, 3)
        seen[name] = _most_waiting(events)
    assert seen["off"] == seen["none"] == 0 and seen["unasked"] == seen["one"] == seen["backward"] == 1, seen
    assert seen["three"] == 3, seen
    assert seen["many"] >= 4, seen


@CHECKS.on(2)
def compute_waits_for_each_reduction_unless_they_overlap() -> None:
    waits = {}
    for overlaps in (False, True):
        wrapped = _wrap(build_gpt(), no_overlap_grad_reduce=not overlaps)
        (context,) = wrapped._contexts()
        edges: list[Edge] = []
        context.streams.wait = lambda edge, event, edges=edges: edges.append(edge)  # type: ignore[misc, method-assign]
        _mine(wrapped, 0).backward()
        waits[overlaps] = edges.count(Edge.GRADS_REDUCED)
    assert waits[True] == 1, "at the end of backward alone"
    assert waits[False] == 1 + len(wrapped.parameter_groups)


@CHECKS.on(2)
def start_param_sync_gathers_the_first_unit() -> None:
    for on, force, expected in ((True, {}, True), (False, {}, False), (False, {"force_sync": True}, True)):
        wrapped = _wrap(build_gpt(), overlap_param_gather=True, fsdp_all_gather_in_start_param_sync=on)
        plain = build_gpt()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            _mine(wrapped, step).backward()
            optimizer.step()
            wrapped.start_param_sync(**force)
            (context,) = wrapped._contexts()
            assert bool(context.unsharder.live) is (expected and context.planner.plan is not None)
            wrapped.synchronize_param_gather()
        plain.load_state_dict({name: full(value) for name, value in wrapped.state_dict().items()})
        torch.testing.assert_close(_mine(wrapped, 5), _mine(plain, 5))


@CHECKS.on(2, 4)
def a_gradient_that_is_not_finite_stops_every_rank_by_name() -> None:
    for strategy in STRATEGY_NAMES:
        for checks in (False, True):
            model = build_gpt()
            wrapped = _wrap(model, data_parallel_sharding_strategy=strategy, check_for_nan_in_grad=checks)
            (context,) = wrapped._contexts()
            context.change_options(poisons=True)  # padding between parameters is no gradient
            _mine(wrapped, 0).backward()
            wrapped.finish_grad_sync()
            parameter = model.decoder.layers[1].mlp.linear_fc2.weight
            if dist.get_rank() == 0 or strategy == "no_shard":
                assert isinstance(parameter.grad, DTensor)
                parameter.grad.to_local().view(-1)[:1].fill_(float("nan"))
            if not checks:
                wrapped.finish_grad_sync()
                continue
            with pytest.raises(RuntimeError, match=r"in that of decoder\.layers\.1\.mlp\.linear_fc2\.weight \(rank"):
                wrapped.finish_grad_sync()


# ---- methods --------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def the_debug_mode_watches_weights_and_trains_alike() -> None:
    plain, model = build_gpt(), build_gpt()
    wrapped = _wrap(model, fsdp_debug=True)
    kept: list[torch.Tensor] = []
    layer = next(module for module in model.modules() if isinstance(module, TransformerLayer))
    layer.register_forward_hook(lambda module, *_: kept.extend(p.detach() for p in module.parameters()))
    _mine(wrapped, 0).backward()
    with pytest.raises(
        RuntimeError, match=r"unsharded weight .* must be read within the forward or backward of its unit"
    ):
        kept[0].sum()
    wrapped.finish_grad_sync()
    _plainly(plain, 0)
    assert_same_gradients(model, plain)
    with wrapped.no_sync():
        _mine(wrapped, 1).backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.to_local().fill_(float("nan"))  # type: ignore[attr-defined]
    wrapped.finish_grad_sync()
    with pytest.raises(RuntimeError, match=r"weights must be finite, got .* in step 3 .*decoder\.layers\.0\."):
        _mine(wrapped, 2)


@CHECKS.on(2)
def the_debug_mode_compares_the_order_of_each_step() -> None:
    """Also of a step that began as the plan says, where nothing else would compare it."""
    model = build_gpt()
    wrapped = _wrap(model, fsdp_debug=True)
    for step in range(3):
        _mine(wrapped, step).backward()
        wrapped.finish_grad_sync()
    layers = model.decoder.layers._modules
    if dist.get_rank() == 1:
        layers["0"], layers["1"] = layers["1"], layers["0"]
    with pytest.raises(RuntimeError, match=r"all ranks must run the same units in one order, got .*decoder\.layers"):
        _mine(wrapped, 3).backward()


@CHECKS.on(2)
def no_sync_leaves_gradients_for_finish_grad_sync() -> None:
    for strategy in STRATEGY_NAMES:
        for synchronises in ("backward", "finish_grad_sync", "start_grad_sync"):
            plain, model = build_gpt(), build_gpt()
            wrapped = _wrap(model, data_parallel_sharding_strategy=strategy)
            with wrapped.no_sync():
                _mine(wrapped, 0).backward()
                if strategy in ("no_shard", "optim"):
                    assert all(isinstance(parameter.grad, PendingGradient) for parameter in model.parameters())
                if synchronises != "backward":
                    _mine(wrapped, 1).backward()
            if synchronises == "backward":
                _mine(wrapped, 1).backward()
            else:
                getattr(wrapped, synchronises)()
            wrapped.finish_grad_sync()
            for step in range(2):
                _plainly(plain, step)
            assert_same_gradients(model, plain)


@CHECKS.on(2)
def zero_grad_buffer_leaves_nothing() -> None:
    for strategy in STRATEGY_NAMES:
        model = build_gpt()
        wrapped = _wrap(model, data_parallel_sharding_strategy=strategy)
        _mine(wrapped, 0).backward()
        with wrapped.no_sync():
            _mine(wrapped, 1).backward()
        wrapped.zero_grad_buffer()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(group.grads.main.storage.flat.untyped_storage().size() == 0 for group in wrapped.parameter_groups)
        plain = build_gpt()
        _mine(wrapped, 2).backward()
        _plainly(plain, 2)
        assert_same_gradients(model, plain)


@CHECKS.on(2)
def broadcast_params_makes_replicas_equal() -> None:
    model, plain = build_gpt(), build_gpt()
    wrapped = _wrap(model, data_parallel_sharding_strategy="no_shard")
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().add_(dist.get_rank())
    wrapped.broadcast_params()
    assert_same_parameters(model, plain)


@CHECKS.on(2)
def state_dicts_have_the_names_of_the_unwrapped_model() -> None:
    plain, model = build_gpt(TIED), build_gpt(TIED, init_seed=99)
    wrapped = _wrap(model)
    names = list(plain.state_dict())
    assert list(wrapped.state_dict()) == list(wrapped.state_dict_for_save_checkpoint()) == names
    assert [name for name in wrapped.state_dict_for_save_checkpoint(prefix="a.")] == [f"a.{name}" for name in names]
    kept = wrapped.state_dict_for_save_checkpoint(keep_vars=True)
    assert kept["decoder.final_layernorm.weight"] is model.decoder.final_layernorm.weight
    wrapped.load_state_dict(plain.state_dict())
    assert_same_parameters(model, plain)
    wrapped.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        wrapped.load_state_dict({**plain.state_dict(), "more": torch.ones(1)})
    result = wrapped.load_state_dict({"more": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["more"]
    torch.testing.assert_close(_mine(wrapped, 0), _mine(plain, 0))


@CHECKS.on(2)
def microbatches_of_the_wrapper_accumulate() -> None:
    plain, model = build_gpt(TIED), build_gpt(TIED)
    wrapped = _wrap(model, data_parallel_sharding_strategy="optim_grads")
    for index in range(3):
        with microbatch(wrapped, is_first=index == 0, is_last=index == 2):
            _mine(wrapped, index).backward()
        _plainly(plain, index)
    assert_same_gradients(model, plain)


@CHECKS.on(2)
def no_option_of_the_tuner_changes_a_bit() -> None:
    """Each by itself, as it is measured."""
    losses: dict[str, list[float]] = {}

    def build(settings: Mapping[str, Any]) -> tuple[Any, torch.optim.Optimizer, list[float]]:
        wrapped = _wrap(build_gpt(), **settings)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
        return wrapped, optimizer, losses.setdefault(str(settings), [])

    def step(built: tuple[Any, torch.optim.Optimizer, list[float]]) -> None:
        wrapped, optimizer, seen = built
        loss = _mine(wrapped, len(seen))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())

    trial = Trial(build=build, step=step, facts=lambda built: engine_facts(built[0].module))
    visit = measure(trial, {}, 2, torch.device("cpu"))
    assert len(visit.seconds) == 2 and min(visit.seconds) > 0 and visit.facts["serving"] == ["nccl", "peer_copy"]
    given = Measured(name="as given", settings={}, visits=[visit])
    options = [option for choice in engine_choices() for option in choice.options_beside(given)]
    for option in options:
        measure(trial, {"overlap_param_gather": True, **option}, 2, torch.device("cpu"))
    assert len(losses) == len(options) + 1 == 9
    (expected, *others) = losses.values()
    assert len(set(expected)) == 6 and all(seen == expected for seen in others)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
