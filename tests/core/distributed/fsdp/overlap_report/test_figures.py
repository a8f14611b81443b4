"""Where a step's time goes, from hand-made traces with known overlaps: exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.overlap_report.facts import reduced_nbytes
from megatron.core.distributed.fsdp.overlap_report.figures import END, Figures, Row, find_figures
from megatron.core.distributed.fsdp.overlap_report.intervals import common, gaps, without
from megatron.core.distributed.fsdp.overlap_report.memory import KnownMemory, memory_stack
from megatron.core.distributed.fsdp.overlap_report.trace import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    UPDATE,
    Trace,
    Work,
    read_events,
    transfer,
)

GATHER_KERNEL = "ncclDevKernel_AllGather_RING_LL(args)"
REDUCE_KERNEL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)"


class Made:
    """A trace as torch's profiler writes it: marks, operators and launches of the host, kernels of the device."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def host(self, name: str, begin: float, end: float, thread: int = 1, **args: Any) -> None:
        """An operator or a mark."""
        self._add("cpu_op", name, begin, end, thread, args)

    def forward(self, number: int, begin: float, end: float) -> None:
        """An operator whose gradient the node of this number computes."""
        self.host("aten::mm", begin, end, **{"Sequence number": number, "Fwd thread id": 0})

    def node(self, number: int, begin: float, end: float, thread: int = 2) -> None:
        """A node of the backward, as the engine of autograd runs it."""
        self.host("autograd::engine::evaluate_function: MmBackward0", begin, end, thread)
        self.host("MmBackward0", begin + 1, end, thread, **{"Sequence number": number, "Fwd thread id": 1})

    def kernel(
        self, name: str, launched: float, begin: float, end: float, *, stream: int = 7, thread: int = 1, node: int = 0
    ) -> None:
        """A kernel and its launch."""
        self._correlation += 1
        self._add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, self._args())
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        number = {"graph node id": node} if node else {}
        self._add(category, name, begin, end, stream, self._args() | {"stream": stream} | number)

    def _args(self) -> dict[str, Any]:
        return {"correlation": self._correlation}

    def _add(self, category: str, name: str, begin: float, end: float, thread: int, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "pid": 1, "tid": thread}
        self.events.append({**event, "args": args})


def _step() -> Made:
    """Two layers and a root around them: embedding and head. Times in microseconds."""
    made = Made()
    made.host("fsdp.forward root", 0, 400)
    made.host("fsdp.gather root", 5, 30)
    made.host("fsdp.sync root", 6, 12)
    made.kernel("cast_kernel", 8, 100, 110, stream=20)
    made.kernel(GATHER_KERNEL, 20, 110, 200, stream=20)
    made.forward(1, 40, 60)
    made.kernel("embedding", 50, 200, 300)
    made.host("fsdp.forward layers.0", 100, 250)
    made.host("fsdp.gather layers.0", 110, 130)
    made.kernel("Memcpy PtoP (Device -> Device)", 120, 200, 500, stream=20)
    made.forward(2, 140, 170)
    made.kernel("gemm_a", 150, 500, 900)
    made.kernel("gemm_b", 160, 900, 1000)
    made.host("fsdp.forward layers.1", 260, 390)
    made.host("fsdp.gather layers.1", 270, 290)
    made.kernel(GATHER_KERNEL, 280, 520, 700, stream=20)
    made.forward(3, 300, 320)
    made.kernel("gemm_a", 310, 1010, 1400)
    made.host("aten::cross_entropy", 420, 440)
    made.kernel("loss", 430, 1400, 1450)
    # Backward, on a thread of autograd: layer 1, layer 0, then the embedding, which no mark of the engine precedes.
    made.host("autograd::engine::evaluate_function: LossBackward0", 500, 520, 2)
    made.kernel("loss_backward", 510, 1450, 1500, thread=2)
    made.host("fsdp.backward layers.1", 530, 530.5, 2)
    made.node(3, 540, 600)
    made.kernel("gemm_c", 560, 1500, 1900, thread=2)
    made.host("autograd::engine::evaluate_function: MmBackward0", 610, 700, 2)
    made.host("fsdp.reduce layers.1", 615, 640, 2)
    made.kernel(REDUCE_KERNEL, 620, 1900, 2300, stream=24, thread=2)
    made.host("fsdp.backward layers.0", 650, 650.5, 2)
    made.host("MmBackward0", 660, 700, 2, **{"Sequence number": 2, "Fwd thread id": 1})
    made.kernel("gemm_c", 680, 1900, 2200, thread=2)
    made.node(1, 2500, 2600)
    made.kernel("embedding_backward", 2550, 2560, 2660, thread=2)
    made.host("Optimizer.step#AdamW.step", 2700, 2900)
    made.host("fsdp.update layers.0", 2710, 2760)
    made.kernel("adam", 2720, 2730, 2800)
    made.host("fsdp.gather root", 2905, 2920)
    made.kernel(GATHER_KERNEL, 2910, 2915, 2990, stream=20)
    return made


