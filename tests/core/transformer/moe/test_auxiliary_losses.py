"""Load-balancing and z losses by hand, and how much of them reaches the router."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.loss_record import auxiliary_loss_names
from megatron.core.transformer.moe.moe_layer import num_expert_layers
from megatron.core.transformer.moe.router import TopKRouter, record_auxiliary_losses, set_num_microbatches
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks
from tests.support.plain_router import load_balancing_loss, scores_of_all, z_loss
from tests.support.tiny_moe import FIELDS

SEQUENCE, BATCH = 8, 2


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **fields})


def test_the_loss_is_one_where_experts_are_balanced() -> None:
    scores, experts = torch.full((6, 3), 1 / 3), torch.tensor([[0, 1], [1, 2], [2, 0]]).repeat(2, 1)
    torch.testing.assert_close(load_balancing_loss(scores, experts), torch.tensor(1.0))


def test_the_loss_weighs_mean_scores_with_shares_of_assignments() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
    experts = torch.tensor([[0, 1], [0, 1]])
    # e x sum of share x mean score: shares are 1/2, 1/2 and 0
    expected = 3 * (0.5 * (0.7 + 0.5) / 2 + 0.5 * (0.2 + 0.3) / 2)
    torch.testing.assert_close(load_balancing_loss(scores, experts), torch.tensor(expected))


def test_the_loss_of_sequences_is_the_mean_of_their_losses() -> None:
    """Tokens are [sequence, batch]: those of one sequence are BATCH rows apart."""
    scores = torch.rand(SEQUENCE * BATCH, 4).softmax(-1)
    experts = torch.topk(torch.rand(SEQUENCE * BATCH, 4), 2)[1]
    apart = [load_balancing_loss(scores[index::BATCH], experts[index::BATCH]) for index in range(BATCH)]
    together = load_balancing_loss(scores, experts, num_sequences=BATCH)
    torch.testing.assert_close(together, torch.stack(apart).mean())


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    two = torch.tensor(2.0).log()
    torch.testing.assert_close(z_loss(logits), (two**2 + (1 + two) ** 2) / 2)


def _expected_gradient(router: TopKRouter, hidden: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Compute the gradient [e, h] of the auxiliary losses alone, independently of the router."""
    weight = router.weight.detach().clone().requires_grad_()
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight.t()
    experts = torch.topk(logits, config.moe_router_topk)[1]
    by_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
    balance = load_balancing_loss(
        scores_of_all(logits, "softmax"), experts, num_sequences=hidden.shape[1] if by_sequence else 1
    )
    assert isinstance(config.moe_aux_loss_coeff, float)
    (config.moe_aux_loss_coeff * balance + (config.moe_z_loss_coeff or 0.0) * z_loss(logits)).backward()
    assert weight.grad is not None
    return weight.grad


