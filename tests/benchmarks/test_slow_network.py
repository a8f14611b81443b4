"""Hosts with a slow network between them: outer reductions hide behind backward, and the losses are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import slow_network

_RATE_MBIT = 200.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (4, 1)])
def test_compute_waits_for_less_than_the_wire_takes(num_hosts: int, ranks_per_host: int, tmp_path: Path) -> None:
    if (reason := slow_network.missing_for_hosts()) is not None:
        pytest.skip(reason)
    file = tmp_path / "found.json"
    flags = ["--hosts", num_hosts, "--ranks-per-host", ranks_per_host, "--rate-mbit", _RATE_MBIT, "--json", file]
    assert slow_network.main(list(map(str, flags))) == 0
    rows = json.loads(file.read_text())
    assert [(row["sharding"], row["rate_mbit"]) for row in rows] == [
        (sharding, rate) for sharding in ("HSDP", "HFSDP") for rate in (None, _RATE_MBIT)
    ]
    numel = slow_network.NUM_LAYERS * slow_network.WIDTH**2
    for row in rows:
        # Of gradients in fp32 a host sends all but its own part, and with HSDP that part's sum too.
        times = 2 if row["sharding"] == "HSDP" else 1
        sent = times * 4 * numel * (num_hosts - 1) / num_hosts
        assert row["difference"] < 1e-6, "fp32, but for the order of sums"
        assert row["losses"] == rows[0]["losses"], "neither the rate nor the sharding changes a sum"
        if row["rate_mbit"] is not None:
            assert row["wire_ms"] == pytest.approx(sent * 8 / _RATE_MBIT / 1e3, rel=0.05)
            assert row["outer_ms"] > 0.9 * row["wire_ms"], "the limit is in effect"
            assert row["exposed_ms"] < row["wire_ms"], "some of it is hidden"
