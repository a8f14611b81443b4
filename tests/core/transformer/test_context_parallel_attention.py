"""Attention with context parallelism equals attention over the whole sequence: output and gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import context_parallel_ring
from megatron.core.transformer.attention_kernels import causal_mask
from megatron.core.transformer.context_parallel import COMM_TYPES, get_batch_on_this_cp_rank, positions_on_this_cp_rank
from megatron.core.transformer.context_parallel_attention import (
    ContextParallelAttention,
    core_attention_for,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks

BATCH, CHUNK = 2, 3
CASES: list[dict[str, Any]] = [
    {},
    {"num_query_groups": 8, "softmax_scale": 0.7},
    {"attention_backend": "unfused", "apply_query_key_layer_scaling": True},
    {"num_query_groups": 8, "value_width": 5},
    {"softmax_type": "learnable"},
    {"window_size": (0, 0), "softmax_type": "off-by-one"},
    {"window_size": (2, 0)},
    {"window_size": (2 * CHUNK + 1, 0), "softmax_type": "learnable"},
]


def _config(num_ranks: int = 2, **fields: Any) -> TransformerConfig:
    base: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "attention_dropout": 0.0,
        "context_parallel_size": num_ranks,
        "init_method_std": 1.0,
    }
    return TransformerConfig(**{**base, **fields})


def _inputs(
    config: TransformerConfig, length: int, device: str, dtype: torch.dtype, value_width: int | None = None
) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the context, of the whole sequence."""
    generator = torch.Generator().manual_seed(length)
    heads, groups, width = config.num_attention_heads, config.num_query_groups or 1, config.kv_channels or 1
    value_width = value_width or width
    shapes: list[tuple[int, ...]] = [(length, BATCH, heads, width), (length, BATCH, groups, width)]
    shapes += [(length, BATCH, groups, value_width), (length, BATCH, heads * value_width)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _attend(attention: torch.nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the context and the gradients of query, key and value."""
    *heads, grad = (x.clone() for x in inputs)
    heads = [x.requires_grad_() for x in heads]
    context = attention(*heads, None)
    context.backward(grad)
    return [context.detach(), *(x.grad for x in heads)]


def _largest_differences(
    comm_type: str, fields: dict[str, Any], chunk: int, device: str, dtype: torch.dtype
) -> list[float]:
    """Return the differences of context and gradients (of learned sinks too) from one rank's, relative to the largest value."""
    group = dist.group.WORLD
    value_width = fields.get("value_width")
    fields = {name: value for name, value in fields.items() if name != "value_width"}
    config = _config(dist.get_world_size(), cp_comm_type=comm_type, **fields)
    length = 2 * dist.get_world_size() * chunk
    inputs = _inputs(config, length, device, dtype, value_width)
    own = positions_on_this_cp_rank(length, group, torch.device(device))
    with torch.device(device):
        split = ContextParallelAttention(config, 2, pg_collection=ProcessGroupCollection(cp=group))
    ours = _attend(split, [x[own] for x in inputs])
    # Kernels of one precision round at other places; in fp32 there is one truth for both, which no fused kernel serves.
    with torch.device(device):
        whole = DotProductAttention(config if device == "cpu" else replace(config, attention_backend="unfused"), 2)
    theirs = [x[own] for x in _attend(whole, [x.float() for x in inputs])]
    if config.softmax_type == "learnable":
        assert torch.equal(split.softmax_offset, whole.softmax_offset)
        assert split.softmax_offset.grad is not None and whole.softmax_offset.grad is not None
        dist.all_reduce(split.softmax_offset.grad)  # each rank has the part of its tokens, or heads
        ours, theirs = [*ours, split.softmax_offset.grad], [*theirs, whole.softmax_offset.grad]
    return [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]


def _all_cases() -> dict[str, list[float]]:
    return {
        f"{comm_type} {case}": _largest_differences(comm_type, fields, CHUNK, "cpu", torch.float32)
        for comm_type in COMM_TYPES
        for case, fields in enumerate(CASES)
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_context_and_gradients_are_those_of_one_rank(num_ranks: int) -> None:
    """Sums have another order: fp32 to 1e-5."""
    for rank, differences in enumerate(run_ranks(num_ranks, _all_cases)):
        for case, values in differences.items():
            assert max(values) < 1e-5, (rank, case, values)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_fused_kernels_on_cuda_agree_with_fp32(comm_type: str, backend: str) -> None:
    """bf16 holds 8 bits: outputs and gradients within a few roundings of the largest value."""
    cases: list[dict[str, Any]] = [{}, {"softmax_type": "learnable"}]
    if backend != "fused":
        cases += [{"window_size": (40, 0), "softmax_type": "learnable"}, {"window_size": (100, 0)}]
    cases = [{"attention_backend": backend, "hidden_size": 512, **fields} for fields in cases]
    for of_rank in run_ranks(2, _cuda_cases, comm_type, cases, backend="nccl"):
        for differences in of_rank:
            assert max(differences) < 0.02, differences


@pytest.mark.gpu(2)
def test_values_narrower_than_keys_agree_with_fp32_on_cuda() -> None:
    """The widths of DeepSeek-V3's heads, with all kernels and communication types."""
    for of_cases in run_ranks(2, _cuda_cases_of_two_widths, backend="nccl"):
        for case, differences in of_cases.items():
            assert max(differences) < 0.02, (case, differences)


def _cuda_cases_of_two_widths() -> dict[str, list[float]]:
    fields = {"kv_channels": 192, "value_width": 128, "num_query_groups": 8}
    return {
        f"{comm_type} {backend}": _cuda_case(comm_type, {**fields, "attention_backend": backend})
        for comm_type in COMM_TYPES
        for backend in ("auto", "flash", "fused")
    }


def _cuda_case(comm_type: str, fields: dict[str, Any]) -> list[float]:
    return _largest_differences(comm_type, fields, 64, "cuda", torch.bfloat16)


def _cuda_cases(comm_type: str, cases: list[dict[str, Any]]) -> list[list[float]]:
    return [_largest_differences(comm_type, fields, 64, "cuda", torch.bfloat16) for fields in cases]


def test_a_kernel_that_was_demanded_is_taken_or_refused() -> None:
    """Attention on one rank fails there too; keeping all scores in memory instead would be silent."""
    from megatron.core.transformer.attention_kernels import CudnnKernel, ExplicitKernel, FlashKernel, choose_kernel
    from megatron.core.transformer.enums import AttnBackend

    def choose(backend: AttnBackend, dtype: torch.dtype, width: int) -> Any:
        x: Any = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 4, width))
        return choose_kernel(x, x, x, scale=1.0, fused=True, backend=backend)

    assert isinstance(choose(AttnBackend.flash, torch.bfloat16, 64), FlashKernel)
    assert isinstance(choose(AttnBackend.fused, torch.float16, 64), CudnnKernel)
    assert isinstance(choose(AttnBackend.auto, torch.float32, 64), ExplicitKernel)
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 12)):
        with pytest.raises(NotImplementedError, match=rf"attention_backend flash needs .* got {dtype} and {width}"):
            choose(AttnBackend.flash, dtype, width)


