"""Experts computed one after the other, by one grouped kernel, and without rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.bias_activation import swiglu
from megatron.core.module_names import named_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.grouped_gemm import are_aligned, can_group, grouped_linear, stacked
from megatron.core.transformer.moe.token_exchange import ExpertRows
from megatron.core.transformer.moe.weighted_activation import weighted_swiglu
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import fake_transformer_engine
from tests.support.tiny_moe import FIELDS

COUNTS = (5, 0, 1, 7)  # the second expert is idle
SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu_fused": {"bias_activation_fusion": True},
    "gpt_oss": {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": None,
    },
    "gelu_with_bias": {
        "gated_linear_unit": False,
        "activation_func": "gelu",
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": None,
    },
}


def _config(**fields: Any) -> TransformerConfig:
    # torch's grouped kernels want sizes of 16 bytes, on the CPU too.
    return TransformerConfig(**{**FIELDS, "moe_ffn_hidden_size": 16, **fields})


def _rows(width: int, counts: tuple[int, ...] = COUNTS) -> ExpertRows:
    generator = torch.Generator().manual_seed(5)
    return ExpertRows(
        hidden_states=torch.randn(sum(counts), width, generator=generator, requires_grad=True),
        probs=torch.rand(sum(counts), generator=generator, requires_grad=True),
        counts=torch.tensor(counts),
    )


def _fill_biases(experts: torch.nn.Module) -> None:
    """Fill the biases, whose initial zeros would hide their absence."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=generator)


def _results(experts: torch.nn.Module, rows: ExpertRows) -> list[torch.Tensor]:
    """Output and gradients of rows, probabilities and parameters."""
    output = experts(rows)
    inputs = [rows.hidden_states, rows.probs, *experts.parameters()]
    return [output, *torch.autograd.grad(output.sin().sum(), inputs)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_experts_in_turn_are_their_mlps_times_the_probabilities(name: str) -> None:
    config = _config(**ACTIVATIONS[name])
    experts = SequentialMLP(4, config, SUBMODULES)
    _fill_biases(experts)
    rows = _rows(config.hidden_size)
    output = experts(rows)
    pieces = []
    for expert, x, probs in zip(
        experts.local_experts, rows.hidden_states.split(COUNTS), rows.probs.split(COUNTS), strict=True
    ):
        fc1, fc2 = expert.linear_fc1, expert.linear_fc2
        activated = F.linear(x, fc1.weight, fc1.bias)  # type: ignore[arg-type]
        if config.gated_linear_unit:
            gate, up = activated.chunk(2, -1)
            if name == "gpt_oss":
                gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
                activated = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
            else:
                activated = F.silu(gate) * up
        else:
            activated = F.gelu(activated)
        pieces.append(probs[:, None] * F.linear(activated, fc2.weight, fc2.bias))  # type: ignore[arg-type]
    torch.testing.assert_close(output, torch.cat(pieces))


def test_an_idle_experts_gradients_are_zeros() -> None:
    """They are not absent: all ranks of a unit reduce the same gradients."""
    experts = SequentialMLP(4, _config(), SUBMODULES)
    experts(_rows(16)).sum().backward()
    idle = list(experts.local_experts[1].parameters())
    assert all(p.grad is not None and not p.grad.any() for p in idle)
    assert all(p.grad is not None and p.grad.any() for p in experts.local_experts[0].parameters())


def test_an_idle_expert_writes_zeros_where_the_engine_wants_its_gradient() -> None:
    """The memory may hold other values before."""
    experts = SequentialMLP(4, _config(), SUBMODULES)
    expected = _results(experts, _rows(16))[3:]
    weights = list(experts.parameters())
    buffers = [torch.full_like(weight, float("nan")) for weight in weights]
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.overwrite_main_grad = True  # type: ignore[attr-defined]
        weight.get_main_grad = lambda buffer=buffer: buffer  # type: ignore[attr-defined]
    experts(_rows(16)).sin().sum().backward()
    assert all(weight.grad is None for weight in weights)
    for buffer, gradient in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, gradient)


