"""The metrics file is in Prometheus's text format, as its documentation gives the grammar."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron.training.telemetry.watch.run_watch import WatchConfig
from tests.training.telemetry.watch.watched import board

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_SAMPLE = re.compile(rf"({_NAME})\{{({_LABEL}(?:,{_LABEL})*)\}} (NaN|[+-]Inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the samples by name and labels; assert what the format and node_exporter's collector demand."""
    assert text.endswith("\n") and "\r" not in text
    families: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    helped, typed = set[str](), set[str]()
    for line in text.removesuffix("\n").split("\n"):
        if found := re.fullmatch(rf"# HELP ({_NAME}) ([^\\]*)", line):
            assert found[1] not in helped, "a family has one block"
            helped.add(found[1])
        elif found := re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge)", line):
            assert found[1] in helped and found[1] not in families, "the type stands before the samples"
            typed.add(found[1])
            families[found[1]] = {}
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, f"no sample, or one with a time stamp: {line}"
            assert found[1] == list(families)[-1], "samples of a family stand together"
            labels = tuple((name, re.sub(r"\\(.)", _unescaped, value)) for name, value in re.findall(_LABEL, found[2]))
            assert labels not in families[found[1]] and len(dict(labels)) == len(labels)
            families[found[1]][labels] = float(found[7].replace("Inf", "inf"))
    assert helped == typed and all(families.values())
    return families


def _unescaped(found: re.Match[str]) -> str:
    return {"n": "\n", "\\": "\\", '"': '"'}[found[1]]


def test_metrics_are_in_the_format_with_the_labels_of_run_and_rank(tmp_path: Path) -> None:
    made = board(tmp_path, stop=10)
    made.history.add_evaluation(10, 1.7e9, 'a\n"b"', 3.0)
    made.set_silent([(5, "node7", 1.6e9, "a reduction")], 1.7e9)
    made.state.exposed = (3.7, 40.0, 7)
    made.write(0.0)
    families = parse((tmp_path / "run.prom").read_text())
    own = (("run", 'a "run"\\'), ("rank", "0"))
    values = {name.removeprefix("megatron_training_"): samples.get(own) for name, samples in families.items()}
    assert values["iteration"] == 10 and values["done_ratio"] == 0.5 and values["up"] == 1
    assert values["loss"] == pytest.approx(2.0 + 8.0 * math.exp(-0.1))
    assert values["iteration_seconds"] == 0.1 and values["flops_per_second_per_device"] == 5e14
    assert values["last_save_timestamp_seconds"] == 1.7e9 + 10
    assert values["silent_ranks"] == 1 and values["exposed_communication_seconds"] == 0.0037
    assert families["megatron_training_silent_rank_last_sign_timestamp_seconds"] == {
        (*own, ("silent_rank", "5"), ("host", "node7")): 1.6e9
    }
    assert families["megatron_training_memory_bytes"] == {(*own, ("kind", "max memory allocated")): 2.0**30}
    assert families["megatron_training_evaluation_loss"] == {
        (*own, ("set", "validation")): 2.5,
        (*own, ("set", 'a\n"b"')): 3.0,
    }
    assert "left_seconds" not in values, "what is not known has no sample"


def test_a_run_that_has_ended_is_not_up(tmp_path: Path) -> None:
    made = board(tmp_path, stop=1)
    made.end("failure", "RuntimeError: out of memory", 1.7e9)
    made.write(0.0)
    assert set(parse((tmp_path / "run.prom").read_text())["megatron_training_up"].values()) == {0.0}
    assert [path.name for path in tmp_path.glob(".*")] == [], "the file beside is gone"


def test_a_file_that_the_collector_would_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--prometheus-file must end with \.prom"):
        WatchConfig(prometheus_file="metrics.txt")
