"""Offloaded activations on a GPU: the same gradients, less memory, and copies beside computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.core.transformer.offload.activation_offload import ActivationOffload
from tests.support.device_trace import traced

_WIDTH, _ROWS = 1024, 8192
_LONG_US = 50.0  # a tensor of 16 MiB takes 300


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)) for _ in range(8)]
    return nn.Sequential(*blocks).to("cuda", torch.bfloat16)


def _train(model: nn.Module, steps: int = 4) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of the last step, and the most memory that activations of a step took."""
    most = 0
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(_ROWS, _WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).bfloat16()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(x).float().square().mean()
        most = torch.cuda.max_memory_allocated() - before
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], most


@pytest.mark.gpu(1)
def test_gradients_are_the_same_and_memory_is_less() -> None:
    wanted, resident = _train(_model())
    for max_regions in (0, 1, 3):
        model = _model()
        offload = ActivationOffload(max_regions=max_regions)
        for layer in list(model)[:7]:
            offload.attach(layer)
        gradients, offloaded = _train(model)
        assert all(torch.equal(*pair) for pair in zip(gradients, wanted, strict=True))
        assert offloaded < (0.45 + 0.1 * max_regions) * resident, (max_regions, offloaded, resident)
        of_layer = 2 * _ROWS * (_WIDTH + 2 * 4 * _WIDTH)  # a linear's input, GELU's, the other linear's
        assert offload.pool.nbytes == 7 * of_layer


@pytest.mark.gpu(1)
def test_copies_run_on_streams_of_their_own(tmp_path: Path) -> None:
    model = _model()
    offload = ActivationOffload()
    for layer in list(model)[:7]:
        offload.attach(layer)
    _train(model, steps=2)
    works = traced(lambda: _train(model, steps=1), tmp_path / "trace.json")
    streams = {
        kind: {work.stream for work in works if is_kind(work.name) and work.end - work.begin > _LONG_US}
        for kind, is_kind in {
            "DtoH": lambda name: "DtoH" in name,
            "HtoD": lambda name: "HtoD" in name,
            "compute": lambda name: "Mem" not in name,
        }.items()
    }
    assert all(streams.values()), sorted({work.name for work in works})
    assert not streams["DtoH"] & streams["compute"] and not streams["DtoH"] & streams["HtoD"]
