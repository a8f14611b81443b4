"""The command line end to end on gloo ranks: ranks, sharding and other such settings do not change the losses."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron.core.distributed.fsdp.overlap_report import read_report
from megatron.training.telemetry.trace_summary import read_trace
from tests.support.tiny_run import SHARDED, TINY, Run, train_all
from tests.training.telemetry.watch.test_prometheus import parse
from tests.training.telemetry.watch.test_run_watch import status_of

_BLOW_UP = f"{SHARDED} --lr 1e30 --optimizer sgd --clip-grad 0 --train-iters 6"
_EQUAL_ON_TWO_RANKS = {
    "plain": "",
    "sharded optimizer": "--use-distributed-optimizer",
    "sharded gradients": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce",
    "meta device": f"{SHARDED} --init-model-with-meta-device --overlap-param-gather",
    "recomputation": f"{SHARDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "per token": f"{SHARDED} --calculate-per-token-loss",
}
_OTHERS = {
    "first": SHARDED,
    "second": SHARDED,
    "as the tuner may choose": (
        f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --fsdp-transport peer_copy --create-all-gather-group "
        "--fsdp-forward-prefetch-depth 3 --fsdp-backward-prefetch-depth 2 --suggested-communication-unit-size 25856 "
        "--fsdp-memory-budget 100000"
    ),
    "bf16": f"{SHARDED} --bf16 --megatron-fsdp-grad-comm-dtype bf16 --use-distributed-optimizer",
    "everything logged": (
        f"{SHARDED} --log-throughput --log-params-norm --log-num-zeros-in-grad --decoupled-lr 1e-3 --eval-iters 1 "
        "--eval-interval 2 --tensorboard-dir FOLDER --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--timing-log-level 2 --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --manual-gc --manual-gc-interval 1 --optimizer sgd "
        "--time-left-interval 1e-6 --status-page FOLDER/watch/status.html --prometheus-file FOLDER/watch/run.prom"
    ),
    "profiled": (
        f"{SHARDED} --profile --profile-step-start 1 --profile-step-end 3 --use-pytorch-profiler --profile-ranks 1 "
        "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-chakra --record-memory-history "
        "--tensorboard-dir FOLDER/of_profile"
    ),
    "profiled too late": (
        f"{SHARDED} --profile --profile-step-start 8 --profile-step-end 9 --use-pytorch-profiler --profile-ranks 0 "
        "--tensorboard-dir FOLDER/of_late"
    ),
    "reported": f"{SHARDED} --overlap-report FOLDER/overlap --overlap-report-step 3 --status-page FOLDER/reported.html",
    "reported too late": f"{SHARDED} --overlap-report FOLDER/late --overlap-report-step 9",
    "not finite": _BLOW_UP,
    "not finite and allowed": f"{_BLOW_UP} --no-check-for-nan-in-loss-and-grad",
    "no folder of logs": "--tensorboard-dir /proc/none",
    "a share of no memory": f"{SHARDED} --fsdp-memory-budget 0.01",
    "no folder of the report": f"{SHARDED} --overlap-report /proc/none --overlap-report-step 3",
    "missing tokenizer": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere/at-all",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensorboard")


@pytest.fixture(scope="module")
def alone() -> Run:
    return train_all(1, {"alone": ""})["alone"]


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, Run]:
    flags = _EQUAL_ON_TWO_RANKS | _OTHERS
    lines = {name: f"{TINY} {added.replace('FOLDER', str(folder))}" for name, added in flags.items()}
    lines["unknown tokens"] = TINY.replace("--mock-data", "--data-path /nowhere/at-all --fim-data")
    return train_all(2, lines, base="")


def _assert_same(run: Run, reference: Run, *, tolerance: float) -> None:
    assert run.error is None
    assert run.losses.keys() == reference.losses.keys() == {1, 2, 3, 4}
    for iteration, loss in reference.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=tolerance)
        assert run.grad_norms[iteration] == pytest.approx(reference.grad_norms[iteration], rel=10 * tolerance)


@pytest.mark.parametrize("name", _EQUAL_ON_TWO_RANKS)
def test_ranks_and_sharding_do_not_change_the_losses(alone: Run, on_two: dict[str, Run], name: str) -> None:
    """Dropout is on: it is a function of seed, iteration and microbatch. What is left is the order of fp32 sums."""
    assert alone.losses[4] < alone.losses[1]
    _assert_same(on_two[name], alone, tolerance=1e-6)


def test_four_ranks_train_alike(alone: Run) -> None:
    run = train_all(4, {"four": f"{SHARDED} --no-gradient-accumulation-fusion"})["four"]
    _assert_same(run, alone, tolerance=1e-6)


def test_two_runs_are_equal_to_the_last_bit(on_two: dict[str, Run]) -> None:
    first, second = on_two["first"], on_two["second"]
    assert first.losses == second.losses and first.grad_norms == second.grad_norms


def test_what_the_tuner_chooses_unasked_changes_no_bit(on_two: dict[str, Run]) -> None:
    """On gloo transports, too, add in rank order; a graph has tests of its own, on GPUs."""
    run, plain = on_two["as the tuner may choose"], on_two["first"]
    assert run.losses == plain.losses and run.grad_norms == plain.grad_norms and len(run.losses) == 4


def test_bf16_stays_near_fp32(alone: Run, on_two: dict[str, Run]) -> None:
    run = on_two["bf16"]
    _assert_same(run, alone, tolerance=2e-2)  # bf16 has 8 bits of mantissa
    assert run.losses != alone.losses
    assert "compute dtype ............... bfloat16" in run.output
    assert "gradients on the wire ....... bfloat16" in run.output


def test_everything_that_can_be_logged_is_logged(on_two: dict[str, Run], folder: Path) -> None:
    run = on_two["everything logged"]
    assert run.error is None
    for name in ("throughput per GPU", "params norm", "num zeros", "decoupled learning rate", "memory resident"):
        assert run.output.count(f"{name}") >= 4
    assert run.output.count("effective configuration:") == 1
    progress = re.findall(r"^ (\d\d) % done, \d+ s left \(ends \d{4}-\d\d-\d\d \d\d:\d\d UTC", run.output, re.M)
    assert progress == ["25", "50", "75"], "the line after the last iteration has nothing to say"
    assert run.output.count("validation loss at iteration") == 4  # twice in between, on validation and test at the end
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(list(run.losses.values()), rel=1e-6)
    assert set(events.Tags()["scalars"]) == {
        "learning-rate", "learning-rate vs samples", "batch-size", "batch-size vs samples", "lm loss", "lm loss vs samples",
        "loss-scale", "loss-scale vs samples", "world-size", "world-size vs samples", "grad-norm", "grad-norm vs samples",
        "num-zeros", "num-zeros vs samples", "params-norm", "params-norm vs samples", "iteration-time", "throughput",
        "forward-backward-time", "optimizer-time", "batch-generator-time", "forward-compute-time", "backward-compute-time",
        "lm loss validation", "lm loss validation vs samples", "lm loss validation ppl", "lm loss validation ppl vs samples",
        # Ours.
        "decoupled-learning-rate", "decoupled-learning-rate vs samples", "tokens-per-second-per-device",
        "memory resident (MiB)", "lm loss test", "lm loss test vs samples", "lm loss test ppl", "lm loss test ppl vs samples",
    }  # fmt: skip
    times = re.findall(r"^    (\S+) \.+: \((\d+\.\d\d), (\d+\.\d\d)\)$", run.output, re.M)
    assert [name for name, *_ in times].count("forward-compute") == 4 and all(
        float(low) <= float(high) for _, low, high in times
    )
    assert [name for name, *_ in times].count("evaluate") == 3
    by_samples = [(event.step, event.value) for event in events.Scalars("lm loss vs samples")]
    assert [step for step, _ in by_samples] == [8, 16, 24, 32]
    assert [value for _, value in by_samples] == [event.value for event in events.Scalars("lm loss")]


def test_a_run_keeps_its_status_page_and_its_metrics(on_two: dict[str, Run], folder: Path) -> None:
    """The log's values, not printed ones."""
    assert sorted(path.name for path in (folder / "watch").iterdir()) == [
        "run.prom",
        "status.history.jsonl",
        "status.html",
    ]
    status = status_of(folder / "watch/status.html")
    assert status["points"]["iteration"] == [1, 2, 3, 4]
    assert status["points"]["loss"] == pytest.approx(list(on_two["everything logged"].losses.values()), rel=1e-5)
    assert status["state"]["text"] == "training ended: all iterations are done"
    assert status["state"]["engine_memory"]["main weights"] > 0
    assert [name for _, _, name, _ in status["evaluations"]] == ["validation"] * 3 + ["test"]
    texts = dict(status["about"]["texts"])
    assert "effective configuration:" in texts["Configuration in effect"] and texts["Devices"].startswith("2 ranks")
    metrics = parse((folder / "watch/run.prom").read_text())
    (loss,) = metrics["megatron_training_loss"].values()
    assert loss == pytest.approx(on_two["everything logged"].losses[4])


