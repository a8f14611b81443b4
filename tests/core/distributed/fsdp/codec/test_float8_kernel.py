"""The Triton kernels write what the torch operations write.

tests/core/test_interpreted_kernels.py runs the check.
"""

from __future__ import annotations

import math

import torch

from megatron.core.distributed.fsdp.codec import float8

# (shape, first element, number of elements): whole, cut in a row, cut in a block, a part of a row.
PIECES = [((256, 128), 0, 256 * 128), ((200, 256), 3 * 256 + 64, 130 * 256 + 17), ((3, 1280), 1290, 700)]


def check_interpreted() -> None:
    from megatron.core.distributed.fsdp.codec import float8_kernel as kernels

    generator = torch.Generator().manual_seed(0)
    for shape, first, numel in PIECES:
        whole = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) * 100
        weights, width = whole.flatten()[first : first + numel].clone(), shape[1]
        blocks = (-(-shape[0] // 128), -(-shape[1] // 512) * 4)
        found = [torch.zeros(blocks), torch.zeros(blocks)]
        kernels.raise_block_amax(found[0], weights, first, width)
        float8.raise_block_amax(found[1], weights, first, width)
        assert torch.equal(*found), (shape, found)
        weights[5], weights[6], weights[7] = math.nan, math.inf, -math.inf
        # Numbers and ties around the smallest ones, and ties of larger ones.
        weights[10:74] = torch.arange(64) * 2.0**-11
        weights[80:144] = torch.arange(64, 128) * -0.25
        scales = (float8.current_scale(found[1], power_of_two=True), torch.tensor([3.7]), torch.tensor([1.0]))
        for scale in scales:
            scales_blocks = scale.dim() == 2
            for rounds in (False, True):
                bytes_of = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
                kernels.write(bytes_of[0], weights, scale, first, width, scales_blocks=scales_blocks, rounds=rounds)
                rounded = weights.bfloat16() if rounds else weights
                if scales_blocks:
                    float8.write_block_bytes(bytes_of[1], rounded, scale, first, width)
                else:
                    float8.write_bytes(bytes_of[1], rounded, scale)
                for written in bytes_of:
                    written[written & 0x7F == float8.NAN_BYTE] = float8.NAN_BYTE  # the sign of NaN is nobody's
                different = (bytes_of[0] != bytes_of[1]).nonzero().flatten()
                assert not different.numel(), (shape, scales_blocks, rounds, different[:5], weights[different[:5]])
    nan = torch.full((128,), math.nan)
    amax = torch.zeros(1, 4)
    kernels.raise_block_amax(amax, nan, 0, 128)
    assert amax[0, 0] == math.inf
