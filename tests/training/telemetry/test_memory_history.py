"""What is alive at the peak, from snapshots as ``torch.cuda.memory._snapshot`` returns them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron.training.telemetry.memory_history import alive_at_peak, main, summarize_snapshot

_MIB = 2**20


def _frames(*lines: int, file: str = "/somewhere/megatron/core/layer.py") -> list[dict[str, Any]]:
    torch_line = {"filename": "/usr/lib/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
    return [torch_line, *({"filename": file, "line": line, "name": "forward"} for line in lines)]


def _event(action: str, addr: int, mib: int, line: int = 0) -> dict[str, Any]:
    frames = _frames(line) if line else []
    return {"action": action, "addr": addr, "size": mib * _MIB, "frames": frames, "stream": 0}


def _block(address: int, mib: int, state: str, line: int = 0) -> dict[str, Any]:
    return {"address": address, "size": mib * _MIB, "state": state, "frames": _frames(line) if line else []}


def _segment(*blocks: dict[str, Any]) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {"device": 0, "address": blocks[0]["address"], "total_size": total, "blocks": list(blocks)}


# Weights (1) stay; an older block (2) goes; activations (3, 3) come, and at the peak one of them and a gradient (4) are alive.
_TRACE = [
    _event("segment_alloc", 100, 64),
    _event("alloc", 103, 8, line=3),
    _event("free_requested", 102, 4),
    _event("free_completed", 102, 4),
    _event("alloc", 104, 16, line=4),
    _event("alloc", 105, 8, line=3),
    _event("free_completed", 103, 8),
    _event("free_completed", 105, 8),
    _event("alloc", 103, 2, line=7),
    _event("free_completed", 104, 16),
]
_SEGMENTS = [
    _segment(
        _block(101, 10, "active_allocated", line=1),
        _block(111, 32, "inactive"),
        _block(103, 2, "active_allocated", line=7),
    )
]


def test_the_peak_is_found_backwards_from_what_is_alive_at_the_end() -> None:
    """Blocks that were there before the record began count; a free does not say where its block came from, its allocation does."""
    peak = alive_at_peak(_SEGMENTS, _TRACE)
    assert peak.nbytes == (10 + 8 + 16 + 8) * _MIB
    assert peak.at_end_nbytes == 12 * _MIB
    line = "megatron/core/layer.py:{} forward"
    assert sorted((block.nbytes // _MIB, block.site) for block in peak.blocks) == [
        (8, line.format(3)),
        (8, line.format(3)),
        (10, line.format(1)),
        (16, line.format(4)),
    ]


def test_a_block_from_before_the_record_is_named_so() -> None:
    peak = alive_at_peak(_SEGMENTS, _TRACE[2:4])
    assert peak.nbytes == 16 * _MIB
    assert (4 * _MIB, f"(before the record begins, {4 * _MIB} bytes each)") in peak.blocks


def test_the_end_is_what_is_alive_where_memory_ran_out() -> None:
    assert alive_at_peak(_SEGMENTS, _TRACE, at_end=True).nbytes == 12 * _MIB


def test_summary_groups_by_place_and_counts_the_rest() -> None:
    blocks = [_block(1000 * i, i, "active_allocated", line=i) for i in range(1, 41)] + [
        _block(90_000, 3, "active_awaiting_free"),
    ]
    text = summarize_snapshot({"segments": [_segment(*blocks)], "device_traces": [[], []]})
    lines = text.splitlines()
    assert (
        lines[0]
        == "Device 0: 823.0 MiB alive at the peak of 0 recorded events; at their end 823.0 MiB alive, 823.0 MiB reserved"
    )
    assert lines[2].split() == ["40.0", "1", "40.0", "megatron/core/layer.py:40", "forward"]
    assert len(lines) == 2 + 30 + 1 and lines[-1].endswith("11 more places")
    assert f"(no Python line: autograd's backward or a library, {3 * _MIB} bytes each)" not in text  # among the rest


class _Attack:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_a_file_is_summarized_as_its_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = {"segments": _SEGMENTS, "device_traces": [_TRACE]}
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    assert main([str(tmp_path / "snapshot.pickle")]) == 0
    assert capsys.readouterr().out.strip() == summarize_snapshot(snapshot)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("where", ["alone", "segments", "frame"])
def test_nothing_in_a_file_is_run(
    protocol: int, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    for call in ((os.mkdir, str(ran)), (eval, f"__import__('os').mkdir({str(ran)!r})"), (print, "x")):
        attack: Any = _Attack(*call)
        snapshot: Any = {"segments": _SEGMENTS, "device_traces": [_TRACE]}
        if where == "segments":
            snapshot["segments"] = attack
        elif where == "frame":
            snapshot["device_traces"] = [[*_TRACE, {"action": "alloc", "addr": 1, "size": 1, "frames": [attack]}]]
        file = tmp_path / "snapshot.pickle"
        file.write_bytes(pickle.dumps(attack if where == "alone" else snapshot, protocol=protocol))
        assert main([str(file)]) == 2 and not ran.exists()
        said = capsys.readouterr().err
        assert f"{file} must be a snapshot of device memory" in said and "nothing was run" in said


@pytest.mark.parametrize(
    "content", [b"", b"text", pickle.dumps([1]), pickle.dumps({"segments": 1}), b"\x80\x04r\xff\xff\xff\x7f."]
)
def test_what_is_no_snapshot_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main([str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} must be a snapshot of device memory, " in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