def _gradient(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
    """Return the gradient [e, h] of the router if the main loss does not depend on it."""
    routing = router(hidden, dense=False)
    (routing.probs.sum() * 0.0).backward()
    assert router.weight.grad is not None
    return router.weight.grad


def _hidden() -> torch.Tensor:
    return torch.randn(SEQUENCE, BATCH, FIELDS["hidden_size"], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_of_auxiliary_losses_are_scaled_for_the_step(kind: str, microbatches: int, per_token: bool) -> None:
    """[Note: scale of auxiliary losses]: 1 / M, or the tokens where everything is divided by all tokens later."""
    config = _config(moe_router_load_balancing_type=kind, calculate_per_token_loss=per_token)
    router = TopKRouter(config)
    set_num_microbatches(router, microbatches)
    factor = SEQUENCE * BATCH if per_token else 1 / microbatches
    expected = factor * _expected_gradient(router, _hidden(), config)
    torch.testing.assert_close(_gradient(router, _hidden()), expected, rtol=1e-5, atol=1e-8)


def _split_gradient(axis: str, kind: str, per_token: bool) -> float:
    """Return the largest relative difference of the gradient that is summed over ranks with parts of the sequence."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    parallel: dict[str, Any] = {"tensor_model_parallel_size": size, "sequence_parallel": True}
    if axis == "cp":
        parallel = {"context_parallel_size": size}
    config = _config(moe_router_load_balancing_type=kind, calculate_per_token_loss=per_token, **parallel)
    router = TopKRouter(config, ProcessGroupCollection(**{axis: group, "tp_cp": group}))
    whole = TopKRouter(_config(moe_router_load_balancing_type=kind, calculate_per_token_loss=per_token))
    grad = _gradient(router, _hidden().chunk(size)[rank])
    dist.all_reduce(grad)
    if axis == "cp" and not per_token:
        grad /= size  # the engine averages over dp_cp
    expected = _gradient(whole, _hidden())
    return float((grad - expected).abs().max() / expected.abs().max())


def _all_split_gradients() -> dict[str, float]:
    return {
        f"{axis} {kind} {per_token}": _split_gradient(axis, kind, per_token)
        for axis in ("tp", "cp")
        for kind in ("aux_loss", "seq_aux_loss")
        for per_token in (False, True)
    }


def test_ranks_with_parts_of_the_sequence_add_up_to_the_whole_gradient() -> None:
    for differences in run_ranks(2, _all_split_gradients):
        assert max(differences.values()) < 1e-5, differences


def test_there_are_no_auxiliary_gradients_in_evaluation() -> None:
    router = TopKRouter(_config()).eval()
    assert not _gradient(router, _hidden()).any()


def test_losses_are_recorded_without_coefficients_and_summed_until_they_are_taken() -> None:
    config = _config(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    routers = [TopKRouter(config), TopKRouter(config)]
    model = torch.nn.ModuleList(routers)
    record = record_auxiliary_losses(model, config)
    assert record is not None and record.names == ("load_balancing_loss", "z_loss")
    expected = torch.zeros(2)
    for router in routers:
        routing = router(_hidden(), dense=False)
        logits = _hidden().reshape(-1, FIELDS["hidden_size"]) @ router.weight.detach().t()
        balance = load_balancing_loss(scores_of_all(logits, "softmax"), routing.experts)
        expected += torch.stack((balance, z_loss(logits)))
    model.eval()
    routers[0](_hidden())
    taken = record.take(torch.device("cpu"))
    assert not taken.requires_grad
    torch.testing.assert_close(taken.float(), expected)
    assert not record.take(torch.device("cpu")).any()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}, ()),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, ("seq_load_balancing_loss", "z_loss")),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}, ("z_loss",)),
        (
            {
                "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss", "aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.0, 0.2],
            },
            ("global_load_balancing_loss", "load_balancing_loss", "z_loss"),
        ),
    ],
)
def test_what_is_recorded_has_megatrons_names(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    config = _config(**fields)
    assert auxiliary_loss_names(config) == names
    assert (record_auxiliary_losses(TopKRouter(config), config) is None) == (not names)


def test_groups_that_contradict_each_other_are_refused() -> None:
    """A tp_cp group without some of the ranks that share a microbatch would count too few tokens."""

    class TwoRanks:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"tp_cp must hold the ranks of tp and cp \(2\), got 1"):
        TopKRouter(_config(), ProcessGroupCollection(cp=TwoRanks()))  # type: ignore[arg-type]


def _global_gradients(tokens: int) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Return the recorded losses [M], the gradient of two microbatches on this rank, and the expected one of all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    config = _config(moe_router_load_balancing_type="global_aux_loss", moe_z_loss_coeff=None)
    router = TopKRouter(config, ProcessGroupCollection(dp=dist.group.WORLD))
    set_num_microbatches(router, 2)
    record = record_auxiliary_losses(router, config)
    assert record is not None and record.names == ("global_load_balancing_loss",)
    generator = torch.Generator().manual_seed(7)
    # [microbatch, rank]: both steps have the same data, so counts must begin anew
    data = torch.randn(2, size, tokens, 1, FIELDS["hidden_size"], generator=generator)
    for _ in range(2):
        record.clear()
        router.weight.grad = None
        losses = []
        for hidden in data[:, rank]:
            (router(hidden, dense=False).probs.sum() * 0.0).backward()
            losses.append(float(record._parts["global_load_balancing_loss"][-1]))
    assert router.weight.grad is not None
    return losses, router.weight.grad.tolist(), _expected_global_gradient(router, data, config).tolist()


def _expected_global_gradient(router: TopKRouter, data: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """The gradient [e, h] of one loss for all ranks' tokens, with the shares of assignments of the step so far."""
    weight = router.weight.detach().clone().requires_grad_()
    shares = torch.zeros(config.num_moe_experts or 0)
    total = torch.zeros(())
    for index, of_ranks in enumerate(data):
        logits = of_ranks.reshape(-1, of_ranks.shape[-1]) @ weight.t()
        taken = torch.topk(logits, config.moe_router_topk)[1].flatten()
        shares = shares + torch.bincount(taken, minlength=len(shares)) / taken.numel()
        loss = len(shares) * (shares / (index + 1) * scores_of_all(logits, "softmax").mean(dim=0)).sum()
        assert isinstance(config.moe_aux_loss_coeff, float)
        total = total + config.moe_aux_loss_coeff * loss / len(data)
    total.backward()
    assert weight.grad is not None
    return weight.grad


def test_the_global_loss_takes_shares_from_all_ranks_and_the_step_so_far() -> None:
    """Ranks' gradients add up to that of one loss, and recorded parts, meant over ranks, to the loss itself."""
    results = run_ranks(2, _global_gradients, 6)
    summed = torch.tensor(results[0][1]) + torch.tensor(results[1][1])
    torch.testing.assert_close(summed, torch.tensor(results[0][2]), rtol=1e-5, atol=1e-8)
    assert all(0.5 < (a + b) / 2 < 4 for a, b in zip(results[0][0], results[1][0], strict=True))


def _gradient_of_two_in_flight(recomputes: bool) -> torch.Tensor:
    """The router's gradient where both forwards of a step run before the first backward, as on a pipeline's first stage."""
    router = TopKRouter(_config(moe_router_load_balancing_type="global_aux_loss"))
    inputs = [
        torch.randn(SEQUENCE, BATCH, FIELDS["hidden_size"], generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    ]
    forward = partial(checkpoint, router, use_reentrant=False) if recomputes else router
    for probs, _ in [forward(hidden.requires_grad_()) for hidden in inputs]:
        (probs.sum() * 0.0).backward()
    assert router.weight.grad is not None
    return router.weight.grad


def test_the_global_loss_of_a_recomputed_forward_is_that_of_its_place_in_the_step() -> None:
    """Later microbatches have been counted by then."""
    assert torch.equal(_gradient_of_two_in_flight(True), _gradient_of_two_in_flight(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_forward_counts_once_whatever_kind_of_checkpoint_computes_it_again(reentrant: bool) -> None:
    """Reentrant ones run without gradients first; what they compute in backward counts."""
    kinds: dict[str, Any] = {"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"]}
    config, results = _config(**kinds, moe_aux_loss_coeff=[0.1, 0.2]), []
    for recomputes in (False, True):
        router = TopKRouter(config)
        record = record_auxiliary_losses(router, config)
        assert record is not None
        for hidden in (_hidden(), _hidden().square()):
            inputs, probs_of = hidden.requires_grad_(), lambda x, router=router: router(x, dense=False).probs
            probs = checkpoint(probs_of, inputs, use_reentrant=reentrant) if recomputes else probs_of(inputs)
            (probs.sum() * 0.0).backward()
        assert router.weight.grad is not None
        results.append((router.weight.grad, record.take(torch.device("cpu"))))
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


def test_a_step_of_megatrons_loop_counts_anew() -> None:
    """Its loops attach no record, and complete gradients once in a step."""
    model: Any = torch.nn.Module()
    model.config = _config(moe_router_load_balancing_type="global_aux_loss")
    model.router, model.finish_grad_sync = TopKRouter(model.config), lambda **_: None
    gradients = []
    for _ in range(2):
        model.router.weight.grad = None
        for hidden in (_hidden(), _hidden().square()):
            (model.router(hidden, dense=False).probs.sum() * 0.0).backward()
        finalize_model_grads([model])
        gradients.append(model.router.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_a_layer_that_runs_several_times_has_the_mean_of_its_losses(kind: str) -> None:
    """As in Megatron-Core a repeated layer of multi-token prediction counts as one."""
    config = _config(moe_router_load_balancing_type=kind, num_layers=1, mtp_num_layers=2, mtp_use_repeated_layer=True)
    spec = get_gpt_mtp_block_spec(config, get_gpt_decoder_block_spec(config), False)
    assert spec is not None
    (router,) = (one for one in MultiTokenPredictionBlock(config, spec).modules() if isinstance(one, TopKRouter))
    once = TopKRouter(config)
    once.load_state_dict(router.state_dict())
    taken = []
    for one, runs in ((router, 2), (once, 1)):
        record = record_auxiliary_losses(one, config)
        assert record is not None
        for _ in range(runs):
            _gradient(one, _hidden())
        taken.append(record.take(torch.device("cpu")))
    torch.testing.assert_close(*taken)
    torch.testing.assert_close(router.weight.grad, once.weight.grad)
    assert num_expert_layers(config) == 2
