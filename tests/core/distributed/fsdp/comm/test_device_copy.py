"""Prepared copies move bytes each time they are run."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.comm.peer_copy import prepare_copies


def _check(device: str) -> None:
    sources = [torch.arange(1000, device=device, dtype=torch.bfloat16) + i for i in range(3)]
    targets = [torch.zeros_like(source) for source in sources]
    run = prepare_copies(list(zip(targets, sources, strict=True)))
    run()
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    sources[1].fill_(7)
    run()
    assert torch.equal(targets[1], sources[1]), "what the source holds now"


def test_copies_on_the_cpu() -> None:
    _check("cpu")


@pytest.mark.gpu(1)
def test_copies_on_a_gpu_run_on_the_current_stream() -> None:
    """Also on a stream that is not the default one, behind what runs there."""
    _check("cuda")
    stream = torch.cuda.Stream()
    source, target = torch.zeros(2**20, device="cuda"), torch.ones(2**20, device="cuda")
    run = prepare_copies([(target, source)])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(3)
        run()
    stream.synchronize()
    assert bool((target == 3).all())


@pytest.mark.gpu(1)
def test_copies_are_captured_into_a_graph() -> None:
    """A step in a CUDA graph gathers at each replay."""
    source, target = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
    run = prepare_copies([(target, source)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    source.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((target == 5).all())


def test_unequal_sizes_are_refused() -> None:
    """The driver would copy past the end."""
    with pytest.raises(ValueError, match="equal sizes"):
        prepare_copies([(torch.zeros(2), torch.zeros(3))])