def _figures(**kwargs: Any) -> Figures:
    return find_figures(read_events(_step().events, is_cuda=True).works, (100.0, 3000.0), **kwargs)


def _row(figures: Figures, unit: str, direction: str) -> Row:
    (found,) = (row for row in figures.rows if (row.unit, row.direction) == (unit, direction))
    return found


def test_each_kernel_is_of_the_unit_that_launched_it_or_whose_gradient_it_computes() -> None:
    """The embedding's gradient follows the last layer's without a mark: the number of its operator tells the root."""
    works = read_events(_step().events, is_cuda=True).works
    found = [(work.name.split("(")[0], work.lane, work.unit, work.direction) for work in works]
    assert found == [
        ("cast_kernel", "gather", "root", FORWARD),
        ("ncclDevKernel_AllGather_RING_LL", "gather", "root", FORWARD),
        ("embedding", "compute", "root", FORWARD),
        ("Memcpy PtoP ", "gather", "layers.0", FORWARD),
        ("gemm_a", "compute", "layers.0", FORWARD),
        ("gemm_b", "compute", "layers.0", FORWARD),
        ("ncclDevKernel_AllGather_RING_LL", "gather", "layers.1", FORWARD),
        ("gemm_a", "compute", "layers.1", FORWARD),
        ("loss", "compute", OUTSIDE, FORWARD),
        ("loss_backward", "compute", OUTSIDE, BACKWARD),
        ("gemm_c", "compute", "layers.1", BACKWARD),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce", "layers.1", BACKWARD),
        ("gemm_c", "compute", "layers.0", BACKWARD),
        ("embedding_backward", "compute", "root", BACKWARD),
        ("adam", "compute", "layers.0", UPDATE),
        ("ncclDevKernel_AllGather_RING_LL", "gather", "root", FORWARD),
    ]


def test_a_copy_whose_launch_the_profiler_left_out_is_of_the_act_between_its_neighbours() -> None:
    """So are prepared copies of peer copy in torch's traces; launches are numbered in their order."""
    made = Made()
    made.host("fsdp.forward layers.0", 0, 100)
    made.kernel("gemm", 10, 300, 400)
    made.host("fsdp.gather layers.1", 20, 40)
    made.kernel("Memcpy PtoP (Device -> Device)", 30, 60, 200, stream=20)
    made.kernel("gemm", 50, 400, 500)
    made.kernel("Memcpy PtoP (Device -> Device)", 55, 600, 700, stream=20)  # in no act of the engine
    copies = [event for event in made.events if event["name"] == "cudaLaunchKernel" and event["ts"] in (30, 55)]
    made.events = [event for event in made.events if event not in copies]
    works = read_events(made.events, is_cuda=True).works
    assert [(work.name[:6], work.lane, work.unit) for work in works] == [
        ("gemm", "compute", "layers.0"),
        ("Memcpy", "gather", "layers.1"),
        ("gemm", "compute", "layers.0"),
        ("Memcpy", "other", "layers.0"),
    ]
    assert [work.launched for work in works] == [10, 20, 50, 50]


