"""Iterations on Gram matrices come nearer to exact arithmetic than those on the matrices in bf16, wherever these lie."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.matrices.gram_iteration import GramIteration, PlacedMatrix, Tiling
from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz, newton_schulz_coefficients
from tests.support.plain_muon import orthogonalized
from tests.support.triton_interpreter import let_ranges_be_loaded

TILINGS = [Tiling(), Tiling(rows=64, columns=128, depth=32)]


def _spectrum(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A matrix whose singular values lie between 1 and 1e-3, as those of gradients do."""
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    return u @ torch.diag(torch.logspace(0, -3, min(rows, columns))) @ v


def _placed(size: int, generator: torch.Generator) -> tuple[list[PlacedMatrix], torch.Tensor]:
    """Wide, tall and interleaved matrices with the same short side, and zeros, in a buffer."""
    wide = PlacedMatrix(0, 1, size, 0, size, size + 64)
    tall = PlacedMatrix(wide.numel, 1, size + 128, 0, size + 128, size)
    # Two blocks of size / 2 rows, each behind 32 rows of something else.
    blocks = PlacedMatrix(tall.offset + tall.numel, 2, size // 2 + 32, 32, size // 2, size)
    nothing = PlacedMatrix(blocks.offset + blocks.numel + 64 * size, 1, size, 0, size, size)
    whole = torch.randn(nothing.offset + nothing.numel, generator=generator)
    for place in (wide, tall, blocks):
        matrix = _spectrum(place.rows, place.columns, generator) * 100.0
        place.view(whole).copy_(matrix.view(place.num_repeats, place.height, place.columns))
    nothing.view(whole).zero_()
    return [wide, tall, blocks, nothing], whole


def _matrix(place: PlacedMatrix, flat: torch.Tensor) -> torch.Tensor:
    return place.view(flat).reshape(place.rows, place.columns).cpu()


def _scratch(grams: GramIteration, out: torch.Tensor) -> torch.Tensor:
    return torch.empty(grams.scratch_numel, dtype=torch.float16, device=out.device)


def _check(kind: str, steps: int, size: int, device: torch.device, tiling: Tiling) -> None:
    coefficients = newton_schulz_coefficients(kind, steps)
    iterate = NewtonSchulz(coefficients=coefficients, eps=1e-15, may_use_grams=True)
    places, whole = _placed(size, torch.Generator().manual_seed(0))
    grams = GramIteration(places, iterate, device, tiling=tiling)
    untouched = 7.0
    out = torch.full_like(whole, untouched, dtype=torch.float16, device=device)
    grams.run(whole.to(device), out, _scratch(grams, out))
    for place in places[:3]:
        matrix, got = _matrix(place, whole), _matrix(place, out).double()
        exact = orthogonalized(matrix.double(), coefficients, dtype=torch.float64).double()
        ours, theirs = (float((x - exact).norm() / exact.norm()) for x in (got, orthogonalized(matrix, coefficients)))
        assert ours < 0.7 * theirs, (kind, place, ours, theirs)
    place, alone = places[2], torch.zeros_like(out)
    other = GramIteration([place], iterate, device, tiling=tiling)
    other.run(whole.to(device), alone, _scratch(other, out))
    assert torch.equal(_matrix(place, alone), _matrix(place, out)), "others must not change a matrix"
    assert not _matrix(places[3], out).any()
    between = PlacedMatrix(places[2].offset, 2, size // 2 + 32, 0, 32, size)
    assert (_matrix(between, out) == untouched).all()


def check_interpreted() -> None:
    let_ranges_be_loaded()
    cases = [("quintic", 5), ("simple", 1)]
    for (kind, steps), tiling in zip(cases, TILINGS, strict=True):
        _check(kind, steps, 128, torch.device("cpu"), tiling)


@pytest.mark.gpu(1)
def test_kernels_on_a_device_are_nearer_to_exact_arithmetic() -> None:
    for kind, steps, size in (("quintic", 5, 512), ("quintic", 5, 1024), ("polar_express", 8, 512), ("simple", 1, 512)):
        _check(kind, steps, size, torch.device("cuda"), Tiling())