def test_kernels_of_one_width_get_padded_heads() -> None:
    """FlashAttention takes values of the queries' width alone."""
    from megatron.core.transformer.attention_kernels import Attended, Block, ExplicitKernel, PaddedKernel

    class OfOneWidth(ExplicitKernel):
        def forward(self, block: Block) -> Attended:
            assert block.query.shape[-1] == block.key.shape[-1] == block.value.shape[-1] == 8
            return super().forward(block)

        def backward(self, block: Block, rows: Attended, grad: torch.Tensor) -> Any:
            assert {x.shape[-1] for x in (*block[:3], rows.output, grad)} == {8}
            return super().backward(block, rows, grad)

    for width, value_width in ((8, 3), (3, 8)):
        query, key = torch.randn(2, 1, 2, 4, width)
        value, grad = torch.randn(2, 1, 2, 4, value_width)
        block = Block(query, key, value, 0.5, True)
        rows, padded = ExplicitKernel().forward(block), PaddedKernel(OfOneWidth()).forward(block)
        torch.testing.assert_close(padded, rows)
        expected = ExplicitKernel().backward(block, rows, grad)
        torch.testing.assert_close(PaddedKernel(OfOneWidth()).backward(block, rows, grad), expected)


def test_the_ring_sends_before_it_computes() -> None:
    """Otherwise communication would not overlap the kernels."""
    for events in run_ranks(2, _events_of_the_ring):
        # Forward: one hop. Backward: keys hop on, then the gradients twice, the last time home.
        assert " ".join(events) == "hop forward wait forward" + " hop backward hop wait backward wait hop wait"


