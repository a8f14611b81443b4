"""A fused function agrees with the chain of PyTorch's operations, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core import jit
from megatron.core.fusions import fused_cross_entropy
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.fusions.fused_norm import fused_norm
from tests.support.fusion_cases import CASES, make_inputs, outputs_and_gradients


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_chain_in_fp32(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    torch.testing.assert_close(outputs_and_gradients(case.fused, inputs), outputs_and_gradients(case.plain, inputs))


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_rounded_once_at_the_end(name: str) -> None:
    """Against the chain in fp32 on the same bf16 inputs.

    One rounding (2^-9) of each value, and one of each gradient that is added to another (2^-7).
    """
    case = CASES[name]
    inputs = tuple(None if x is None else x.bfloat16() for x in make_inputs(case))
    values, gradients = outputs_and_gradients(case.fused, inputs)
    wide = tuple(None if x is None else x.float() for x in inputs)
    expected_values, expected_gradients = outputs_and_gradients(case.plain, wide)
    for value, expected in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value.float(), expected, rtol=2**-8, atol=2**-7)
    for gradient, summed in zip(gradients, expected_gradients, strict=True):
        if summed is not None:
            assert gradient is not None and gradient.dtype is torch.bfloat16
            torch.testing.assert_close(gradient.float(), summed, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("name", CASES)
def test_the_compiler_sees_one_graph_without_a_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by Dynamo and AOTAutograd, without code generation, which only CUDA uses."""
    traced: list[str] = []
    real_call, real_compile = jit.Fusible.__call__, torch.compile

    def call(self: jit.Fusible, compiled: bool, *args: Any) -> Any:
        traced.append(self.eager.__name__)
        return real_call(jit.Fusible(self.eager), compiled, *args)

    def compile_without_code(function: Callable[..., Any]) -> Callable[..., Any]:
        return real_compile(function, backend="aot_eager", fullgraph=True)

    case = CASES[name]
    inputs = make_inputs(case)
    expected = outputs_and_gradients(case.plain, inputs)
    monkeypatch.setattr(jit.Fusible, "__call__", call)
    monkeypatch.setattr(jit, "is_compiled", lambda compiled, first: compiled)
    monkeypatch.setattr(torch, "compile", compile_without_code)
    torch.testing.assert_close(outputs_and_gradients(case.fused, inputs), expected)
    assert traced


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("chunk_numel", [1, 70, 2**24])
def test_cross_entropy_in_chunks(overwrite: bool, chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one token, of two, and all tokens at once; large logits must not overflow."""
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_NUMEL", chunk_numel)
    case = CASES["cross entropy in place" if overwrite else "cross entropy"]
    inputs = (torch.randn(6, 2, 31) * 50,)
    torch.testing.assert_close(outputs_and_gradients(case.fused, inputs), outputs_and_gradients(case.plain, inputs))


def test_the_gradient_takes_the_memory_of_the_logits_where_it_may() -> None:
    seen: list[tuple[int, int]] = []
    for overwrite in (True, False):
        logits = torch.randn(3, 2, 7, requires_grad=True) * 1
        before = logits.detach().clone()
        logits.register_hook(lambda grad, logits=logits: seen.append((grad.data_ptr(), logits.data_ptr())))
        target = torch.zeros(3, 2, dtype=torch.long)
        fused_vocab_parallel_cross_entropy(logits, target, overwrite_logits=overwrite).sum().backward()
        assert torch.equal(logits, before) is not overwrite
    assert [a == b for a, b in seen] == [True, False]


def test_a_second_backward_is_refused_where_the_logits_are_gone() -> None:
    logits = torch.randn(3, 2, 7, requires_grad=True) * 1
    loss = fused_vocab_parallel_cross_entropy(logits, torch.zeros(3, 2, dtype=torch.long), overwrite_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backward must run once .* switch cross_entropy_loss_fusion off"):
        loss.backward()


def test_a_norm_of_which_one_output_is_used() -> None:
    """The other output's gradient is None then, which neither fails nor costs a tensor of zeros."""
    for chosen in (0, 1):
        leaves = [torch.randn(5, 16, requires_grad=True) for _ in range(2)] + [torch.randn(16, requires_grad=True)]
        again = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        fused_norm(leaves[0], leaves[1], leaves[2], None, eps=1e-3, centered=False)[chosen].pow(2).sum().backward()
        total = again[0] + again[1]
        expected = torch.nn.functional.rms_norm(total, (16,), again[2], 1e-3) if chosen == 0 else total
        expected.pow(2).sum().backward()
        for leaf, other in zip(leaves, again, strict=True):
            torch.testing.assert_close(leaf.grad, other.grad)


def test_an_fp32_residual_stays_fp32_through_sum_and_norm() -> None:
    x, residual = torch.randn(5, 16).bfloat16().requires_grad_(), torch.randn(5, 16, requires_grad=True)
    normed, total = fused_norm(x, residual, torch.ones(16).bfloat16(), None, eps=1e-5, centered=False)
    (normed.float().sum() + total.sum()).backward()
    assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert x.grad is not None and x.grad.dtype is torch.bfloat16
    assert residual.grad is not None and residual.grad.dtype is torch.float32
    torch.testing.assert_close(total, x.float() + residual)


def test_dropout_drops_its_share_scales_the_rest_and_drops_the_same_gradients() -> None:
    x, residual = torch.ones(100, 100, requires_grad=True), torch.full((100, 100), 2.0, requires_grad=True)
    add = get_bias_dropout_add(True, True)
    total = add((x, None), residual, 0.25)
    total.sum().backward()
    dropped = total == 2.0
    assert 0.22 < dropped.float().mean().item() < 0.28
    torch.testing.assert_close(total[~dropped], torch.full_like(total[~dropped], 2 + 1 / 0.75))
    assert x.grad is not None and residual.grad is not None
    torch.testing.assert_close(x.grad, torch.where(dropped, 0.0, 1 / 0.75))
    assert torch.equal(residual.grad, torch.ones(100, 100))
    assert torch.equal(get_bias_dropout_add(False, True)((x, None), residual, 0.25), residual + x)


@pytest.mark.parametrize("name", ["swiglu", "bias gelu", "split and rotate", "rms norm", "masked softmax"])
def test_nothing_but_what_backward_needs_is_kept(name: str) -> None:
    """An activation keeps its input, a rotation its tables, a norm its input and statistics, a softmax its output."""
    kept = _saved_numel(name)
    allowed = {
        "swiglu": 6 * 2 * 32,
        "bias gelu": 6 * 2 * 16 + 16,
        "split and rotate": 2 * 6 * 4,
        "rms norm": 6 * 2 * 16 + 16 + 6 * 2,
        "masked softmax": 2 * 4 * 6 * 6 + 36,
    }
    assert kept == allowed[name]


def _saved_numel(name: str) -> int:
    case, kept = CASES[name], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = [None if x is None else x.requires_grad_() for x in make_inputs(case)]
    function: Callable[..., Any] = case.fused
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(kept)