def test_a_profile_is_a_trace_and_a_summary_of_the_ranks_that_are_asked(on_two: dict[str, Run], folder: Path) -> None:
    """Where Megatron-LM writes it: beside the folder of TensorBoard. The steps train as without a profiler."""
    run = on_two["profiled"]
    assert run.error is None and run.losses == on_two["first"].losses
    assert sorted(file.name for file in (folder / "torch_profile").iterdir()) == ["rank-1.json.gz", "rank-1.txt"]
    events = read_trace(folder / "torch_profile/rank-1.json.gz")
    steps = [event for event in events if event["name"].startswith("ProfilerStep#") and event["ph"] == "X"]
    assert len(steps) == 2
    optimizer_steps = [event for event in events if event["name"].startswith("Optimizer.step")]
    assert len(optimizer_steps) == 2
    assert any("Input Dims" in event.get("args", {}) for event in events)
    summary = (folder / "torch_profile/rank-1.txt").read_text()
    assert summary.startswith("Sums over 2 steps; a step is ")
    assert "Operators by self time on the host (ms, calls, name):" in summary and " aten::" in summary
    assert summary.count("Python outside of operators") == 1 and "ProfilerStep" not in summary
    assert (folder / "chakra/rank-1.json.gz").stat().st_size > 0


def test_an_overlap_report_is_a_page_a_picture_and_numbers(on_two: dict[str, Run], folder: Path) -> None:
    """Every unit is in it both ways, each moment of the step is one of four, and the step trains as without."""
    run = on_two["reported"]
    assert run.error is None and run.losses == on_two["first"].losses
    assert f" the overlap report of iteration 3 is in {folder}/overlap/overlap.html" in run.output
    assert (folder / "overlap/overlap.png").read_bytes().startswith(b"\x89PNG")
    report = read_report(folder / "overlap")
    status = status_of(folder / "reported.html")
    assert status["state"]["links"] == [["Overlap report of iteration 3", "overlap/overlap.html"]]
    assert [3, f"overlap report: {report['headline']}"] in [[step, text] for step, _, _, text in status["events"]]
    assert (report["iteration"], report["num_ranks"], len(report["ranks"])) == (3, 2, 2)
    rows = {row["name"]: row for row in report["rows"]}
    units = ("root", "decoder.layers.0", "decoder.layers.1")
    for unit in units:
        forward, backward = rows[f"{unit} forward"], rows[f"{unit} backward"]
        assert forward["compute"] > 0 and backward["compute"] > 0
        assert forward["gather"] > 0 and forward["gather_nbytes"] > 0 == forward["reduce_nbytes"]
        assert backward["reduce"] > 0 and backward["reduce_nbytes"] > 0
    for unit in units[1:]:
        assert rows[f"{unit} backward"]["gather_nbytes"] == rows[f"{unit} forward"]["gather_nbytes"]
    assert rows["root backward"]["gather_nbytes"] == 0, "it stays gathered from forward to backward"
    totals = report["totals"]
    for name, of_rows in (("exposed", "exposed"), ("host", "host"), ("wait", "wait")):
        assert totals[name] == pytest.approx(sum(row[of_rows] for row in report["rows"]), abs=0.01)
    assert totals["compute"] + totals["exposed"] + totals["host"] + totals["latency"] == pytest.approx(
        report["step_ms"], abs=0.01
    )
    memory = report["memory"]
    assert all(max(memory["series"][kind]) > 0 for kind in memory["series"]), "each kind is there at some time"
    assert max(map(sum, zip(*memory["series"].values(), strict=True))) == sum(memory["peak"].values())
    directions = [direction for _, direction in memory["phases"]]
    assert directions == ["forward", "backward"] * 2 + ["update"], "two microbatches"


