"""What passes a bar, what fails it, and what cannot be said."""

from __future__ import annotations

from benchmarks.measure.steps import GIB, Measurement
from benchmarks.reports.bars import bars_section, graph_section


def _measurement(name: str, ms: float, *, peak: float = 10, outside: float = 0, reserved: float = 10) -> Measurement:
    return Measurement(
        name=name,
        num_warmup=0,
        losses=[10.0, 9.5],
        step_ms=[ms, ms],
        host_ms=[1.0, 1.0],
        peak_allocated=int(peak * GIB),
        outside=int(outside * GIB),
        peak_reserved=int(reserved * GIB),
    )


PEERS = [
    _measurement("ideal", 93.0),
    _measurement("fsdp2", 130.0, reserved=12),
    _measurement("megatron-fsdp", 112.0, peak=20, reserved=20),
]


def _verdict(ours: Measurement, *, model: str = "7.2b", tokens: int = 4096, peers: list[Measurement] = PEERS) -> str:
    (row,) = [
        line for line in bars_section([*peers, ours], model, tokens).splitlines() if line.startswith(f"| {ours.name} |")
    ]
    return row.strip("| ").split(" | ")[-2]


def test_all_bars_reached_is_a_pass() -> None:
    assert _verdict(_measurement("ours-peer", 100.0)) == "passes"


def test_each_figure_below_its_bar_fails() -> None:
    assert _verdict(_measurement("ours-peer", 100.5)) == "FAILS"  # 0.925 of the ideal
    assert _verdict(_measurement("ours-peer", 100.0, peak=10.1, reserved=10.1)) == "FAILS"
    assert _verdict(_measurement("ours-peer", 100.0, reserved=10.4)) == "FAILS"


def test_the_fastest_peer_counts() -> None:
    """130 / 100 is 1.3 of FSDP2, but megatron-fsdp is within 1.09."""
    fast = _measurement("megatron-fsdp-v2", 109.0)
    section = bars_section([*PEERS, fast, _measurement("ours-peer", 100.0)], "7.2b", 4096)
    assert "| engine | ideal / it | megatron-fsdp-v2 / it |" in section
    assert "1.090 < 1.1" in section and "FAILS" in section


def test_memory_past_the_allocator_counts() -> None:
    """Symmetric memory is no less memory for being allocated elsewhere."""
    assert _verdict(_measurement("ours-peer", 100.0, peak=9, outside=0.9, reserved=9)) == "passes"
    assert _verdict(_measurement("ours-peer", 100.0, peak=9, outside=1.1, reserved=9)) == "FAILS"


def test_a_graph_has_a_bar_of_its_own() -> None:
    peers = [_measurement("ideal", 86.0), _measurement("fsdp2", 150.0)]
    assert _verdict(_measurement("ours-peer", 100.0), model="1.1b", tokens=2048, peers=peers) == "passes"
    assert _verdict(_measurement("ours-peer-graph", 100.0), model="1.1b", tokens=2048, peers=peers) == "FAILS"


def test_what_was_not_measured_is_not_passed() -> None:
    ours = _measurement("ours-peer", 100.0)
    assert _verdict(ours, peers=PEERS[:2]) == "passes"
    assert _verdict(ours, peers=PEERS[1:]) == "unknown"
    assert _verdict(ours, peers=[PEERS[0]]) == "unknown"
    assert _verdict(ours, tokens=512) == "no bar"


def test_a_graph_is_compared_with_its_eager_twin() -> None:
    eager, graph, other = (_measurement(name, 1.0) for name in ("ours-peer+x", "ours-peer-graph+x", "ours-nccl-graph"))
    text = graph_section([eager, graph, other], is_deterministic=True)
    assert "`ours-peer-graph+x`: all 2 losses bitwise equal to those of `ours-peer+x`" in text
    assert "`ours-nccl-graph`: `ours-nccl` did not run" in text
    graph.losses[1] += 1e-9
    both = [eager, graph]
    assert "`ours-peer-graph+x`: DIFFERS from `ours-peer+x` from step 2 on" in graph_section(
        both, is_deterministic=True
    )
    assert "differs (without --deterministic" in graph_section(both, is_deterministic=False)
    assert graph_section([eager], is_deterministic=True) == ""
