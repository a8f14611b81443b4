"""Functions of routing, losses and replay, as callers use them, against our routers and plain computations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import loss_tracker, moe_utils
from megatron.core.transformer.moe.auxiliary_losses import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter, record_auxiliary_losses
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.routing import choose_experts, route
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks
from tests.support.tiny_moe import FIELDS, build_moe_gpt, tokens_of

SEQUENCE, BATCH = 8, 2
GROUPS = ProcessGroupCollection()


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **fields})


def _hidden(seed: int = 3) -> torch.Tensor:
    return torch.randn(SEQUENCE, BATCH, FIELDS["hidden_size"], generator=torch.Generator().manual_seed(seed))


_KINDS: dict[str, dict[str, Any]] = {
    "softmax_of_chosen": {},
    "softmax_of_all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid_in_groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
    },
}


@pytest.mark.parametrize("kind", _KINDS)
def test_top_k_by_a_score_function_is_what_a_router_computes(kind: str) -> None:
    config, hidden = _config(**_KINDS[kind]), _hidden()
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    bias = torch.tensor([0.3, -0.2, 0.1, 0.0]) if config.moe_router_enable_expert_bias else None
    expected = route(hidden, weight, config, expert_bias=bias).routing
    arguments: dict[str, Any] = {
        "topk": 2,
        "use_pre_softmax": config.moe_router_pre_softmax,
        "num_groups": config.moe_router_num_groups,
        "group_topk": config.moe_router_group_topk,
        "scaling_factor": config.moe_router_topk_scaling_factor,
        "score_function": config.moe_router_score_function,
        "expert_bias": bias,
    }
    logits = hidden.view(-1, 16) @ weight.t()
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, **arguments)
    torch.testing.assert_close(probs.gather(1, expected.experts), expected.probs)
    assert torch.equal(routing_map, torch.zeros(16, 4).scatter(1, expected.experts, 1.0).bool())
    assert (probs[~routing_map] == 0).all()
    dense, experts = moe_utils.topk_routing_with_score_function(logits, dense_output=True, **arguments)
    torch.testing.assert_close((dense, experts), tuple(expected))
    again, _ = moe_utils.topk_routing_with_score_function(
        logits, precomputed_indices=experts.flip(1), dense_output=True, **arguments
    )
    torch.testing.assert_close(again, dense.flip(1))
    ours, theirs = (torch.autograd.grad(x.sin().sum(), weight) for x in (dense, expected.probs))
    torch.testing.assert_close(ours, theirs)


def test_an_unknown_score_function_is_refused() -> None:
    with pytest.raises(ValueError, match="score_function must be one of"):
        moe_utils.topk_routing_with_score_function(torch.ones(2, 4), 2, score_function="tanh")


def test_scores_of_losses_count_the_best_by_score_without_padding() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([False, False, True, False, False, False])
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid", padding_mask=padding)
    plain = torch.sigmoid(logits) / torch.sigmoid(logits).sum(1, keepdim=True)
    torch.testing.assert_close(scores, plain * ~padding[:, None])
    expected = torch.zeros(6, 4).scatter(1, plain.topk(2).indices, 1.0).bool() & ~padding[:, None]
    assert torch.equal(routing_map, expected)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_assignments_above_the_capacity_are_dropped(policy: str) -> None:
    probs = torch.tensor([[0.1, 0.0], [0.4, 0.0], [0.2, 0.0], [0.0, 0.5]])
    kept, kept_map = moe_utils.apply_router_token_dropping(probs, probs > 0, 1, 1.0, drop_policy=policy)
    rows = [1, 2] if policy == "probs" else [0, 1]
    assert kept_map.nonzero().tolist() == sorted([[row, 0] for row in rows] + [[3, 1]])
    torch.testing.assert_close(kept, probs * kept_map)
    _, padded = moe_utils.apply_router_token_dropping(probs, probs > 0, 1, 1.0, policy, pad_to_capacity=True)
    assert padded.sum(0).tolist() == [2, 2] and bool((padded & kept_map).sum() == kept_map.sum())


def test_chunks_of_rows_are_reordered_with_their_factors() -> None:
    rows, factors = torch.arange(6.0).view(6, 1), torch.arange(6.0)
    sorted_rows, sorted_factors = moe_utils.sort_chunks_by_idxs(
        rows, torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]), probs=factors
    )
    assert sorted_rows.flatten().tolist() == [3, 4, 5, 0, 1, 2]
    assert sorted_factors is not None and torch.equal(sorted_factors, sorted_rows.flatten())
    assert moe_utils.sort_chunks_by_idxs(rows, torch.tensor([6]), torch.tensor([0]))[1] is None


def test_a_linear_layer_in_another_dtype_keeps_the_dtypes_of_its_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 2, 8), (4, 8), (4,))]
    inputs = [x.requires_grad_() for x in given]
    output: Any = moe_utils.RouterGatingLinearFunction.apply(*inputs, torch.float32)
    expected = torch.nn.functional.linear(*(x.float() for x in inputs))
    assert output.dtype is torch.float32
    torch.testing.assert_close(output, expected)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), inputs) for x in (output, expected))
    torch.testing.assert_close(ours, theirs)
    without: Any = moe_utils.RouterGatingLinearFunction.apply(*inputs[:2], None, torch.float32)
    torch.testing.assert_close(without, expected - inputs[2].float())


def test_a_router_is_one_of_megatron_cores_and_gates_as_it_routes() -> None:
    router = TopKRouter(_config())
    assert isinstance(router, Router) and router.num_experts == 4
    chosen = moe_utils.topk_routing_with_score_function(router.gating(_hidden()).view(-1, 4), 2, dense_output=True)
    torch.testing.assert_close(chosen, tuple(router(_hidden(), dense=False)))
    layers = [module for module in build_moe_gpt().modules() if isinstance(module, BaseMoELayer)]
    assert [(type(layer), layer.router.layer_number) for layer in layers] == [(MoELayer, 1), (MoELayer, 2)]


def test_losses_and_capacity_follow_the_configuration_as_it_is_now() -> None:
    """Callers switch losses on and off between steps."""
    config = _config(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    router = TopKRouter(config)

    def gradient() -> torch.Tensor:
        (grad,) = torch.autograd.grad(router(_hidden(), dense=False).probs.sum() * 0.0, router.weight)
        return grad

    assert not gradient().any()
    config.moe_aux_loss_coeff = 1.0
    balanced = gradient()
    assert balanced.any()
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, 1.0
    assert gradient().any() and not torch.allclose(gradient(), balanced)
    config.moe_z_loss_coeff, config.moe_aux_loss_coeff = None, 2.0
    torch.testing.assert_close(gradient(), 2 * balanced)
    config.moe_router_load_balancing_type = "global_aux_loss"
    torch.testing.assert_close(gradient(), 2 * balanced)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_router_returns_maps_without_what_the_capacity_of_now_drops(policy: str) -> None:
    """As callers call it; the layer's dispatcher drops the same."""
    config = _config(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    layer = next(module for module in build_moe_gpt().modules() if isinstance(module, MoELayer))
    router, hidden = layer.router, _hidden()
    router.config = layer.token_dispatcher.config = config
    probs, routing_map = router(hidden)
    free = router(hidden, dense=False)
    assert routing_map.sum() == 2 * SEQUENCE * BATCH and torch.equal(probs.gather(1, free.experts), free.probs)
    config.moe_expert_capacity_factor, config.moe_token_drop_policy = 0.5, policy
    probs, routing_map = router(hidden)
    counts = routing_map.sum(0)
    assert counts.tolist() == layer.token_dispatcher.plan(free).assignments_of_experts().tolist()
    assert counts.max() == 4 and not probs[~routing_map].any()
    config.moe_pad_expert_input_to_capacity = True
    assert router(hidden)[1].sum(0).tolist() == [4] * 4


class _Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)