def test_the_step_is_compute_exposed_communication_late_host_and_the_rest() -> None:
    figures = _figures()
    assert figures.step == pytest.approx(2.9)
    # Idle: [100, 200) gather; [300, 500) copy; [1000, 1010) nothing; [2200, 2300) reduction, [2300, 2560) nothing, launched at
    # 2550; [2660, 2730) nothing, launched at 2720; [2800, 3000) the next gather from 2915 to 2990.
    assert figures.totals["exposed"] == pytest.approx((100 + 200 + 100 + 75) / 1e3)
    assert figures.totals["host"] == pytest.approx((250 + 60 + 115 + 10) / 1e3)
    assert figures.totals["latency"] == pytest.approx((10 + 10 + 10) / 1e3)
    assert figures.totals["compute"] == pytest.approx(2.9 - figures.totals["wait"])
    assert figures.totals["wait"] == pytest.approx(0.475 + 0.435 + 0.03)
    assert figures.totals["gather"] == pytest.approx((100 + 300 + 180 + 75) / 1e3) and figures.totals["reduce"] == 0.4


def test_what_is_not_compute_counts_for_the_unit_that_waits() -> None:
    figures = _figures(nbytes={("gather", "layers.0", FORWARD): 6_000_000})
    root, first = _row(figures, "root", FORWARD), _row(figures, "layers.0", FORWARD)
    assert (root.compute, root.gather, root.exposed, root.wait) == pytest.approx((0.1, 0.175, 0.1, 0.1))
    assert (first.compute, first.gather, first.exposed, first.host) == pytest.approx((0.5, 0.3, 0.2, 0.0))
    assert first.as_dict()["gather_gbps"] == pytest.approx(20.0)
    assert first.as_dict()["reduce_gbps"] is None
    second = _row(figures, "layers.1", FORWARD)
    assert (second.gather, second.exposed, second.latency) == pytest.approx((0.18, 0.0, 0.01))
    embedding = _row(figures, "root", BACKWARD)
    assert embedding.exposed_to == pytest.approx({"gather": 0.0, "reduce": 0.1, "other": 0.0})
    assert (embedding.exposed, embedding.host, embedding.latency) == pytest.approx((0.1, 0.25, 0.01))
    end = _row(figures, OUTSIDE, END)
    assert (end.exposed, end.host) == pytest.approx((0.075, 0.125))
    assert figures.blocks["compute"][0] == (0.1, 0.2, figures.rows.index(root))
    assert (0.0, 0.1, "exposed", figures.rows.index(root)) in figures.idle


def test_exposed_time_is_told_by_what_ran_each_moment_once() -> None:
    """A gather and a reduction at once count for the gather; the model's own collectives for neither."""
    compute = Work(100.0, 110.0, "compute", "a", BACKWARD, "gemm", 0.0)
    sent = [("gather", 0.0, 50.0), ("reduce", 20.0, 70.0), ("other", 60.0, 90.0)]
    works = [Work(begin, end, lane, "b", BACKWARD, lane, 0.0) for lane, begin, end in sent]
    figures = find_figures([*works, compute], (0.0, 110.0))
    row = _row(figures, "a", BACKWARD)
    assert row.exposed_to == pytest.approx({"gather": 0.05, "reduce": 0.02, "other": 0.02})
    assert (row.exposed, row.latency, row.host) == pytest.approx((0.09, 0.01, 0.0))


def test_without_a_device_the_threads_time_is_divided() -> None:
    made = Made()
    made.host("fsdp.forward layers.0", 0, 100)
    made.host("fsdp.gather layers.0", 10, 40)
    made.host("c10d::allgather_", 20, 30)
    made.forward(1, 50, 90)
    made.node(1, 120, 150, thread=1)
    made.host("fsdp.reduce layers.0", 130, 140)
    made.host("c10d::allreduce_", 160, 170)
    figures = find_figures(read_events(made.events, is_cuda=False).works, (0.0, 200.0))
    forward, backward = _row(figures, "layers.0", FORWARD), _row(figures, "layers.0", BACKWARD)
    assert (forward.compute, forward.exposed, forward.host) == pytest.approx((0.04, 0.03, 0.02))
    assert (backward.compute, backward.reduce) == pytest.approx((0.019, 0.01))
    assert figures.totals["other"] == pytest.approx(0.01)
    parts = ("compute", "exposed", "host", "latency")
    assert sum(figures.totals[name] for name in parts) == pytest.approx(figures.step)


