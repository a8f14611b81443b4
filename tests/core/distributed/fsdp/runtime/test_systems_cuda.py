"""The engine's systems as a profiler and the allocator see them on GPUs: overlap, streams, memory, first gathers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.api.module import find_context
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.device_trace import Work, num_overlapping, streams_of, traced
from tests.support.launch import run_ranks

pytestmark = pytest.mark.gpu(2)

DEVICE = "cuda"
NUM_UNITS, WIDTH = 6, 4096
# A GEMM of a unit then takes about 0.4 ms, and a gather of its 100 MB about as long: what may overlap does.
NUM_ROWS = 8192


class Layers(nn.Sequential):
    """A unit of matrices of one size, with nothing between them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)))


class Trainer:
    """Steps of a sharded model in their parts. The root has no parameters of its own."""

    def __init__(self, num_rows: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Layers() for _ in range(NUM_UNITS)))
        for unit in (*self.net, self.net):
            fully_shard(unit, **options)
        self.context = find_context(self.net)  # type: ignore[arg-type]
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.net.parameters(), lr=1e-3))
        self.inputs = torch.randn(num_rows, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        self.loss: torch.Tensor | None = None

    def forward(self) -> None:
        self.loss = self.net(self.inputs).float().square().mean()

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.forward()
            self.backward()
            self.update()


def _or_reason(make: Callable[[], Any]) -> Any:
    """What is made, or, where the machine cannot serve the transport, the word on why."""
    try:
        return make()
    except ValueError as error:
        if "cannot serve" not in str(error):
            raise
        return str(error)


def _skip_if_not_served(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, str):
            pytest.skip(result)


# ---- overlap --------------------------------------------------------------------------------------------------------


def _overlap(transport: str, folder: str) -> str | None:
    trainer = _or_reason(lambda: Trainer(NUM_ROWS, transport=transport))
    if isinstance(trainer, str):
        return trainer
    trainer.run(4)
    # The first profile starts slowly, on each rank differently.
    traced(lambda: torch.zeros(1, device=DEVICE), Path(folder) / f"warmup-{dist.get_rank()}.json")

    def step() -> None:
        # Ranks start together, whenever their profilers let them: one that waits for another has no GEMMs meanwhile.
        dist.all_reduce(torch.zeros(1, device=DEVICE))
        torch.cuda._sleep(120_000_000)  # the host gets ahead, as it does where units take longer than their launches
        trainer.forward()
        trainer.backward()

    works = traced(step, Path(folder) / f"step-{dist.get_rank()}.json")
    trainer.update()
    assert trainer.context.planner.plan is not None and trainer.context.planner.in_plan
    _check_overlap(works)
    if transport != "peer_copy":
        _check_names(works, symmetric=transport == "symm")
    return None


def _check_overlap(works: list[Work]) -> None:
    """All but one gather of a step, which is forward's first, overlap GEMMs, and all but one reduction, the last.

    So at least n - 1 of n gathers do in forward, and n - 1 of n - 1 in backward: the last unit is not gathered again.
    """
    gemms = [work for work in works if work.is_gemm]
    communication = [work for work in works if work.is_communication]
    gather_stream = communication[0].stream
    gathers = [work for work in communication if work.stream == gather_stream]
    reductions = [work for work in communication if work.stream != gather_stream]
    (reduce_stream,) = streams_of(reductions)
    assert not {gather_stream, reduce_stream} & streams_of(gemms)
    for kind, number in ((gathers, 2 * NUM_UNITS - 1), (reductions, NUM_UNITS)):
        each, rest = divmod(len(kind), number)  # a transport may take several copies or kernels for one
        assert rest == 0 and each >= 1, f"{len(kind)} pieces of {number} collectives"
        assert num_overlapping(kind, gemms) >= each * (number - 1), [work.name for work in kind[:3]]


def _check_names(works: list[Work], *, symmetric: bool) -> None:
    collectives = [work for work in works if work.is_gather or work.is_reduction]
    assert sum(work.is_gather for work in works) == 2 * NUM_UNITS - 1, "the last unit is not gathered again"
    assert sum(work.is_reduction for work in works) == NUM_UNITS
    assert all(("ncclSymk" in work.name) is symmetric for work in collectives), {work.name for work in collectives}


@pytest.mark.parametrize("transport", ["nccl", "symm", "peer_copy"])
def test_gathers_and_reductions_overlap_gemms_on_streams_of_their_own(transport: str, tmp_path: Path) -> None:
    """With n units, n - 1 gathers in forward, and n - 1 gathers and n - 1 reductions in backward."""
    _skip_if_not_served(run_ranks(2, _overlap, transport, str(tmp_path), backend="nccl"))


# ---- memory ---------------------------------------------------------------------------------------------------------


def _take_workspaces(num_rows: int) -> None:
    """Make cuBLAS allocate its workspaces, which stay, for forward's thread and for backward's."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE, dtype=torch.bfloat16)
    inputs = torch.randn(num_rows, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    linear(inputs).float().square().mean().backward()


def _memory() -> None:
    num_rows = 16  # activations are then a thousandth of the weights
    _take_workspaces(num_rows)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    trainer = Trainer(num_rows)
    expected = trainer.context.describe()
    trainer.run(4)
    report = trainer.context.describe()
    assert report.is_planned and trainer.context.planner.in_plan
    assert report.at_rest == pytest.approx(expected.at_rest, rel=0.02), "what was expected before the first step"
    at_rest = torch.cuda.memory_allocated() - base
    assert at_rest == pytest.approx(report.at_rest, rel=0.02), str(report)
    torch.cuda.reset_peak_memory_stats()
    trainer.run(2)
    peak = torch.cuda.max_memory_allocated() - base
    assert peak == pytest.approx(report.peak, rel=0.02), str(report)
    assert peak - at_rest == pytest.approx(report.peak - report.at_rest, rel=0.02), str(report)
    assert torch.cuda.memory_allocated() - base == at_rest, "a step leaves nothing behind"


def test_peak_and_rest_are_what_the_plan_says() -> None:
    """Gradients that autograd holds for a unit on 2 ranks take what its main gradients take then: no more is added."""
    run_ranks(2, _memory, backend="nccl")


# ---- the first gather -----------------------------------------------------------------------------------------------


def _wrapped(transport: str, *, on: bool) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        fsdp_all_gather_in_start_param_sync=on,
        fsdp_transport=transport,  # type: ignore[arg-type]
    )
    settings = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    return FullyShardedDataParallel(settings, config, nn.Sequential(*(Layers() for _ in range(3))), [Layers])


def _first_gather(transport: str, folder: str) -> str | None:
    totals = []
    for on in (True, False):
        wrapped = _or_reason(functools.partial(_wrapped, transport, on=on))
        if isinstance(wrapped, str):
            return wrapped
        optimizer = fully_shard_optimizer(torch.optim.SGD(wrapped.parameters(), lr=1e-3))
        inputs = torch.randn(64, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        between: list[Work] = []
        for step in range(4):
            wrapped(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between = traced(wrapped.start_param_sync, Path(folder) / f"{dist.get_rank()}-{on}-{step}.json")
        ahead = [work for work in between if work.is_communication]
        assert bool(ahead) is on and not any(work.is_reduction for work in ahead), [work.name for work in between]
        assert on or not between, "off, nothing at all runs outside of forward, backward and the optimizer"
        forward = traced(functools.partial(wrapped, inputs), Path(folder) / f"{dist.get_rank()}-{on}-forward.json")
        totals.append(len(ahead) + sum(work.is_communication for work in forward))
    assert totals[0] == totals[1] > 0, "the gather is moved, not added"
    return None


@pytest.mark.parametrize("transport", ["nccl", "peer_copy"])
def test_start_param_sync_launches_the_first_units_gather_and_only_where_it_is_on(
    transport: str, tmp_path: Path
) -> None:
    _skip_if_not_served(run_ranks(2, _first_gather, transport, str(tmp_path), backend="nccl"))
