"""Fused and unfused attention agree, and the fused one is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.transformer.attention_kernels import causal_mask
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


def _attention(**fields: Any) -> DotProductAttention:
    base: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    return DotProductAttention(TransformerConfig(**{**base, **fields}), layer_number=2)


def _inputs(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 2, heads, width) for heads in (4, 2, 2)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("fields", [{}, {"apply_query_key_layer_scaling": True}, {"attention_softmax_in_fp32": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_unfused_agree(fields: dict[str, Any], dtype: torch.dtype) -> None:
    attention = _attention(**fields).eval()
    ours, theirs = _inputs(dtype=dtype), _inputs(dtype=dtype)
    fused = attention(*ours, None)
    unfused = attention(*theirs, causal_mask(6, 6, torch.device("cpu")))
    fused.float().pow(2).sum().backward()
    unfused.float().pow(2).sum().backward()
    tolerance = 1e-5 if dtype is torch.float32 else 0.05  # bf16: roundings of scores and probabilities
    assert fused.shape == (6, 2, 32) and fused.dtype == dtype
    torch.testing.assert_close(fused, unfused, rtol=tolerance, atol=tolerance)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=4 * tolerance)


def test_dropout_only_in_training_and_never_beyond_causality() -> None:
    attention = _attention(attention_dropout=0.5)
    query, key, value = _inputs()
    torch.manual_seed(0)
    first = attention(query, key, value, None)
    assert not torch.equal(first, attention(query, key, value, None))
    attention.eval()
    assert torch.equal(attention(query, key, value, None), attention(query, key, value, None))
    (gradient,) = torch.autograd.grad(attention.train()(query, key, value, None)[2].sum(), value)
    assert torch.equal(gradient[3:], torch.zeros_like(gradient[3:]))


def test_a_row_hidden_everywhere_is_uniform_and_finite() -> None:
    """As in Megatron-Core, whose masked scores are -10,000."""
    query, key, value = _inputs()
    context = _attention().eval()(query, key, value, torch.ones(6, 6, dtype=torch.bool))
    expected = value.mean(0, keepdim=True).repeat_interleave(2, dim=2).expand(6, 2, 4, 8).flatten(2)
    torch.testing.assert_close(context, expected)


def test_other_kinds_of_attention_are_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4)
    with pytest.raises(NotImplementedError, match="attn_mask_type must be causal"):
        DotProductAttention(config, 1, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(NotImplementedError, match="attention_type must be 'self'"):
        DotProductAttention(config, 1, attention_type="cross")


@pytest.mark.parametrize(("backend", "fused"), [("auto", 1), ("flash", 1), ("fused", 1), ("unfused", 0), ("local", 0)])
def test_the_backend_chooses_the_path(backend: str, fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.nn.functional.scaled_dot_product_attention
    counted = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    context = _attention(attention_backend=backend, attention_dropout=0.0)(*_inputs(), None)
    assert len(calls) == fused
    torch.testing.assert_close(context, _attention(attention_dropout=0.0)(*_inputs(), None), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_named_kernel_runs_on_cuda(backend: str) -> None:
    query, key, value = _inputs("cuda", torch.bfloat16, width=64)
    attention = _attention(attention_backend=backend, hidden_size=256, attention_dropout=0.0)
    attention(query, key, value, None).float().sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_cuda_runs_grouped_bf16_attention_in_fused_kernels(backend: SDPBackend) -> None:
    """sdpa_kernel raises where the kernel cannot take these shapes and strides."""
    attention = _attention(hidden_size=256, attention_dropout=0.0)
    query, key, value = _inputs("cuda", torch.bfloat16, width=64)
    with sdpa_kernel([backend]):
        attention(query, key, value, None).float().sum().backward()


@pytest.mark.gpu
def test_deterministic_mode_demands_torchs_deterministic_algorithms_on_cuda() -> None:
    with pytest.raises(RuntimeError, match=r"torch.use_deterministic_algorithms\(True\)"):
        _attention(deterministic_mode=True)(*_inputs("cuda"), None)
