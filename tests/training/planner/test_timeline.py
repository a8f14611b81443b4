"""The time of a step from its operations: what hides behind computation, what waits, what each costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.planner.hollow import HollowMode, Operation
from megatron.training.planner.rates import DeviceRates, attention_flops, gemm_flops, rates_of
from megatron.training.planner.timeline import STEP_END, Event, StepTime, Wait, run_timeline


def _compute(seconds: float) -> Operation:
    return Operation("compute", ((1,),), (torch.float32,), int(seconds * 1e6), "compute")


def _gather(seconds: float) -> Operation:
    return Operation("gather", ((1,),), (torch.float32,), int(seconds * 1e6), "gather", 2, 1)


def _step(*entries: Any, contention: float = 0.0, host: float = 0.0) -> StepTime:
    return run_timeline(
        [STEP_END, *entries], seconds=lambda op: op.nbytes / 1e6, host_seconds=lambda op: host, contention=contention
    )


def test_a_gather_hides_behind_computation_and_the_rest_is_exposed() -> None:
    time = _step(_gather(3), Event(1, "gather"), _compute(2), Wait("compute", 1, "WEIGHTS_GATHERED"), _compute(1))
    assert time.total == pytest.approx(4) and time.exposed == pytest.approx(1)
    assert time.waits_by_edge == {"WEIGHTS_GATHERED": pytest.approx(1)}
    assert time.communication == {"gather": pytest.approx(3)} and time.nbytes == {("gather", 2): 3_000_000}


def test_computation_beside_a_gather_takes_longer() -> None:
    time = _step(_gather(3), _compute(2), contention=0.5)
    assert time.contention == pytest.approx(1) and time.compute == pytest.approx(2)


def test_kernels_of_two_streams_take_turns() -> None:
    """Nothing is computed twice as fast for being on two streams: both are over when the sum of their times is."""
    kernel = Operation("aten.copy_", ((1,),), (torch.float32,), 4_000_000, "gather")
    for order in ([kernel, *[_compute(1)] * 6], [*[_compute(1)] * 6, kernel]):
        assert _step(*order).total == pytest.approx(10)


def test_a_slow_host_is_waited_for() -> None:
    time = _step(*[_compute(1)] * 4, host=2.0)
    assert time.total == pytest.approx(9) and time.host == pytest.approx(5)


def test_an_update_beside_the_next_forward_counts_in_that_step() -> None:
    """Kernels of two streams take turns: what the first step leaves behind makes the second one longer."""
    update = Operation("update_kernel", ((1,),), (torch.float32,), 1_000_000, "update")
    step = [_compute(3), Event(1, "compute"), Wait("update", 1, "GRADS_FINAL"), update]
    steps = [*step, STEP_END, *step]
    assert run_timeline(
        steps, seconds=lambda op: op.nbytes / 1e6, host_seconds=lambda op: 0.0, contention=0.0
    ).total == pytest.approx(4)


def test_operations_are_counted_by_their_shapes() -> None:
    """2 m n k of a product, in attention 4 s^2 d for each head and half of it where it is causal, 2.5 times that in backward."""
    mode = HollowMode()
    mode.recording.is_on = True
    query = torch.empty(1, 4, 512, 64)
    with mode:
        torch.empty(300, 500) @ torch.empty(500, 700)
        torch.addmm(torch.empty(700), torch.empty(300, 500), torch.empty(500, 700))
        torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, True, 0.0, True, False)
    product, sum_product, attention = [op for op in mode.recording.entries if "empty" not in op.name]
    assert gemm_flops(product) == gemm_flops(sum_product) == 2 * 300 * 500 * 700
    assert product.nbytes == 4 * (300 * 500 + 500 * 700 + 300 * 700)
    assert attention.is_causal and attention_flops(attention) == 4 * 4 * 512 * 512 * 64 / 2


def test_collectives_between_hosts_share_their_adapters() -> None:
    """8 ranks of a host bring in what lacks by 8 adapters; one rank of each host by its own."""
    rates = rates_of("h200")
    gather = "c10d._allgather_base_"
    whole = Operation(gather, ((1,),), (torch.bfloat16,), 2**30, "gather", 64, 63)
    spread = Operation(gather, ((1,),), (torch.bfloat16,), 2**30, "gather", 8, 56)
    link = Operation(gather, ((1,),), (torch.bfloat16,), 2**30, "gather", 8, 7)
    assert rates.seconds(link) == pytest.approx(rates.link_seconds + 2**30 / rates.link_bandwidth["default"])
    assert rates.seconds(spread) == pytest.approx(2**30 * 7 / 8 / rates.network_bandwidth, rel=0.01)
    assert rates.seconds(link) < rates.seconds(whole) < rates.seconds(spread)


def test_rates_are_kept_in_a_file_and_others_are_refused(tmp_path: Path) -> None:
    rates = rates_of("h200")
    rates.save(tmp_path / "rates.json")
    assert rates_of(str(tmp_path / "rates.json")) == rates
    (tmp_path / "other.json").write_text('{"name": "x", "speed": 1}')
    with pytest.raises(ValueError, match=r"must be a file of tools/calibrate\.py"):
        rates_of(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match="or one of h200"):
        rates_of("abacus")
    with pytest.raises(ValueError, match="rates must be positive"):
        DeviceRates(name="x", memory_nbytes=1, gemm_flops={"bf16": 0.0})


@pytest.mark.parametrize("host", [0.0, 0.4, 0.9, 2.5])
@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_a_step_is_the_sum_of_its_parts(host: float, contention: float) -> None:
    """Waits that the host reaches late, collectives on the compute stream and a host that ends last are counted once each."""
    split = Operation("all_reduce", ((1,),), (torch.float32,), 500_000, "compute", 2, 1)
    copy = Operation("aten.copy_", ((1,),), (torch.float32,), 300_000, "gather")
    gathered = [_gather(3), copy, Event(1, "gather"), _compute(2), Wait("compute", 1, "WEIGHTS_GATHERED"), _compute(1)]
    step = [*gathered, split, _gather(1), Event(2, "gather"), Wait("compute", 2, "WEIGHTS_GATHERED"), _gather(1)]
    time = run_timeline(
        [*step, STEP_END, *step],
        seconds=lambda op: op.nbytes / 1e6,
        host_seconds=lambda op: host,
        contention=contention,
    )
    assert time.total == pytest.approx(time.compute + time.contention + time.exposed + time.host)
    assert time.exposed == pytest.approx(sum(time.waits_by_edge.values()))