def _events_of_the_ring() -> list[str]:
    events: list[str] = []
    kernel = _Recorded(events)
    hop = context_parallel_ring._Hop

    class RecordedHop(hop):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            events.append("hop")
            super().__init__(*args)

        def wait(self) -> torch.Tensor:
            events.append("wait")
            received: torch.Tensor = super().wait()
            return received

    context_parallel_ring._Hop = RecordedHop  # type: ignore[misc,assignment]
    query, key, value = (torch.randn(4, 1, 2, 8, requires_grad=True) for _ in range(3))
    assert dist.group.WORLD is not None
    context_parallel_ring.ring_attention(
        query, key, value, cp_group=dist.group.WORLD, kernel=kernel, scale=1.0
    ).sum().backward()
    return events


class _Recorded:
    def __init__(self, events: list[str]) -> None:
        from megatron.core.transformer.attention_kernels import ExplicitKernel

        self.events, self.kernel = events, ExplicitKernel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("forward")
        return self.kernel.forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("backward")
        return self.kernel.backward(*args, **kwargs)


def _dropped(train: bool) -> list[float]:
    """Return the largest differences [4] from whole sequences, whose heads are divided and drop what each rank draws."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    config = _config(size, cp_comm_type="a2a", attention_dropout=0.4)
    inputs = _inputs(config, 2 * size * CHUNK, "cpu", torch.float32)
    own = positions_on_this_cp_rank(2 * size * CHUNK, group, torch.device("cpu"))
    split = ContextParallelAttention(config, 2, pg_collection=ProcessGroupCollection(cp=group)).train(train)
    torch.manual_seed(rank)
    ours = _attend(split, [x[own] for x in inputs])
    whole = DotProductAttention(config, 2).train(train)
    parts = []
    for part in range(size):
        torch.manual_seed(part)
        heads = [x.chunk(size, dim=2)[part] for x in inputs[:3]]
        parts.append(_attend(whole, [*heads, inputs[3].chunk(size, dim=2)[part]]))
    theirs = [torch.cat(of_parts, dim=2)[own] for of_parts in zip(*parts, strict=True)]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("train", [True, False])
def test_each_rank_drops_probabilities_of_its_heads(train: bool) -> None:
    for differences in run_ranks(2, _dropped, train):
        assert max(differences) < 1e-5


def test_what_is_not_served_is_refused_by_name() -> None:
    for messages in run_ranks(2, _refusals):
        masked, odd, heads, dropout, degree, mask_in_batch, uneven = messages
        assert "attention_mask must be None (causal) with context parallelism" in masked
        assert "two chunks of equal length" in odd and "got 3 tokens" in odd
        assert "must be a multiple of context_parallel_size, got 1 heads and 2 ranks" in heads
        assert "attention_dropout must be 0 with cp_comm_type 'p2p', got 0.1" in dropout
        assert "context_parallel_size must be the number of ranks of pg_collection.cp, got 4 and 2" in degree
        assert "must have no attention_mask" in mask_in_batch
        assert "must be a multiple of 2 * context_parallel_size (4), got 6" in uneven


def _refusals() -> list[str]:
    groups = ProcessGroupCollection(cp=dist.group.WORLD)
    ring = ContextParallelAttention(_config(), 1, pg_collection=groups)
    heads = ContextParallelAttention(_config(cp_comm_type="a2a", num_query_groups=2), 1, pg_collection=groups)
    grouped, one_group = torch.randn(4, 2, 8, 8), torch.randn(4, 2, 1, 8)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    attempts = [
        lambda: ring(grouped, grouped, grouped, causal_mask(4, 4, torch.device("cpu"))),
        lambda: ring(grouped[:3], grouped[:3], grouped[:3], None),
        lambda: heads(grouped, one_group, one_group, None),
        lambda: ContextParallelAttention(_config(), 1, attention_dropout=0.1, pg_collection=groups),
        lambda: ContextParallelAttention(_config(4), 1, pg_collection=groups),
        lambda: get_batch_on_this_cp_rank({"tokens": tokens, "attention_mask": tokens}, dist.group.WORLD),
        lambda: get_batch_on_this_cp_rank({"tokens": tokens}, dist.group.WORLD),
    ]
    messages: list[str] = []
    for attempt in attempts:
        try:
            attempt()
        except (NotImplementedError, ValueError) as error:
            messages.append(str(error))
    dist.barrier()  # a rank that ends while others still connect would be an error on them
    return messages


def test_one_rank_has_the_attention_of_one_rank() -> None:
    for groups in (None, ProcessGroupCollection()):
        assert core_attention_for(DotProductAttention, groups) is DotProductAttention
