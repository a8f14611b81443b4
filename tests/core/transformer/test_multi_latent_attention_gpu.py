"""Multi-latent attention on CUDA at DeepSeek-V3's head widths: each kernel, fused and compiled, as in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

# Where backward's thread has called nothing of CUDA before, cuBLAS says that it sets its context.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.05,
    "mscale_all_dim": 1.0,
}
FUSED: dict[str, Any] = {"apply_rope_fusion": True, "persist_layer_norm": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, fused": FUSED,
    "auto, fused, up-projections again": FUSED
    | {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "flash": {"attention_backend": "flash"},
    "cuDNN": {"attention_backend": "fused"},
    "flash within a window": {"attention_backend": "flash", "window_size": (40, 0)},
    "all scores in memory": {"attention_backend": "unfused"},
}


def _attention(device: str, dtype: torch.dtype, **fields: Any) -> MLASelfAttention:
    config = MLATransformerConfig(**{**SIZES, **fields}, params_dtype=dtype, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True)
    with torch.device(device):
        attention: MLASelfAttention = build_module(spec.submodules.self_attention, config=config, layer_number=1)
    return attention


def _run(attention: MLASelfAttention, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    output, _ = attention(x, None)
    output.backward(grad)
    assert x.grad is not None
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in attention.named_parameters() if parameter.grad is not None}
    return {name: tensor.float().cpu() for name, tensor in found.items()}


def test_each_kernel_is_close_to_fp32() -> None:
    """bf16 holds 8 bits: a few roundings of the norm of each tensor."""
    x, grad = torch.randn(2, 256, 2, 512, generator=torch.Generator().manual_seed(1)).bfloat16().unbind(0)
    failures = []
    for option, fields in OPTIONS.items():
        window = {key: value for key, value in fields.items() if key == "window_size"}
        exact_attention = _attention("cpu", torch.float32, **window)
        ours = _attention("cuda", torch.bfloat16, **fields)
        with torch.no_grad():
            for exact, rounded in zip(exact_attention.parameters(), ours.parameters(), strict=True):
                exact.copy_(rounded.cpu())
        expected = _run(exact_attention, x.float(), grad.float())
        for name, tensor in _run(ours, x.cuda(), grad.cuda()).items():
            difference = float((tensor - expected[name]).norm() / expected[name].norm())
            if not difference < 0.02:
                failures.append(f"{option}: {name} differs by {difference:.3f}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_two_widths_run_in_either_fused_kernel(backend: SDPBackend) -> None:
    """sdpa_kernel raises where a kernel cannot take these shapes and strides; forward and backward, long enough to count."""
    config = MLATransformerConfig(**SIZES)
    core = DotProductAttention(config, 1, k_channels=192, v_channels=128).cuda()
    query, key = (torch.randn(512, 2, 16, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    value = torch.randn(512, 2, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel([backend]):
        core(query, key, value, None).float().sum().backward()
    assert value.grad is not None and value.grad.shape == value.shape and bool(value.grad.isfinite().all())
