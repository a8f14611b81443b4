"""Where elements come from: the parts that a trace names hold the values that the operations give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.distributed.fsdp.huggingface.traced_tensor import TracedTensor, computed, sources_of

SIZES = {"a": (4, 6), "b": (4, 6), "c": (3, 4, 6), "bias": (6,)}
Tensors = dict[str, torch.Tensor]


def value_of(name: str) -> torch.Tensor:
    size = SIZES[name]
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size) + 100 * list(SIZES).index(name)


MOVES: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "halves of experts": lambda t: torch.chunk(t["c"], 2, dim=1)[1].contiguous(),
    "one expert": lambda t: torch.split(t["c"], [1, 2], dim=0)[0].squeeze(0),
    "unbound": lambda t: t["c"].unbind(0)[2],
    "transposed expert": lambda t: t["c"][1].transpose(0, 1),
    "transposed experts": lambda t: t["c"].transpose(1, 2).contiguous()[:, 1:4],
    "transposed twice": lambda t: torch.cat([t["a"].t(), t["b"].t()], dim=1).t(),
    "permuted": lambda t: t["c"].permute(0, 2, 1)[-1:],
    "rows and columns": lambda t: t["a"][1:3].narrow(1, 2, 3),
    "biases": lambda t: torch.cat([t["bias"], t["bias"]])[3:9],
    "stacked biases": lambda t: torch.stack([t["bias"], t["bias"]]),
    "detached": lambda t: t["a"].detach().to(torch.float32).clone(),
}
CALCULATED: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "shifted": lambda t: t["a"] + 1,
    "interleaved": lambda t: t["a"].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "cast": lambda t: t["a"].to(torch.bfloat16),
    "each second": lambda t: t["a"][::2],
    "stacked behind": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "moved afterwards": lambda t: torch.cat([t["a"] * 2, t["b"]])[2:6],
    "one of two": lambda t: torch.chunk(t["a"] * 2, 2)[1],
}


def traced(call: Callable[[Tensors], torch.Tensor]) -> TracedTensor:
    made = call({name: TracedTensor.named(name, torch.Size(size), torch.float32) for name, size in SIZES.items()})
    assert isinstance(made, TracedTensor)
    return made


@pytest.mark.parametrize("name", MOVES)
def test_parts_of_moved_tensors_hold_their_values(name: str) -> None:
    expected = MOVES[name]({key: value_of(key) for key in SIZES})
    made = traced(MOVES[name])
    assert made.shape == expected.shape and made.parts is not None
    filled = torch.full(expected.shape, float("nan"))
    for part in made.parts:
        source = value_of(part.source)[tuple(slice(b, b + n) for b, n in zip(part.begin, part.lengths, strict=True))]
        target = filled[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))]
        part.of_view(target).copy_(source)
    assert torch.equal(filled, expected)
    assert torch.equal(computed(made, value_of), expected)


@pytest.mark.parametrize("name", CALCULATED)
def test_other_operations_are_calculated_from_whole_tensors(name: str) -> None:
    """They may be anything, so nobody guesses which bytes they need."""
    expected = CALCULATED[name]({key: value_of(key) for key in SIZES})
    made = traced(CALCULATED[name])
    assert made.parts is None and made.shape == expected.shape and made.dtype == expected.dtype
    assert torch.equal(computed(made, value_of), expected)
    assert set(sources_of(made)) <= {"a", "b"}


def test_writes_are_refused() -> None:
    """What is written in place would change nothing that anybody reads."""
    with pytest.raises(NotImplementedError, match="must make new tensors"):
        traced(lambda t: t["a"].add_(1))
