"""The probe of offloaded updates prints what bounds a step, and what a log took beside that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import offload_probe


def test_a_log_is_compared_with_the_least_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    times = (900.0, 900.0, 900.0, 200.0, 400.0)
    log.write_text("\n".join(f" iteration {i} | elapsed time per iteration (ms): {t} |" for i, t in enumerate(times)))
    threads = torch.get_num_threads()
    try:
        offload_probe.main(["--parameters", "1e9", "--log", str(log), "--numel", "4096"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "updates on" in printed and "least time of the updates" in printed
    assert "0.30 s for an iteration" in printed, "the first three are warm-up"
    log.write_text("")
    with pytest.raises(SystemExit, match="more than three iterations, got 0"):
        offload_probe._compare(log, 1.0)
