"""Metrics of a run in the text format of Prometheus, for the textfile collector of its node exporter.

Source: the "text-based format" of Prometheus's documentation, and node_exporter's: files end with ``.prom``, have no
time stamps, and are replaced in one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.core.regular_file import open_regular
from megatron.training.telemetry.watch.history import History
from megatron.training.telemetry.watch.run_state import About, State

_PREFIX = "megatron_training_"
_MOST_SILENT = 64  # that are named: labels of many ranks would fill the database
Sample = tuple[Mapping[str, str], float | None]
"""Labels beside those of all, and a value; None: there is none."""


def prometheus_text(about: About, state: State, history: History, *, now: float) -> str:
    """Format the metrics; each has the labels ``run`` and ``rank``.

    Args:
        now: when they are written, in seconds since 1970.
    """
    common = {"run": about.run, "rank": str(about.rank)}
    families = [_family(name, kind, words, samples, common) for name, kind, words, samples in _metrics(state, history)]
    families.append(
        _family("last_update_timestamp_seconds", "gauge", "When these metrics were written.", [({}, now)], common)
    )
    return "".join(families)


def is_prometheus_file(path: Path) -> bool:
    """Return whether a file holds metrics of a run, or the beginning of such.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be read.
    """
    head = f"# HELP {_PREFIX}".encode()
    with open_regular(path) as file:
        return head.startswith(file.read(len(head)))


def _metrics(state: State, history: History) -> Iterable[tuple[str, str, str, list[Sample]]]:
    """Return name, type, meaning and samples."""
    latest = dict(state.latest)
    milliseconds = latest.get("ms per iteration")
    yield (
        "up",
        "gauge",
        "1 while the run trains, evaluates or saves, 0 after its end.",
        _one(float(state.what not in ("end", "failure"))),
    )
    yield "iteration", "gauge", "Completed iterations.", _one(state.iteration)
    yield "last_iteration", "gauge", "Iterations of the whole training.", _one(state.last_iteration)
    yield "samples", "gauge", "Consumed samples.", _one(state.consumed_samples)
    yield "tokens", "gauge", "Consumed tokens.", _one(state.consumed_tokens)
    yield "done_ratio", "gauge", "Part of the training that is done.", _one(state.fraction_done)
    yield (
        "left_seconds",
        "gauge",
        "Estimate of the time that training still takes, 0 after the end of the run.",
        _one(state.seconds_left),
    )
    yield "loss", "gauge", "Mean loss of the iterations of the last log line.", _one(latest.get("loss"))
    yield "evaluation_loss", "gauge", "Last loss on a held-out set.", _evaluations(history)
    yield "gradient_norm", "gauge", "Norm of the gradient.", _one(latest.get("grad norm"))
    yield "parameter_norm", "gauge", "Norm of all weights.", _one(latest.get("params norm"))
    yield "learning_rate", "gauge", "Learning rate.", _one(latest.get("learning rate"))
    yield "loss_scale", "gauge", "Loss scale.", _one(latest.get("loss scale"))
    yield "iteration_seconds", "gauge", "Mean time of an iteration.", _one(milliseconds and milliseconds / 1000.0)
    yield "tokens_per_second_per_device", "gauge", "Throughput of a device.", _one(latest.get("tokens/s/GPU"))
    flops = latest.get("TFLOP/s/GPU")
    yield "flops_per_second_per_device", "gauge", "Model FLOP/s of a device.", _one(flops and 1e12 * flops)
    yield "memory_bytes", "gauge", "Memory of this rank.", _memory(latest)
    yield (
        "skipped_iterations",
        "gauge",
        "Iterations without an update since the first start.",
        _one(history.total("skipped iterations")),
    )
    yield (
        "nonfinite_iterations",
        "gauge",
        "Iterations with a loss that is not finite since the first start.",
        _one(history.total("nan iterations")),
    )
    if state.exposed is not None:
        exposed, whole, _ = state.exposed
        yield (
            "exposed_communication_seconds",
            "gauge",
            "What the last watched step waits for communication.",
            _one(exposed / 1e3),
        )
        yield "watched_step_seconds", "gauge", "Time of that step.", _one(whole / 1e3)
    yield "silent_ranks", "gauge", "Ranks that give no sign of life.", _one(len(state.silent))
    last_signs: list[Sample] = [
        ({"silent_rank": str(rank), "host": host}, told) for rank, host, told, _ in state.silent[:_MOST_SILENT]
    ]
    yield "silent_rank_last_sign_timestamp_seconds", "gauge", "When a silent rank last gave one.", last_signs
    starts = [event for event in history.events if event["what"] == "start"]
    yield "starts", "gauge", "Starts of the run that are known.", _one(len(starts))
    saves = [event for event in history.events if event["what"] == "save"]
    yield (
        "last_save_timestamp_seconds",
        "gauge",
        "When the last checkpoint was complete.",
        _one(saves[-1]["time"] if saves else None),
    )


def _one(value: float | None) -> list[Sample]:
    return [({}, value)]


def _evaluations(history: History) -> list[Sample]:
    last = {one["name"]: one["loss"] for one in history.evaluations}
    return [({"set": name}, loss) for name, loss in last.items()]


def _memory(latest: Mapping[str, float | None]) -> list[Sample]:
    unit = " (MiB)"
    return [
        ({"kind": name.removesuffix(unit)}, None if value is None else value * 2**20)
        for name, value in latest.items()
        if name.endswith(unit)
    ]


def _family(name: str, kind: str, words: str, samples: Iterable[Sample], common: Mapping[str, str]) -> str:
    """Format a metric with its lines of meaning and type; nothing where it has no value."""
    lines = [
        f"{_PREFIX}{name}{_labels({**common, **labels})} {_number(value)}\n"
        for labels, value in samples
        if value is not None
    ]
    if not lines:
        return ""
    head = f"# HELP {_PREFIX}{name} {words}\n# TYPE {_PREFIX}{name} {kind}\n"
    return head + "".join(lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