@pytest.mark.parametrize(
    ("sizes", "placements", "how", "received"),
    [
        ([8], [Shard(0)], {}, 700),
        ([2], [Replicate()], {}, 800),
        ([2, 4], [Replicate(), Shard(0)], {"is_last": False}, 600),
        ([2, 4], [Replicate(), Shard(0)], {}, 600 + 200),
        ([2, 4], [Shard(0), Shard(0)], {}, 600 + 100),
        ([2, 4], [Replicate(), Shard(0)], {"has_input": False}, 200),
    ],
)
def test_what_a_reduction_receives(
    sizes: list[int], placements: list[Placement], how: dict[str, bool], received: int
) -> None:
    """Of 800 bytes: an all-reduce brings the sums back, too, and the outer axis of HSDP has the inner one's part, once a step."""
    assert reduced_nbytes(800, sizes, placements, **{"is_last": True, "has_input": True, **how}) == received


def test_an_update_after_an_evaluation_within_the_step_is_one() -> None:
    made = Made()
    made.host("fsdp.forward root", 0, 100)
    made.forward(1, 10, 90)
    made.node(1, 200, 300)
    made.host("aten::clip", 310, 320)
    made.host("fsdp.forward root", 400, 500)
    made.host("aten::evaluation", 410, 490)
    made.host("Optimizer.step#AdamW.step", 600, 700)
    made.host("aten::adam", 610, 690)
    found = {work.name: work.direction for work in read_events(made.events, is_cuda=False).works}
    assert (found["aten::evaluation"], found["aten::adam"]) == (FORWARD, UPDATE)


def test_a_node_that_computes_layers_again_counts_for_those_layers() -> None:
    """As checkpoints do: the outer unit's node runs two layers' forwards, then their backwards, whose units have begun."""
    made = Made()
    made.host("fsdp.forward root", 0, 100)
    made.forward(1, 10, 90)  # the checkpoint's own operator, in the root, around both layers
    made.host("fsdp.forward layers.0", 20, 40)
    made.host("fsdp.forward layers.1", 50, 70)
    made.node(1, 200, 500)
    for number, begin in ((0, 210), (1, 260)):
        made.host(f"fsdp.backward layers.{number}", begin, begin + 0.5, 2)
        made.host("aten::mm", begin + 10, begin + 30, 2, **{"Sequence number": 7 + number, "Fwd thread id": 0})
        made.kernel(f"again_{number}", begin + 20, begin + 1000, begin + 1010, thread=2)
    for number, begin in ((1, 320), (0, 400)):
        made.node(7 + number, begin, begin + 60)
        made.kernel(f"backward_{number}", begin + 20, begin + 1000, begin + 1010, thread=2)
    works = read_events(made.events, is_cuda=True).works
    assert [(work.name, work.unit, work.direction) for work in works] == [
        ("again_0", "layers.0", BACKWARD),
        ("again_1", "layers.1", BACKWARD),
        ("backward_1", "layers.1", BACKWARD),
        ("backward_0", "layers.0", BACKWARD),
    ]


def _replay(made: Made, *, numbered: bool) -> list[Work]:
    """The kernels of a step as a graph's: one launch, other streams, and a copy of inputs before."""
    eager = read_events(made.events, is_cuda=True).works
    replay = Made()
    replay.kernel("Memcpy DtoD (Device -> Device)", 0, 10, 20)
    for number, work in enumerate(eager):
        replay.kernel(work.name, 30, work.begin, work.end, stream=99, node=number + 1 if numbered else 0)
    return read_events(replay.events, is_cuda=True).works


@pytest.mark.parametrize("numbered", [True, False])
def test_kernels_of_a_graph_are_those_of_the_eager_step(numbered: bool) -> None:
    known = read_events(_step().events, is_cuda=True).works
    works, share = transfer(known, _replay(_step(), numbered=numbered))
    assert share > 0.99
    of = {(work.name, work.begin): (work.lane, work.unit, work.direction) for work in known}
    for work in works[1:]:
        assert of[work.name, work.begin] == (work.lane, work.unit, work.direction), work
    assert works[0].unit == OUTSIDE