def test_callers_read_the_losses_of_each_layer_where_no_training_loop_records_them() -> None:
    """The sums over microbatches, until a caller clears them; and their means over layers."""
    model = build_moe_gpt(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    tokens, positions = tokens_of(0)[:, :12], torch.arange(12).expand(2, -1)
    loss_tracker.get_moe_layer_wise_logging_tracker().clear()  # of other tests in this process
    for _ in range(2):
        model(tokens, positions, None, labels=tokens).sum().backward()
    model.eval()
    model(tokens, positions, None, labels=tokens)
    model.train()
    loss_tracker.reduce_aux_losses_tracker_across_ranks(pg_collection=GROUPS)
    tracker = {
        name: entry["values"].clone() for name, entry in loss_tracker.get_moe_layer_wise_logging_tracker().items()
    }
    assert {name: tuple(values.shape) for name, values in tracker.items()} == {
        "load_balancing_loss": (2,),
        "z_loss": (2,),
    }
    writer, totals = _Writer(), {"z_loss": torch.tensor(1.0)}
    said = loss_tracker.track_moe_metrics(
        0.5, 7, writer, None, totals, per_layer_logging=True, num_layers=2, pg_collection=GROUPS
    )
    assert said == ""
    for name, values in tracker.items():
        assert writer.scalars[name] == pytest.approx(float(values.sum() / 4))
        assert writer.scalars[f"moe/{name}_layer_1"] == pytest.approx(float(values[1] / 2))
        torch.testing.assert_close(totals[name], values.sum() / 4 + (name == "z_loss"))
    assert not any(entry["values"].any() for entry in loss_tracker.get_moe_layer_wise_logging_tracker().values())
    record = record_auxiliary_losses(model, model.config)
    assert record is not None
    model(tokens, positions, None, labels=tokens)
    torch.testing.assert_close(
        record.take(torch.device("cpu")).float(), torch.stack([x.sum() / 2 for x in tracker.values()])
    )
    assert not loss_tracker.get_moe_layer_wise_logging_tracker()["z_loss"]["values"].any()
    said = loss_tracker.track_moe_metrics(
        1.0, 8, track_names="of_no_layer_here", force_initialize=True, num_layers=4, moe_layer_freq=[0, 1, 0, 1],
        pg_collection=GROUPS,
    )  # fmt: skip
    assert said == " of_no_layer_here: 0.00 |"
    with pytest.raises(ValueError, match="num_layers must be given"):
        loss_tracker.track_moe_metrics(1.0, 8)


def test_a_larger_model_adds_its_losses_to_those_of_a_smaller_one() -> None:
    """As an actor and a critic in one process."""
    for layer, num_layers in ((1, 1), (3, 3), (1, 1)):
        loss_tracker.save_to_aux_losses_tracker("of both", torch.tensor(2.0), layer, num_layers)
    assert loss_tracker.get_moe_layer_wise_logging_tracker()["of both"]["values"].tolist() == [4.0, 0.0, 2.0]


def test_a_loss_of_a_caller_enters_backward_with_the_scale_of_the_step() -> None:
    output, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([0.5]))
    try:
        joined: Any = MoEAuxLossAutoScaler.apply(output, loss)
        grads = torch.autograd.grad(joined.sum() * 3, (output, loss))
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
    torch.testing.assert_close(grads, (torch.full((3,), 3.0), torch.tensor(0.5)))


