"""The main gradient contract: the weight gradient is written into the main gradient, for any use of the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import linear_function
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_gpt import build_gpt, random_tokens


class MainGrad:
    """A minimal engine: one buffer for one weight, and whether it has been written."""

    def __init__(self, weight: torch.nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
        self.weight = weight
        self.buffer = torch.full(weight.shape, float("nan"), dtype=dtype, device=weight.device)
        self.calls = 0
        weight.get_main_grad = self._get  # type: ignore[attr-defined]

    def _get(self) -> torch.Tensor:
        self.weight.overwrite_main_grad = self.calls == 0  # type: ignore[attr-defined]
        self.calls += 1
        return self.buffer


def _weight(rows: int = 3, columns: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    return torch.nn.Parameter(values.to(dtype))


def _expected(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    reference = weight.detach().double().requires_grad_()
    F.linear(x.detach().double(), reference).pow(2).sum().backward()
    assert reference.grad is not None
    return reference.grad


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4), (2, 3, 5, 4), (0, 4)])
def test_the_gradient_stands_in_the_main_gradient_and_autograd_gets_none(shape: tuple[int, ...]) -> None:
    weight, x = _weight(), torch.randn(shape, requires_grad=True)
    main = MainGrad(weight)
    linear_with_main_grad(x, weight).pow(2).sum().backward()
    assert weight.grad is None
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert main.calls == 1
    torch.testing.assert_close(main.buffer, _expected(weight, x).float())
    reference = x.detach().clone().requires_grad_()
    F.linear(reference, weight.detach()).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


def test_a_second_use_and_a_second_backward_are_added() -> None:
    weight, x, y = _weight(), torch.randn(5, 4), torch.randn(6, 4)
    main = MainGrad(weight)
    (linear_with_main_grad(x, weight).pow(2).sum() + linear_with_main_grad(y, weight).pow(2).sum()).backward()
    assert main.calls == 2
    torch.testing.assert_close(main.buffer, (_expected(weight, x) + _expected(weight, y)).float())
    linear_with_main_grad(x, weight).pow(2).sum().backward()
    torch.testing.assert_close(main.buffer, (2 * _expected(weight, x) + _expected(weight, y)).float())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_any_pair_of_dtypes(weight_dtype: torch.dtype, main_dtype: torch.dtype) -> None:
    weight, x = _weight(dtype=weight_dtype), torch.randn(5, 4).to(weight_dtype)
    main = MainGrad(weight, main_dtype)
    for _ in range(2):
        linear_with_main_grad(x, weight).pow(2).sum().backward()
    tolerance = 1e-5 if weight_dtype is main_dtype is torch.float32 else 2**-5  # a few roundings of 8 bits
    torch.testing.assert_close(main.buffer.double(), 2 * _expected(weight, x), rtol=tolerance, atol=tolerance)


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    weight, x = _weight(), torch.randn(4, 5, 2)
    main = MainGrad(weight)
    linear_with_main_grad(x.permute(2, 1, 0), weight).permute(1, 2, 0).pow(2).sum().backward()
    torch.testing.assert_close(main.buffer, _expected(weight, x.permute(2, 1, 0)).float())
    main.calls = 0
    linear_with_main_grad(x.permute(2, 1, 0), weight).sum().backward()  # its gradient has stride 0
    torch.testing.assert_close(main.buffer, x.sum((1, 2)).expand(3, 4))


def test_a_frozen_weight_is_left_alone_and_its_input_not_kept() -> None:
    weight, x = _weight(), torch.randn(5, 4, requires_grad=True)
    weight.requires_grad_(False)
    main = MainGrad(weight)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = linear_with_main_grad(x, weight)
    output.sum().backward()
    assert main.calls == 0 and x.grad is not None
    assert [t.shape for t in kept] == [weight.shape]


def test_only_input_and_weight_are_kept_for_backward() -> None:
    """The weight is a saved tensor, so that autograd notices writes into it."""
    weight, x = _weight(), torch.randn(5, 4, requires_grad=True)
    output = linear_with_main_grad(x, weight, torch.zeros(3, requires_grad=True))
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_without_the_attribute_it_is_an_ordinary_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.double, generator=generator).requires_grad_()
        for shape in [(2, 3, 4), (5, 4), (5,)]
    )
    assert torch.autograd.gradcheck(linear_with_main_grad, (x, weight, bias))
    assert torch.autograd.gradcheck(linear_with_main_grad, (x, weight))
    assert torch.autograd.gradgradcheck(linear_with_main_grad, (x, weight, bias))


def test_a_gradient_of_the_gradient_goes_through_autograd() -> None:
    """A write into a buffer cannot be differentiated, so with create_graph autograd gets the gradient."""
    weight, x = _weight(), torch.randn(5, 4)
    main = MainGrad(weight)
    (gradient,) = torch.autograd.grad(linear_with_main_grad(x, weight).pow(2).sum(), weight, create_graph=True)
    assert main.calls == 0 and gradient.requires_grad
    torch.testing.assert_close(gradient, _expected(weight, x).float())


def test_autocast_is_torchs_own_linear() -> None:
    weight, x = _weight(), torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear_with_main_grad(x, weight)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("fusion", [True, False])
def test_the_configuration_turns_the_writing_off(fusion: bool) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, gradient_accumulation_fusion=fusion)
    layer = ColumnParallelLinear(4, 3, config=config, init_method=config.init_method, bias=True)
    assert isinstance(layer.weight, torch.nn.Parameter)
    main = MainGrad(layer.weight)
    layer(torch.randn(5, 4))[0].sum().backward()
    assert main.calls == int(fusion)
    assert (layer.weight.grad is None) == fusion
    assert layer.bias is not None and layer.bias.grad is not None


def test_bias_is_returned_instead_of_added_where_asked() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    layer = ColumnParallelLinear(4, 3, config=config, init_method=config.init_method, skip_bias_add=True)
    with torch.no_grad():
        layer.bias.fill_(2.0)
    x = torch.randn(5, 4)
    output, bias = layer(x)
    assert layer.weight is not None
    assert torch.equal(output, F.linear(x, layer.weight)) and bias is layer.bias


def test_a_layer_without_weight_must_be_given_one() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    layer = ColumnParallelLinear(
        4, 3, config=config, init_method=config.init_method, bias=False, skip_weight_param_allocation=True
    )
    assert list(layer.parameters()) == []
    with pytest.raises(RuntimeError, match="pass weight="):
        layer(torch.randn(5, 4))


@pytest.mark.parametrize(
    "fields",
    [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}],
    ids=["plain", "recomputed"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_trains_the_same_through_main_gradients(fields: dict[str, Any], tied: bool) -> None:
    """Weights are tied: the output layer writes the main gradient, the embedding's part comes through autograd."""
    arguments = {"share_embeddings_and_output_weights": tied}
    model, expected = build_gpt(arguments, **fields), build_gpt(arguments, **fields)
    linear = {n for n, _ in model.named_parameters() if n.endswith("weight") and ("linear" in n or "output" in n)}
    linear |= {"embedding.word_embeddings.weight"} if tied else set()
    mains = {name: MainGrad(parameter) for name, parameter in model.named_parameters()}
    inputs, positions, labels = random_tokens()
    for each in (model, expected):
        for _ in range(2):
            each(inputs, positions, None, labels=labels).mean().backward()
    assert {name for name, main in mains.items() if main.calls} == linear
    for name, parameter in expected.named_parameters():
        ours = dict(model.named_parameters())[name].grad
        if name in linear:
            ours = mains[name].buffer if ours is None else mains[name].buffer + ours
        torch.testing.assert_close(ours, parameter.grad, msg=name)