def test_an_iteration_that_training_does_not_reach_is_not_reported_and_that_is_told(
    on_two: dict[str, Run], folder: Path
) -> None:
    text = "there is no overlap report: training ended before iteration 9; give an earlier one by --overlap-report-step"
    assert text in on_two["reported too late"].output and not (folder / "late").exists()


def test_a_profile_that_training_does_not_reach_is_told(on_two: dict[str, Run]) -> None:
    text = (
        "nothing is profiled, since training has no iteration after --profile-step-start 8 up to --profile-step-end 9"
    )
    assert on_two["profiled too late"].output.count(f" rank 0: {text}") == 1


def test_a_loss_that_is_not_finite_ends_training_and_can_be_allowed(on_two: dict[str, Run]) -> None:
    error, allowed = on_two["not finite"].error, on_two["not finite and allowed"]
    assert error is not None and "must be finite" in error
    assert allowed.error is None
    assert "number of nan iterations:   1" in allowed.output
    assert math.isnan(allowed.losses.get(6, math.nan))


def test_a_folder_of_logs_that_cannot_be_written_is_named(on_two: dict[str, Run]) -> None:
    error = on_two["no folder of logs"].error
    assert error is not None and "--tensorboard-dir /proc/none must be a folder that rank 0 can write to" in error
    assert on_two["no folder of logs"].losses == {}
    error = on_two["a share of no memory"].error
    assert error is not None and "--fsdp-memory-budget must be bytes where there is no device with memory" in error
    error = on_two["no folder of the report"].error
    assert error is not None and "--overlap-report /proc/none must be a folder that rank 0 can write to" in error
    assert on_two["no folder of the report"].losses == {}


def test_a_missing_file_is_named(on_two: dict[str, Run]) -> None:
    """After what was asked for is printed, so that it can be looked at."""
    error = on_two["missing tokenizer"].error
    assert error is not None and "/nowhere/at-all" in error
    assert "tokenizer_type=HuggingFaceTokenizer" in on_two["missing tokenizer"].output


def test_tokens_that_the_tokenizer_lacks_are_named_by_their_flag(on_two: dict[str, Run]) -> None:
    error = on_two["unknown tokens"].error or ""
    assert error.startswith("StartRefusedError: fill-in-the-middle samples need a token for prefix, got "), error
    assert "fim_extra_tokens (--fim-prefix-token), or add it with --tokenizer-special-tokens, which GPT2BPE" in error


def test_settings_and_sizes_are_printed_before_data_are_read(on_two: dict[str, Run]) -> None:
    lines = (
        "settings that differ from their defaults:",
        " > datasets target sizes",
        "    train:      32\n",
        "effective configuration:",
    )
    places = [on_two["plain"].output.index(line) for line in lines]
    assert places == sorted(places)
    assert "megatron_lm:" not in on_two["plain"].output, "all of its settings are no line to read"