@pytest.fixture
def _no_replays() -> Any:
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


@pytest.mark.usefixtures("_no_replays")
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}], ids=["kept", "recomputed"])  # fmt: skip
def test_a_model_replays_the_experts_that_another_one_chose(recompute: dict[str, Any]) -> None:
    """As in reinforcement learning: record with old weights, train with new ones and the same experts."""
    model = build_moe_gpt(moe_enable_routing_replay=True, **recompute)
    instances = RouterReplay.global_router_replay_instances
    assert [one.layer_number for one in instances] == [1, 2]
    tokens, positions = tokens_of(0)[:, :12], torch.arange(12).expand(2, -1)

    def losses() -> torch.Tensor:
        result: torch.Tensor = model(tokens, positions, None, labels=tokens)
        return result

    free = losses()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    torch.testing.assert_close(losses(), free)
    recorded = RouterReplay.get_recorded_data()
    chosen = [one for one in recorded if one is not None]
    assert [tuple(one.shape) for one in chosen] == [(24, 2)] * 2
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, TopKRouter):
                layer.weight.neg_()
    RouterReplay.clear_global_router_replay_action()
    assert not torch.allclose(losses(), free)
    RouterReplay.set_replay_data(chosen)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replayed = losses()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    replayed.sum().backward()
    assert [len(one.replay_backward_list) for one in instances] == ([0, 0] if recompute else [1, 1])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    RouterReplay.set_replay_data([torch.zeros(24, 2, dtype=torch.int64)] * 2)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert not torch.allclose(losses(), replayed)
    RouterReplay.clear_global_indices()
    with pytest.raises(RuntimeError, match="layer 1 has no experts"):
        losses()
    with pytest.raises(ValueError, match="for each of 2 routers, got 1"):
        RouterReplay.set_replay_data(chosen[:1])


