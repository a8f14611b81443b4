"""Each split layer has the outputs and gradients of the unsplit one; region functions compute what their names say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.fusions import fused_cross_entropy
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import cross_entropy, mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.partition import assemble, partition
from megatron.core.transformer.init_methods import NormalInit
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks

S, B, I, O, V = 8, 2, 12, 16, 24  # noqa: E741
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
INIT = NormalInit(1.0)


def _config(sequence_parallel: bool = False, **fields: Any) -> TransformerConfig:
    size = dist.get_world_size()
    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel and size > 1,
        **fields,
    )


def _inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Make inputs, the same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _part(full: torch.Tensor, dim: int) -> torch.Tensor:
    return partition(full, dim, 1, dist.get_rank(), dist.get_world_size()).detach().clone()


def _whole(part: torch.Tensor | None, dim: int, stride: int = 1) -> torch.Tensor:
    assert part is not None
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return assemble(parts, dim, stride)


def _sum(part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None
    total = part.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _fill_bias(layer: torch.nn.Module, full: torch.Tensor) -> None:
    with torch.no_grad():
        layer.bias.copy_(full if layer.bias.shape == full.shape else _part(full, 0))  # type: ignore[operator]


def check_column(sequence_parallel: bool, gather_output: bool, skip_bias_add: bool) -> None:
    layer = ColumnParallelLinear(
        I,
        O,
        config=_config(sequence_parallel),
        init_method=INIT,
        gather_output=gather_output,
        skip_bias_add=skip_bias_add,
        tp_group=dist.group.WORLD,
    )
    full_bias, full_x, full_grad = _inputs(O, seed=1), _inputs(S, B, I), _inputs(S, B, O, seed=2)
    _fill_bias(layer, full_bias)
    x = (_part(full_x, 0) if sequence_parallel else full_x.clone()).requires_grad_()
    output, bias = layer(x)
    assert (bias is layer.bias) if skip_bias_add else (bias is None)
    if bias is not None:
        output = output + (
            mappings.gather_from_tensor_model_parallel_region(bias, dist.group.WORLD) if gather_output else bias
        )
    output.backward(full_grad if gather_output else _part(full_grad, -1))

    weight = _whole(layer.weight, 0).requires_grad_()
    reference_x, reference_bias = full_x.clone().requires_grad_(), full_bias.clone().requires_grad_()
    expected = F.linear(reference_x, weight, reference_bias)
    expected.backward(full_grad)
    torch.testing.assert_close(output if gather_output else _whole(output, -1), expected, **CLOSE)
    torch.testing.assert_close(_whole(x.grad, 0) if sequence_parallel else x.grad, reference_x.grad, **CLOSE)
    torch.testing.assert_close(_whole(layer.weight.grad, 0), weight.grad, **CLOSE)
    torch.testing.assert_close(_whole(layer.bias.grad, 0), reference_bias.grad, **CLOSE)


def check_row(sequence_parallel: bool, input_is_parallel: bool, skip_bias_add: bool) -> None:
    layer = RowParallelLinear(
        I,
        O,
        config=_config(sequence_parallel),
        init_method=INIT,
        input_is_parallel=input_is_parallel,
        skip_bias_add=skip_bias_add,
        tp_group=dist.group.WORLD,
    )
    full_bias, full_x, full_grad = _inputs(O, seed=1), _inputs(S, B, I), _inputs(S, B, O, seed=2)
    _fill_bias(layer, full_bias)
    x = (_part(full_x, -1) if input_is_parallel else full_x.clone()).requires_grad_()
    output, bias = layer(x)
    output = output if bias is None else output + bias
    output.backward(_part(full_grad, 0) if sequence_parallel else full_grad)

    weight = _whole(layer.weight, 1).requires_grad_()
    reference_x, reference_bias = full_x.clone().requires_grad_(), full_bias.clone().requires_grad_()
    expected = F.linear(reference_x, weight, reference_bias)
    expected.backward(full_grad)
    torch.testing.assert_close(_whole(output, 0) if sequence_parallel else output, expected, **CLOSE)
    torch.testing.assert_close(_whole(x.grad, -1) if input_is_parallel else x.grad, reference_x.grad, **CLOSE)
    torch.testing.assert_close(_whole(layer.weight.grad, 1), weight.grad, **CLOSE)
    assert getattr(layer.bias, "sequence_parallel", False) == sequence_parallel
    bias_grad = _sum(layer.bias.grad) if sequence_parallel else layer.bias.grad
    torch.testing.assert_close(bias_grad, reference_bias.grad, **CLOSE)


def check_gated_column() -> None:
    """Of [gate; up] each rank multiplies its rows of gate, then its rows of up: a part of the activation."""
    layer = ColumnParallelLinear(
        I, O, config=_config(), init_method=INIT, bias=False, stride=2, tp_group=dist.group.WORLD
    )
    x = _inputs(S, B, I)
    gate, up = layer(x)[0].chunk(2, dim=-1)
    full_gate, full_up = F.linear(x, _whole(layer.weight, 0, stride=2)).chunk(2, dim=-1)
    torch.testing.assert_close(_whole(gate * up, -1), full_gate * full_up, **CLOSE)


def check_experts() -> None:
    """Layers of experts do not communicate, also with sequence parallelism: outputs are partial sums."""
    arguments: dict[str, Any] = {"config": _config(True), "init_method": INIT, "is_expert": True, "skip_bias_add": True}
    column = ColumnParallelLinear(I, O, tp_group=dist.group.WORLD, **arguments)
    row = RowParallelLinear(O, I, tp_group=dist.group.WORLD, **arguments)
    x = _inputs(S, I).requires_grad_()
    total = 0
    for name in ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor"):
        total += hasattr(dist, name)
    hidden, _ = column(x)
    output, _ = row(hidden)
    assert total and hidden.shape == (S, O // dist.get_world_size()) and output.shape == (S, I)
    first, second = _whole(column.weight, 0), _whole(row.weight, 1)
    torch.testing.assert_close(_sum(output), F.linear(F.linear(x, first), second).detach(), rtol=1e-5, atol=1e-5)
    output.sum().backward()
    expected = x.detach().clone().requires_grad_()
    F.linear(F.linear(expected, first), second).sum().backward()
    torch.testing.assert_close(_sum(x.grad), expected.grad, rtol=1e-5, atol=1e-5)
    for layer in (column, row):
        for parameter in layer.parameters():
            assert parameter.allreduce is False  # type: ignore[attr-defined]
            assert not getattr(parameter, "sequence_parallel", False)
    try:
        RowParallelLinear(O, I, tp_group=dist.group.WORLD, **{**arguments, "skip_bias_add": False})
    except ValueError as error:
        assert "skip_bias_add" in str(error)
    else:
        raise AssertionError("the bias would be added on each rank")


def check_main_gradient(sequence_parallel: bool, layer_kind: str) -> None:
    """The weight gradient is written into the main gradient, a second use is added, and autograd gets none."""
    config, group = _config(sequence_parallel), dist.group.WORLD
    layer: Any
    if layer_kind == "column":
        layer = ColumnParallelLinear(I, O, config=config, init_method=INIT, bias=False, tp_group=group)
        x, grad = _inputs(S, B, I), _inputs(S, B, O // dist.get_world_size(), seed=2)
        x = _part(x, 0) if sequence_parallel else x
    else:
        layer = RowParallelLinear(I, O, config=config, init_method=INIT, bias=False, tp_group=group)
        x = _inputs(S, B, I // dist.get_world_size())
        grad = _inputs(S // dist.get_world_size() if sequence_parallel else S, B, O, seed=2)
    layer(x.requires_grad_())[0].backward(grad)
    expected, layer.weight.grad = layer.weight.grad, None
    buffer = torch.full_like(layer.weight, float("nan"))
    uses: list[int] = []

    def get_main_grad() -> torch.Tensor:
        layer.weight.overwrite_main_grad = not uses
        uses.append(1)
        return buffer

    layer.weight.get_main_grad = get_main_grad
    for _ in range(2):
        layer(x)[0].backward(grad)
    assert layer.weight.grad is None and layer.weight.grad_added_to_main_grad and len(uses) == 2
    torch.testing.assert_close(buffer, 2 * expected, **CLOSE)


def check_frozen() -> None:
    """A frozen weight saves no input; an input without gradient starts no collective."""
    layer = ColumnParallelLinear(
        I, O, config=_config(True), init_method=INIT, bias=False, tp_group=dist.group.WORLD
    ).requires_grad_(False)
    x = _part(_inputs(S, B, I), 0).requires_grad_()
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        output, _ = layer(x)
    output.sum().backward()
    assert x.grad is not None and kept == [layer.weight.shape]
    layer.requires_grad_(True)
    layer(x.detach())[0].sum().backward()
    assert layer.weight.grad is not None


def check_autocast() -> None:
    layer = ColumnParallelLinear(I, O, config=_config(True), init_method=INIT, tp_group=dist.group.WORLD)
    x = _part(_inputs(S, B, I), 0).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x)
    assert output.dtype == torch.bfloat16 and output.shape[0] == S
    output.float().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None


def check_embedding(scatters: bool) -> None:
    layer = VocabParallelEmbedding(
        V,
        I,
        init_method=INIT,
        config=_config(scatters),
        reduce_scatter_embeddings=scatters,
        tp_group=dist.group.WORLD,
    )
    tokens = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(3))
    full_grad = _inputs(S, B, I)
    output = layer(tokens)
    output.backward(_part(full_grad, 0) if scatters else full_grad)
    weight = _whole(layer.weight, 0).requires_grad_()
    expected = F.embedding(tokens, weight)
    expected.backward(full_grad)
    assert torch.equal(_whole(output, 0) if scatters else output, expected), "sums of one value and zeros are exact"
    torch.testing.assert_close(_whole(layer.weight.grad, 0), weight.grad, **CLOSE)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "chunked": lambda x, y: cross_entropy.vocab_parallel_cross_entropy(x, y, tp_group=dist.group.WORLD),
    "fused": lambda x, y: fused_vocab_parallel_cross_entropy(x, y, dist.group.WORLD),
    "fused in place": lambda x, y: fused_vocab_parallel_cross_entropy(
        x * 1, y, dist.group.WORLD, overwrite_logits=True
    ),
}


def check_loss(name: str, dtype: torch.dtype, chunk_numel: int) -> None:
    """Chunks of one token, of some, and all tokens at once; logits so large that their exponentials overflow."""
    cross_entropy.CHUNK_NUMEL = fused_cross_entropy.CHUNK_NUMEL = chunk_numel
    full = (_inputs(S, B, V) * 50).to(dtype)
    target = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3)).t()
    weights = _inputs(S, B, seed=4)
    logits = _part(full, -1).requires_grad_()
    losses = LOSSES[name](logits, target)
    (losses * weights).sum().backward()
    reference = full.float().requires_grad_()
    expected = F.cross_entropy(reference.view(-1, V), target.reshape(-1), reduction="none").view(S, B)
    (expected * weights).sum().backward()
    assert losses.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-4)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    # The fused gradient is exp(logit - log of the sum), as without tensor parallelism: at 150 that is good to 1e-5.
    smallest = 1e-6 if name == "chunked" else 2e-5
    torch.testing.assert_close(_whole(logits.grad.float(), -1), reference.grad, rtol=tolerance, atol=smallest)


def check_infinite_logits() -> None:
    """A masked part of the vocabulary (-inf) does not count, also if a clamped target is in it."""
    full = _inputs(S, B, V)
    full[..., : V // dist.get_world_size()] = float("-inf")
    full[..., V // 2 + 1 :] = float("-inf")
    target = torch.full((S, B), V // 2)
    expected = F.cross_entropy(full.view(-1, V), target.view(-1), reduction="none").view(S, B)
    for loss in LOSSES.values():
        torch.testing.assert_close(loss(_part(full, -1), target), expected, **CLOSE)


def check_memory_of_the_loss() -> None:
    """Neither pass has fp32 values of all logits in memory: only the logits and a few numbers a token are kept."""
    cross_entropy.CHUNK_NUMEL = V
    logits = _part(_inputs(S, B, V).bfloat16(), -1).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        LOSSES["chunked"](logits, torch.zeros(S, B, dtype=torch.long))
    wide = [tensor for tensor in kept if tensor.numel() > S * B]
    assert len(wide) == 1 and wide[0].data_ptr() == logits.data_ptr()


Region = Callable[..., torch.Tensor]


def check_regions() -> None:
    """Forward and backward of each region, in terms of whole tensors; inputs and gradients are not written to."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x, own = _inputs(S, I), _inputs(S, I, seed=10 + rank)

    def passed(
        region: Region, given: torch.Tensor, grad: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given, grad = given.clone().requires_grad_(), grad.clone()
        before = given.detach().clone(), grad.clone()
        output = region(given, group=group, **more)
        result = output.detach().clone()
        output.backward(grad)
        assert torch.equal(given, before[0]) and torch.equal(grad, before[1]), region
        assert given.grad is not None
        return result, given.grad

    total = _sum(own)
    cases: list[tuple[Region, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]] = [
        (mappings.copy_to_tensor_model_parallel_region, x, own, x, total, {}),
        (mappings.reduce_from_tensor_model_parallel_region, own, x, total, x, {}),
        (mappings.scatter_to_tensor_model_parallel_region, x, _part(own, -1), _part(x, -1), _whole(_part(own, -1), -1), {}),
        (mappings.gather_from_tensor_model_parallel_region, _part(own, -1), x, _whole(_part(own, -1), -1), _part(x, -1), {}),
        (mappings.scatter_to_sequence_parallel_region, x, _part(own, 0), _part(x, 0), _whole(_part(own, 0), 0), {}),
        (mappings.gather_from_sequence_parallel_region, _part(own, 0), own, _whole(_part(own, 0), 0), _part(total, 0), {}),
        (
            mappings.gather_from_sequence_parallel_region,
            _part(own, 0),
            x,
            _whole(_part(own, 0), 0),
            _part(x, 0),
            {"tensor_parallel_output_grad": False},
        ),
        (mappings.reduce_scatter_to_sequence_parallel_region, own, _part(own, 0), _part(total, 0), _whole(_part(own, 0), 0), {}),
    ]  # fmt: skip
    for region, given, grad, expected, expected_grad, more in cases:
        result, gradient = passed(region, given, grad, **more)
        torch.testing.assert_close(result, expected, msg=region.__name__)
        torch.testing.assert_close(gradient, expected_grad, msg=region.__name__)
        assert region(given, group=None, **more) is given
    try:
        mappings.scatter_to_sequence_parallel_region(torch.zeros(dist.get_world_size() + 1, 2), group)
    except ValueError as error:
        assert "the sequence length must be a multiple" in str(error)
    else:
        raise AssertionError("an uneven sequence must be refused")


CHECKS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"column sequence_parallel={sp} gather_output={gather} skip_bias_add={skip}": (check_column, (sp, gather, skip))
        for sp in (False, True)
        for gather in (False, True)
        for skip in (False, True)
    },
    **{
        f"row sequence_parallel={sp} input_is_parallel={parallel} skip_bias_add={skip}": (
            check_row,
            (sp, parallel, skip),
        )
        for sp in (False, True)
        for parallel in (False, True)
        for skip in (False, True)
    },
    "gated column": (check_gated_column, ()),
    "experts": (check_experts, ()),
    **{
        f"main gradient of {kind} sequence_parallel={sp}": (check_main_gradient, (sp, kind))
        for sp in (False, True)
        for kind in ("column", "row")
    },
    "frozen": (check_frozen, ()),
    "autocast": (check_autocast, ()),
    "embedding": (check_embedding, (False,)),
    "scattered embedding": (check_embedding, (True,)),
    **{
        f"loss {name} {dtype} chunks of {chunk}": (check_loss, (name, dtype, chunk))
        for name in LOSSES
        for dtype in (torch.float32, torch.bfloat16)
        for chunk in (1, 33, 2**24)
    },
    "infinite logits": (check_infinite_logits, ()),
    "memory of the loss": (check_memory_of_the_loss, ()),
    "regions": (check_regions, ()),
}


def _run_checks() -> dict[str, str]:
    """Run all checks on all ranks; return the error of each, empty if it passes."""
    import traceback

    errors = {}
    for name, (check, arguments) in CHECKS.items():
        try:
            check(*arguments)
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    return errors


@cache
def _errors(num_ranks: int) -> list[dict[str, str]]:
    return run_ranks(num_ranks, _run_checks)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_split_layers(name: str, num_ranks: int) -> None:
    for rank, errors in enumerate(_errors(num_ranks)):
        assert not errors[name], f"rank {rank}: {errors[name]}"
