"""Arithmetic of the profile's summary."""

from __future__ import annotations

import pytest

from megatron.core.distributed.fsdp.overlap_report import length, overlap, union
from megatron.training.telemetry.kernel_times import counts_summary, overlap_summary


def test_union_merges_what_touches_and_drops_what_is_empty() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 6)]


def test_overlap_counts_each_moment_once() -> None:
    """Two GEMMs beside one collective hide it no more than one does."""
    collective, gemms = [(0.0, 10.0), (20.0, 30.0)], [(5.0, 12.0), (6.0, 11.0), (25.0, 26.0)]
    assert overlap(collective, gemms) == pytest.approx(6.0)
    assert overlap(gemms, collective) == pytest.approx(6.0)
    assert length(gemms) == pytest.approx(8.0)


def test_summary_takes_kernels_by_what_they_do() -> None:
    """An attention kernel is compute but no GEMM; a peer copy is communication; other copies are neither."""
    summary = overlap_summary(
        {
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": [(0.0, 1000.0)],
            "Memcpy PtoP (Device -> Device)": [(1000.0, 2000.0)],
            "Memcpy DtoD (Device -> Device)": [(1000.0, 2000.0)],
            "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": [(0.0, 500.0)],
            "pytorch_flash::flash_fwd_kernel": [(500.0, 1000.0)],
        }
    )
    assert "overlapped with GEMMs: 25.0%; with any compute: 50.0%" in summary
    assert "exposed (communication without compute) 1.00 ms" in summary


def test_what_peer_copy_does_is_communication() -> None:
    """A barrier that waits for a slow rank hides nothing, though it is a kernel."""
    barrier = "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int)"
    kernels = {
        barrier: [(0.0, 1000.0), (4000.0, 5000.0)],
        "Memcpy PtoP (Device -> Device)": [(1000.0, 2000.0)],
        "_sum_kernel": [(2000.0, 3000.0)],
        "Memset (Device)": [(0.0, 1.0)],
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": [(2000.0, 4000.0)],
    }
    assert "communication 4.00 ms, exposed (communication without compute) 3.00 ms" in overlap_summary(kernels)
    counts = (
        "1 kernels of compute, 0 of NCCL (symmetric: 0), 1 peer copies, 2 barriers, 1 sums of pieces, 0 other copies"
    )
    assert counts in counts_summary(kernels)