def test_a_kernel_that_one_step_lacks_shifts_no_other() -> None:
    known = read_events(_step().events, is_cuda=True).works
    works, share = transfer(known, known[:3] + known[4:])
    assert share == 1.0
    assert works == known[:3] + known[4:]
    more = Work(0.0, 1000.0, "compute", "x", FORWARD, "more", 0.0)
    works, share = transfer(known, [*known[:5], more, *known[5:]])
    assert works[5].unit == OUTSIDE and works[6:] == known[5:]
    assert share == pytest.approx(1 - 1000 / (1000 + sum(work.end - work.begin for work in known)))


def test_copies_of_a_graph_find_those_of_the_eager_step() -> None:
    """Seen on an H200: a graph runs copies on a device as kernels with a block for each KiB, and writes of zeros under another name."""
    eager = [
        ("Memcpy DtoD (Device -> Device)", "790016"),
        ("Memset (Device)", "4"),
        ("Memcpy DtoD (Device -> Device)", "208"),
    ]
    graph = [("memcpy32_post", "[772, 1, 1]"), ("Memset (Unknown)", "4"), ("memcpy32_post", "[1, 1, 1]")]
    known, works = (
        [Work(at, at + 1.0, "compute", str(at), FORWARD, name, 0.0, size=size) for at, (name, size) in enumerate(step)]
        for step in (eager, graph)
    )
    works = [replace(work, unit=OUTSIDE) for work in works]
    found, share = transfer(known, works)
    assert share == 1.0 and [work.unit for work in found] == ["0", "1", "2"]


def test_intervals() -> None:
    assert common([(0, 4), (6, 9)], [(2, 7)]) == [(2, 4), (6, 7)]
    assert gaps([(1, 2), (3, 4)], (0, 5)) == [(0, 1), (2, 3), (4, 5)]
    assert without([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]


def _memory(time: float, address: int, nbytes: int, device_type: int = 1) -> dict[str, Any]:
    args = {"Addr": address, "Bytes": nbytes, "Device Type": device_type}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": args}


def test_memory_is_stacked_by_kind() -> None:
    """What forward leaves for backward is activations; what it frees before is not; gradients are those that were named."""
    trace = Trace(phases=[(0.0, FORWARD), (1000.0, BACKWARD), (2000.0, UPDATE)])
    events = [
        _memory(100, 1, 50),  # lives until backward
        _memory(200, 2, 30),
        _memory(300, 2, -30),  # does not
        _memory(1100, 3, 20),  # a gradient
        _memory(1200, 1, -50),
        _memory(1300, 2, 7),
        _memory(2100, 9, -5),  # of what was there and nobody knew
        _memory(2200, 10, -100),  # weights are dropped
        _memory(150, 4, 1000, device_type=0),
    ]
    known = KnownMemory(blocks={10: (100, "weights")}, unknown_nbytes=40, named=[(1110.0, 3, "gradients")])
    stack = memory_stack(events, trace, known, device_type=1, window=(0.0, 3000.0))
    at = {
        time: {kind: values[i] for kind, values in stack["series"].items() if values[i]}
        for i, time in enumerate(stack["times"])
    }
    assert at == {
        0.0: {"weights": 100, "other": 40},
        0.1: {"weights": 100, "activations": 50, "other": 40},
        0.2: {"weights": 100, "activations": 50, "other": 70},
        0.3: {"weights": 100, "activations": 50, "other": 40},
        1.1: {"weights": 100, "activations": 50, "gradients": 20, "other": 40},
        1.2: {"weights": 100, "gradients": 20, "other": 40},
        1.3: {"weights": 100, "gradients": 20, "other": 47},
        2.1: {"weights": 100, "gradients": 20, "other": 42},
        2.2: {"gradients": 20, "other": 42},
        3.0: {"gradients": 20, "other": 42},
    }
    assert stack["peak_ms"] == 0.2 and sum(stack["peak"].values()) == 220
