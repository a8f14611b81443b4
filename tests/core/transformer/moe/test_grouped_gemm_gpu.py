"""torch's grouped kernel on CUDA in bf16: its results, also with idle experts, and that the host does not wait."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import module_names
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.grouped_gemm import can_group, grouped_linear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import set_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks
from tests.support.tiny_moe import FIELDS, build_moe_gpt, tokens_of

IN, OUT = 64, 96
# Any numbers of rows, not only multiples of 8; idle experts first, in the middle and last; one expert with all.
COUNTS = [(13, 0, 1, 250), (0, 7, 0, 0), (264, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (128, 256, 8, 300)]
# bf16 keeps 8 bits; both ways accumulate in fp32 and round once, in another order.
TOLERANCE = 2e-2

BF16: dict[str, Any] = {
    "params_dtype": torch.bfloat16,
    "hidden_size": 64,
    "moe_ffn_hidden_size": 48,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
}


def _assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape and torch.isfinite(ours).all(), what
    largest = theirs.float().abs().max() if theirs.numel() else torch.zeros(())
    difference = (ours.float() - theirs.float()).abs().max() if theirs.numel() else torch.zeros(())
    assert difference <= tolerance * largest, (what, difference, largest)


def _poison() -> None:
    """Fill the memory that the allocator returns next with NaN."""
    blocks = [
        torch.full((numel,), float("nan"), device="cuda", dtype=torch.bfloat16) for numel in (2**10, 2**15, 2**22)
    ]
    del blocks


def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the grouped kernel is used on Hopper alone")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("in_one_buffer", [True, False])
def test_the_kernel_gives_what_a_loop_gives(counts: tuple[int, ...], in_one_buffer: bool) -> None:
    """Forward and both gradients; those of idle experts are zeros, though their memory held NaN."""
    _hopper()
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(sum(counts), IN, device="cuda", generator=generator).bfloat16().requires_grad_()
    flat = torch.randn(len(counts), OUT * IN + 64, device="cuda", generator=generator).bfloat16()
    weights = [row[: OUT * IN].view(OUT, IN) for row in flat]
    if not in_one_buffer:
        weights = [weight.clone() for weight in weights]
    weights = [weight.detach().requires_grad_() for weight in weights]
    assert can_group(x, weights)
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    grad = torch.randn(sum(counts), OUT, device="cuda", generator=generator).bfloat16()
    _poison()
    output = grouped_linear(x, weights, ends)
    _poison()
    ours = torch.autograd.grad(output, [x, *weights], grad)
    loop = torch.cat([F.linear(part, weight) for part, weight in zip(x.split(list(counts)), weights, strict=True)])
    theirs = torch.autograd.grad(loop, [x, *weights], grad)
    _assert_near(output, loop, "output")
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        _assert_near(a, b, f"gradient {index}")
    for gradient, count in zip(ours[1:], counts, strict=True):
        assert count or not gradient.any()


def _layer(**fields: Any) -> MoELayer:
    with torch.device("cuda"):
        model = build_moe_gpt(**{**BF16, **fields})
    layer = model.decoder.layers[0].mlp
    assert isinstance(layer, MoELayer)
    return layer


def _run(layer: MoELayer, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the input and all parameters."""
    x = hidden.clone().requires_grad_()
    output = layer(x)[0]
    return [output, *torch.autograd.grad(output.float().square().sum(), [x, *layer.parameters()])]


def _hidden() -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return torch.randn(37, 3, BF16["hidden_size"], device="cuda", generator=generator).bfloat16()


@pytest.mark.gpu(1)
def test_a_layer_by_one_kernel_gives_what_experts_in_turn_give() -> None:
    _hopper()
    grouped, loop = _layer(), _layer(moe_grouped_gemm=False)
    for index, (a, b) in enumerate(zip(_run(grouped, _hidden()), _run(loop, _hidden()), strict=True)):
        _assert_near(a, b, f"tensor {index}", 2 * TOLERANCE)  # two matrices, one after the other


