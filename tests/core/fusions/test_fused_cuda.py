"""On CUDA fused functions run compiled, and agree in bf16 with PyTorch's operations in fp32."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron.core import jit
from tests.support.fusion_cases import CASES, make_inputs, outputs_and_gradients
from tests.support.tiny_gpt import build_gpt, random_tokens

# What the compiler warns of (tuning hints, its own deprecations) differs between versions and is no fault here.
pytestmark = [pytest.mark.gpu(1), pytest.mark.filterwarnings("default")]

FUSED = {
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "persist_layer_norm": True,
    "cross_entropy_loss_fusion": True,
}
LLAMA = {
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_values_and_gradients_equal_the_chain(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """2^-6 and 2^-5 are a few roundings of bf16; no log line reports a function that was not compiled."""
    case = CASES[name]
    inputs = tuple(None if x is None else x.to(dtype) for x in make_inputs(case, "cuda"))
    with caplog.at_level(logging.WARNING, logger=jit.__name__):
        values, gradients = outputs_and_gradients(case.fused, inputs)
    assert caplog.messages == []
    wide = tuple(None if x is None else x.float() for x in inputs)
    expected_values, expected_gradients = outputs_and_gradients(case.plain, wide)
    relative, absolute = (1e-4, 1e-4) if dtype is torch.float32 else (2**-6, 2**-5)
    for value, expected in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value.float(), expected, rtol=relative, atol=absolute)
    for gradient, summed in zip(gradients, expected_gradients, strict=True):
        if summed is not None:
            assert gradient is not None
            torch.testing.assert_close(gradient.float(), summed, rtol=relative, atol=absolute)


def test_a_model_trains_alike_with_and_without_fusions() -> None:
    """The losses of a few bf16 steps: apart by a few roundings of the logits (2^-8 of values near 4)."""
    plain, fused = _losses({}), _losses(FUSED)
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=0, atol=0.06)
    assert plain[-1] < plain[0] - 0.5


def test_a_captured_step_of_fused_functions_replays_bitwise() -> None:
    """Functions are compiled in warm-up, so the capture only sees kernel launches."""
    # Scores in memory: the backward of fused attention adds in any order.
    model, tokens = (
        _model({**FUSED, "masked_softmax_fusion": True, "attention_backend": "unfused"}),
        tuple(x.cuda() for x in random_tokens()),
    )

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(tokens[0], tokens[1], None, labels=tokens[2]).mean()
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
        expected_loss = step()  # the same weights, and gradients twice
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = step()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, expected_loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def _model(fields: dict[str, Any]) -> torch.nn.Module:
    with torch.device("cuda"):
        return build_gpt(
            {"position_embedding_type": "rope"},
            **LLAMA,
            **fields,
            bf16=True,
            params_dtype=torch.bfloat16,
            kv_channels=16,
        )


def _losses(fields: dict[str, bool]) -> list[float]:
    model, (inputs, positions, labels) = _model(fields), (x.cuda() for x in random_tokens(4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(12):
        loss = model(inputs, positions, None, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