def test_a_rank_without_any_rows_has_an_empty_result_and_zero_gradients() -> None:
    experts = SequentialMLP(4, _config(), SUBMODULES)
    output = experts(_rows(16, (0, 0, 0, 0)))
    assert output.shape == (0, 16)
    output.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_parameters_of_experts_are_marked_and_numbered_on_each_rank() -> None:
    class SecondOfTwo:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    experts = SequentialMLP(2, _config(), SUBMODULES, ProcessGroupCollection(ep=SecondOfTwo()))  # type: ignore[arg-type]
    assert [name for name, _ in experts.named_parameters()] == [
        f"local_experts.{index}.linear_fc{layer}.weight" for index in (0, 1) for layer in (1, 2)
    ]
    assert [name for name, _ in named_parameters(experts)] == [
        f"local_experts.{index}.linear_fc{layer}.weight" for index in (2, 3) for layer in (1, 2)
    ]
    assert all(parameter.allreduce is False for parameter in experts.parameters())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"num_local_experts must be num_moe_experts \(4\) / 1 ranks, got 2"):
        SequentialMLP(2, _config(), SUBMODULES)


class _AlwaysGrouped(GroupedMLP):
    """Experts that use torch's grouped kernel also on the CPU, where it is a loop in C."""

    calls = 0

    def forward(self, rows: ExpertRows) -> torch.Tensor:
        with _grouping() as asked:
            output = super().forward(rows)
        type(self).calls += asked.call_count
        return output


def _grouping() -> Any:
    """Let experts use the grouped kernel; count how often they ask."""
    return patch("megatron.core.transformer.moe.experts.can_group", return_value=True)


def _has_grouped_kernel_on_cpu() -> bool:
    try:
        torch._grouped_mm(torch.ones(8, 8), torch.ones(1, 8, 8), offs=torch.tensor([8], dtype=torch.int32))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


on_cpu = pytest.mark.skipif(not _has_grouped_kernel_on_cpu(), reason="this torch groups on CUDA alone")


