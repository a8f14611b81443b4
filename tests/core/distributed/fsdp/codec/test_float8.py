"""Scales and bytes are those of transformer-engine's formulas, whatever piece of a weight a rank holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron.core.distributed.fsdp import Fp8Codec
from megatron.core.distributed.fsdp.codec import float8
from megatron.core.distributed.fsdp.codec.scaling import Piece, pieces_of
from megatron.core.distributed.fsdp.layout.flat_layout import pack_rows
from tests.support.float8_weights import Dequantizer, make_codec

INF, NAN = math.inf, math.nan


def test_scale_of_the_weights_themselves() -> None:
    """1 where there is nothing to scale by; the largest fp32 number where the quotient is infinite."""
    amax = torch.tensor([448.0, 1.0, 3.0, 0.0, INF, NAN, 1e-38])
    largest = torch.finfo(torch.float32).max
    expected = torch.tensor([1.0, 448.0, 448.0 / 3.0, 1.0, 1.0, 1.0, largest])
    assert torch.equal(float8.current_scale(amax, power_of_two=False), expected)
    powers = torch.tensor([1.0, 256.0, 128.0, 1.0, 1.0, 1.0, 2.0**127])
    assert torch.equal(float8.current_scale(amax, power_of_two=True), powers)


def test_scale_of_earlier_steps() -> None:
    """The former scale stays where the history says nothing; a margin leaves powers of two above."""
    amax, former = torch.tensor([2.0, 0.0, INF, NAN, 1e-38]), torch.full((5,), 7.0)
    largest = torch.finfo(torch.float32).max
    assert float8.delayed_scale(amax, former, margin=0).tolist() == [224.0, 7.0, 7.0, 7.0, largest]
    assert float8.delayed_scale(amax, former, margin=3)[0] == 28.0


def test_bytes_saturate_and_keep_nan() -> None:
    weights = torch.tensor([0.0, 1.0, -1.0, 500.0, -1e30, INF, NAN, 0.0625])
    target = torch.empty(8, dtype=torch.uint8)
    float8.write_bytes(target, weights, torch.tensor(1.0))
    # Sign, four bits of exponent (bias 7), three of mantissa.
    assert target.tolist() == [0x00, 0x38, 0xB8, 0x7E, 0xFE, 0x7E, float8.NAN_BYTE, 0x18]


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (5, 7), (1, 1000), (257, 129)])
def test_blocks_do_not_depend_on_who_holds_which_elements(shape: tuple[int, int]) -> None:
    """Any cut of the flattened matrix into pieces gives the maxima and the bytes of the whole."""
    torch.manual_seed(0)
    codec, whole = make_codec("blockwise"), torch.randn(shape)
    numel = whole.numel()
    cuts = [0, *sorted(torch.randint(1, numel, (5,)).tolist() if numel > 1 else []), numel]
    expected = torch.zeros(codec.scale_shape(shape))
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            expected[row // 128, column // 128] = whole[row : row + 128, column : column + 128].abs().max()
    amax, target = torch.zeros_like(expected), torch.zeros(numel, dtype=torch.uint8)
    pieces = [Piece(0, a, shape[1], a, b) for a, b in itertools.pairwise(cuts)]
    flat = whole.flatten()
    for piece in pieces:
        codec.raise_amax(amax, flat[piece.begin : piece.end], piece)
    assert torch.equal(amax, expected)
    scale = codec.first_scale(amax)
    for piece in pieces:
        own = flat[piece.begin : piece.end]
        codec.write(target[piece.begin : piece.end], own, scale, piece, nominal=torch.float32)
    by_element = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(target.view(shape).view(torch.float8_e4m3fn), (whole * by_element).to(torch.float8_e4m3fn))


def test_pieces_cover_each_weight_once_without_padding() -> None:
    layout = pack_rows([torch.Size((300, 8)), torch.Size((7, 40))], num_ranks=4)
    found: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(4):
        begin = rank * layout.segment_numel
        for piece in pieces_of(layout, begin, begin + layout.segment_numel):
            found[piece.weight] += range(piece.first, piece.first + piece.end - piece.begin)
    assert found == {0: list(range(2400)), 1: list(range(280))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "mxfp8"}, "recipe of an Fp8Codec must be one of delayed, tensorwise, blockwise, got 'mxfp8'"),
        ({"recipe": "delayed", "amax_compute_algo": "mean"}, "must be one of max, most_recent, got 'mean'"),
        ({"recipe": "delayed", "amax_history_len": 0}, "got amax_history_len=0 and margin=0"),
    ],
)
def test_a_codec_says_what_it_needs(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Codec(wrapper=Dequantizer(), **settings)  # type: ignore[arg-type]


def test_a_vector_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match=r"must be a matrix, got bias of shape \[3\]"):
        make_codec("tensorwise").check(torch.zeros(3), "bias")