@pytest.mark.usefixtures("_no_replays")
def test_a_replay_chooses_the_given_experts_and_weighs_them_by_the_scores_of_now() -> None:
    replay, scores = RouterReplay(), torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    buffer = torch.zeros(4, 1, 2, dtype=torch.int64)
    RouterReplay.set_global_static_buffers(buffer)
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    assert replay.get_replay_topk(scores, 2, default_compute_topk=choose_experts)[1].tolist() == [[1, 2], [2, 0]]
    assert buffer[:, 0].tolist() == [[1, 2], [2, 0], [0, 0], [0, 0]]
    RouterReplay.clear_global_static_buffers()
    given = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[2, 1], [0, 1]])]
    for experts in given:
        replay.set_target_indices(experts)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    best, experts = replay.get_replay_topk(scores, 2)
    assert torch.equal(experts, given[1]) and best.tolist() == [[2.0, 3.0], [5.0, 4.0]]
    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    assert [replay.get_replay_topk(scores, 2)[1].tolist() for _ in given] == [one.tolist() for one in given]


def _random_logits() -> tuple[list[float], float]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(5)
    groups = moe_utils.get_default_pg_collection()
    assert groups.ep is not None and groups.ep.size() == 2
    logits = torch.full((2, 2), math.pi, requires_grad=True)
    drawn = moe_utils.apply_random_logits(logits)
    drawn.sum().backward()
    assert logits.grad is not None
    return drawn.flatten().tolist(), float(logits.grad.sum())


def test_random_logits_differ_on_ranks_and_pass_gradients_on() -> None:
    (first, grads), (second, _) = run_ranks(2, _random_logits)
    assert first != second and grads == 4.0 and all(abs(x) < 3 for x in first)


def _reduced() -> list[float]:
    group = dist.group.WORLD
    loss_tracker.save_to_aux_losses_tracker("summed", torch.tensor(1.0 + dist.get_rank()), 2, 3, reduce_group=group)
    loss_tracker.save_to_aux_losses_tracker("averaged", torch.tensor(1.0 + dist.get_rank()), 1, 3, avg_group=group)
    loss_tracker.save_to_aux_losses_tracker("averaged", torch.tensor(9.0), None, 3)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    loss_tracker.reduce_aux_losses_tracker_across_ranks()
    tracker = loss_tracker.get_moe_layer_wise_logging_tracker()
    return [*tracker["summed"]["values"].tolist(), *tracker["averaged"]["values"].tolist()]


def test_losses_are_summed_over_stages_and_parts_and_averaged() -> None:
    for values in run_ranks(2, _reduced):
        # over the stages 1 + 2; over both ranks again: their sum, and their mean
        assert values == [0.0, 6.0, 0.0, 3.0, 0.0, 0.0]