@pytest.mark.parametrize(("min_numel", "in_place"), [(None, True), (0, True), (64 * 128, True), (64 * 128 + 1, False)])
def test_weights_below_a_size_leave_their_gradients_to_autograd(min_numel: int | None, in_place: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 128))
    main = MainGrad(weight)
    linear_with_main_grad(torch.ones(4, 128), weight, min_numel=min_numel).sum().backward()
    assert (weight.grad is None, main.calls) == ((True, 1) if in_place else (False, 0))


@pytest.mark.gpu
def test_cuda_leaves_the_gradients_of_small_weights_to_autograd() -> None:
    """A copy on the device takes less time than Python on the host."""
    weight = torch.nn.Parameter(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16))
    main = MainGrad(weight)
    linear_with_main_grad(torch.ones(4, 128, device="cuda", dtype=torch.bfloat16), weight).sum().backward()
    assert weight.grad is not None and main.calls == 0


@pytest.mark.gpu
def test_cuda_writes_fp32_main_gradients_from_bf16_operands_without_rounding_to_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_function, "IN_PLACE_MIN_NUMEL", 0)
    weight = torch.nn.Parameter(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    main = MainGrad(weight)
    for _ in range(2):
        linear_with_main_grad(x, weight).sum().backward()
    expected = 2 * x.double().sum(0).expand(64, 128)
    # fp32 sums of exact products: far below bf16's 2^-8.
    torch.testing.assert_close(main.buffer.double(), expected, rtol=1e-4, atol=1e-3)


def test_transforms_of_functions_see_a_plain_linear() -> None:
    """The shortcut into autograd does not support them, so they must not use it."""
    weight, x = _weight().detach(), torch.randn(5, 4)
    gradient = torch.func.grad(lambda w: linear_with_main_grad(x, w).pow(2).sum())(weight)
    torch.testing.assert_close(gradient, _expected(weight, x).float())
    rows = torch.func.vmap(lambda row: linear_with_main_grad(row, weight))(x)
    torch.testing.assert_close(rows, F.linear(x, weight))
