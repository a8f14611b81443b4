"""The local sum of a reduction: in rank order, in fp32, scaled and accumulated."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.comm.transport import scale_and_accumulate, sum_pieces


def _pieces(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count * 10_000 + numel)
    # Of different sizes, so that another order gives another sum.
    return [(torch.randn(numel, generator=generator) * 3.0**index).to(dtype) for index in range(count)]


def sum_in_order(pieces: torch.Tensor) -> torch.Tensor:
    """Sum ``pieces`` [R, S] to [S] in fp32 or wider, from rank 0 upwards."""
    total = pieces[0].to(torch.promote_types(pieces.dtype, torch.float32), copy=True)
    for piece in pieces[1:]:
        total += piece
    return total


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_is_in_rank_order(wire: torch.dtype, held: torch.dtype, accumulate: bool) -> None:
    pieces = _pieces(5, 1003, wire)
    out = _pieces(1, 1003, held)[0]
    expected = out.clone()
    scale_and_accumulate(expected, sum_in_order(torch.stack(pieces)), scale=1 / 3, accumulate=accumulate)
    kept = [piece.clone() for piece in pieces]
    sum_pieces(out, pieces, scale=1 / 3, accumulate=accumulate)
    assert torch.equal(out, expected)
    assert all(torch.equal(piece, copy) for piece, copy in zip(pieces, kept, strict=True)), "peers read them too"


def test_pieces_are_added_in_order_in_fp32() -> None:
    pieces = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(1)
    sum_pieces(out, pieces)
    assert out.item() == 258.0, "in bf16 it is 256"
    one, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    sum_pieces(out, [one, tiny, tiny])
    assert out.item() == 1.0
    sum_pieces(out, [tiny, tiny, one])
    assert out.item() == 1.0 + 2.0**-23


def check_interpreted() -> None:
    """Compare the kernel with plain torch."""
    import warnings

    import numpy as np

    warnings.simplefilter("error")
    np.seterr(all="ignore")
    from megatron.core.distributed.fsdp.comm import sum_kernel

    for count in (1, 2, 3, 8):
        for numel in (1, 16, 2048, 2048 * 2 + 17):
            for wire, held in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16,) * 2):
                for accumulate in (False, True):
                    pieces, out = _pieces(count, numel, wire), _pieces(1, numel, held)[0]
                    if wire == torch.float16:
                        pieces = [piece / 64 for piece in pieces]
                    expected = out.clone()
                    total = sum_in_order(torch.stack(pieces))
                    # One rounding at the end, to what is held. With a power of two, scaling does not round.
                    expected.copy_(total * 0.25 + (expected.float() if accumulate else 0.0))
                    sum_kernel.sum_with_triton(out, pieces, 0.25, accumulate)
                    # Triton's interpreter cuts bf16 off where devices round.
                    tolerance = 2.0**-7 if held == torch.bfloat16 else 0.0
                    torch.testing.assert_close(out, expected, rtol=tolerance, atol=0.0)
    empty = torch.empty(0)
    sum_kernel.sum_with_triton(empty, [empty, empty], 1.0, False)
    out = torch.empty(100)
    pieces = _pieces(3, 100, torch.bfloat16)
    used: list[int] = []
    launch = sum_kernel.sum_with_triton
    sum_kernel.sum_with_triton = lambda *args: (used.append(1), launch(*args))[1]
    sum_pieces(out, pieces, scale=1 / 3)
    assert used, "the kernel serves whatever it can"
    assert torch.equal(out, sum_in_order(torch.stack(pieces)) * torch.tensor(1 / 3))
    sum_pieces(out, _pieces(9, 100, torch.bfloat16))
    sum_pieces(out.double(), pieces)
    assert len(used) == 1, "and plain torch the rest"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("count", [2, 4, 8, 9])
@pytest.mark.parametrize("numel", [1, 4096, 1_000_003])
def test_the_kernel_on_cuda(count: int, numel: int) -> None:
    for wire, held in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        for accumulate in (False, True):
            pieces = [piece.cuda() for piece in _pieces(count, numel, wire)]
            out = _pieces(1, numel, held)[0].cuda()
            expected = sum_in_order(torch.stack(pieces)) * 0.25 + (out.float() if accumulate else 0.0)
            again = out.clone()
            sum_pieces(out, pieces, scale=0.25, accumulate=accumulate)
            if count <= 8 or not accumulate:  # plain torch may round twice
                assert torch.equal(out, expected.to(held))
            sum_pieces(again, pieces, scale=0.25, accumulate=accumulate)
            assert torch.equal(out, again), "bitwise the same every time"