@on_cpu
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("counts", [COUNTS, (13, 0, 0, 0), (0, 0, 0, 0)])
def test_one_kernel_gives_what_a_loop_gives(name: str, counts: tuple[int, ...]) -> None:
    config = _config(**ACTIVATIONS[name])
    loop, grouped = GroupedMLP(4, config, SUBMODULES), _AlwaysGrouped(4, config, SUBMODULES)
    _fill_biases(loop)
    grouped.load_state_dict(loop.state_dict())
    _AlwaysGrouped.calls = 0
    for ours, theirs in zip(_results(grouped, _rows(16, counts)), _results(loop, _rows(16, counts)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert _AlwaysGrouped.calls == 2


@on_cpu
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layer_kernels", ["fastest", "transformer_engine"])
def test_experts_of_transformer_engine_take_the_kernel_too(name: str, layer_kernels: str) -> None:
    config = _config(**ACTIVATIONS[name], layer_kernels=layer_kernels)
    with fake_transformer_engine.installed():
        from megatron.core.extensions import transformer_engine_layers as te

        experts = TEGroupedMLP(
            4, config, MLPSubmodules(te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear)
        )
        _fill_biases(experts)
        expected = _results(experts, _rows(16))
        with (
            _grouping() as asked,
            patch.object(te.te.GroupedLinear, "forward", side_effect=AssertionError) as multiplied,
        ):
            if layer_kernels == "fastest":
                torch.testing.assert_close(_results(experts, _rows(16)), expected)
            else:
                with pytest.raises(AssertionError):
                    experts(_rows(16))
        assert (asked.call_count, multiplied.call_count) == ((2, 0) if layer_kernels == "fastest" else (0, 1))


@pytest.mark.parametrize("grouped", [pytest.param(True, marks=on_cpu), False], ids=["grouped", "loop"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_padding_after_the_rows_changes_nothing(name: str, grouped: bool) -> None:
    """Not even where it is not finite: a kernel leaves its results unwritten."""
    experts = (_AlwaysGrouped if grouped else GroupedMLP)(4, _config(**ACTIVATIONS[name]), SUBMODULES)
    _fill_biases(experts)
    expected = _results(experts, _rows(16))
    own = _rows(16)
    num_rows = own.hidden_states.shape[0]
    x = torch.cat((own.hidden_states.detach(), torch.full((5, 16), torch.nan))).requires_grad_()
    probs = torch.cat((own.probs.detach(), torch.full((5,), torch.nan))).requires_grad_()
    output = experts(ExpertRows(x, probs, own.counts, has_padding=True))
    assert output.shape == (num_rows + 5, 16)
    grads = torch.autograd.grad(output[:num_rows].sin().sum(), [x, probs, *experts.parameters()])
    torch.testing.assert_close(output[:num_rows], expected[0])
    torch.testing.assert_close((grads[0][:num_rows], grads[1][:num_rows], *grads[2:]), tuple(expected[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_with_factors_is_swiglu_times_factors(dtype: torch.dtype) -> None:
    """In bf16 the product is rounded once, not twice, so it is nearer to what fp32 gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 12, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(9, generator=generator, requires_grad=True)
    grad = torch.randn(9, 6, generator=generator).to(dtype)
    wide = x.detach().float().requires_grad_()
    expected = swiglu(wide) * probs[:, None]
    theirs = torch.autograd.grad(expected, (wide, probs), grad.float())
    ours = weighted_swiglu(x, probs)
    assert ours.dtype is dtype
    for mine, other in zip((ours, *torch.autograd.grad(ours, (x, probs), grad)), (expected, *theirs), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype))


def _matrices(spacing: int, start: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make three [16, 8] matrices in one storage, ``spacing`` elements between them."""
    flat = torch.randn(start + 3 * (128 + spacing))
    return flat, [flat[start + i * (128 + spacing) :][:128].view(16, 8) for i in range(3)]


def test_weights_at_even_distances_are_not_copied() -> None:
    flat, weights = _matrices(spacing=64)
    whole = stacked(weights)
    assert torch.equal(whole, torch.stack(weights))
    assert whole.data_ptr() == flat.data_ptr()
    assert stacked(weights[:1]).data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("case", ["uneven", "unaligned_start", "unaligned_distance", "reversed", "two_storages"])
def test_weights_that_do_not_lie_so_are_copied(case: str) -> None:
    flat, weights = _matrices(spacing=2 if case == "unaligned_distance" else 64, start=1 if "start" in case else 0)
    if case == "uneven":
        weights[2] = flat[400:528].view(16, 8)
    elif case == "reversed":
        weights = weights[::-1]
    elif case == "two_storages":
        weights[2] = _matrices(spacing=64)[1][2]
    whole = stacked(weights)
    assert torch.equal(whole, torch.stack(weights))
    assert whole.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()


@on_cpu
def test_a_write_into_a_weight_before_backward_is_noticed() -> None:
    """A weight that the engine has resharded must not be read silently."""
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(2)]
    x = torch.randn(4, 8, requires_grad=True)
    output = grouped_linear(x, weights, torch.tensor([1, 4], dtype=torch.int32))
    with torch.no_grad():
        weights[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_cpu_is_not_grouped() -> None:
    assert not can_group(torch.zeros(4, 8), [torch.zeros(8, 8)])


@pytest.mark.parametrize(("shape", "aligned"), [((8, 16), True), ((8, 12), False), ((4, 16), False)])
def test_sizes_that_the_kernel_cannot_read_are_not_grouped(shape: tuple[int, int], aligned: bool) -> None:
    assert are_aligned([torch.zeros(shape, dtype=torch.bfloat16)]) == aligned