@pytest.mark.gpu(1)
def test_factors_in_the_activation_change_nothing_but_rounding() -> None:
    _hopper()
    fused, apart = _layer(bias_activation_fusion=True), _layer()
    for index, (a, b) in enumerate(zip(_run(fused, _hidden()), _run(apart, _hidden()), strict=True)):
        _assert_near(a, b, f"tensor {index}", 2 * TOLERANCE)


@pytest.mark.gpu(1)
def test_two_runs_on_a_device_are_bitwise_equal() -> None:
    _hopper()
    layer = _layer()
    first, second = _run(layer, _hidden()), _run(layer, _hidden())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias_activation_fusion": True},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["all", "fused", "padded"],
)
def test_the_host_does_not_wait_where_one_rank_has_all_experts(fields: dict[str, Any]) -> None:
    _hopper()
    layer, hidden = _layer(**fields), _hidden()
    _run(layer, hidden)  # kernels are loaded
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        _run(layer, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _loss_and_gradients(
    groups: ProcessGroupCollection | None, ranks: list[int], **fields: Any
) -> dict[str, torch.Tensor]:
    with torch.device("cuda"):
        model = build_moe_gpt(groups, **{**BF16, **fields})
    set_num_microbatches(model, len(ranks))
    losses = []
    for rank in ranks:
        tokens = tokens_of(rank).cuda()
        losses.append(model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean())
    torch.stack(losses).mean().backward()
    grads = {name: p.grad.float() for name, p in module_names.named_parameters(model) if p.grad is not None}
    return {"loss": torch.stack(losses).detach(), **grads}


def _divided_over_nccl(**fields: Any) -> dict[str, float]:
    """Relative differences from one rank that has all experts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroupCollection(ep=dist.group.WORLD)
    ours = _loss_and_gradients(groups, [rank], expert_model_parallel_size=size, **fields)
    whole = _loss_and_gradients(None, list(range(size)))
    differences = {"loss": float((ours["loss"][0] - whole["loss"][rank]).abs() / whole["loss"][rank])}
    for name, grad in ours.items():
        if name == "loss":
            continue
        if ".local_experts." not in name:
            dist.all_reduce(grad)
        differences[name] = float((grad / size - whole[name]).abs().max() / whole[name].abs().max().clamp(min=1e-6))
    return differences


@pytest.mark.gpu(2)
def test_experts_divided_over_two_devices_train_as_on_one() -> None:
    """bf16: a token near the border of two experts may go to the other one, so only the bulk is compared closely."""
    for differences in run_ranks(2, _divided_over_nccl, backend="nccl"):
        assert differences.pop("loss") < 1e-2
        assert sorted(differences.values())[len(differences) // 2] < 5e-2, differences
        assert max(differences.values()) < 0.5, differences


def _without_waiting() -> dict[str, float]:
    fields = {"moe_expert_rank_capacity_factor": float(dist.get_world_size())}
    differences = _divided_over_nccl(**fields)
    groups = ProcessGroupCollection(ep=dist.group.WORLD)
    layer, hidden = _layer(pg_collection=groups, expert_model_parallel_size=dist.get_world_size(), **fields), _hidden()
    _run(layer, hidden)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        _run(layer, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return differences


@pytest.mark.gpu(2)
def test_the_host_does_not_wait_for_bounded_rows_of_two_devices_that_train_as_one() -> None:
    for differences in run_ranks(2, _without_waiting, backend="nccl"):
        assert differences.pop("loss") < 1e-2
        assert sorted(differences.values())[len(differences) // 2] < 5e-2, differences
        assert max(differences.values()) < 0.5, differences


def test_the_gpu_tests_shapes_are_lawful() -> None:
    """The models of the tests above are built on the CPU too, so that mistakes in them are found without a GPU."""
    config = TransformerConfig(**{**FIELDS, **BF16})
    assert config.hidden_size % 8 == 0 and (config.moe_ffn_hidden_size or 0) % 8 == 0
    assert (IN * 2) % 16 == 0 and (OUT * 2) % 16 == 0
    loss = build_moe_gpt(**BF16)(*[tokens_of(0)[:, :-1], None, None], labels=tokens_of(0)[:, 1:])
    assert torch.isfinite(loss).all()
