"""Settings of the run's course: batch sizes that grow, evaluations, which checkpoints stay, what is compared and noted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import contexts_of, fully_shard
from megatron.training.loop.replica_check import check_replicas
from megatron.training.run_folder import TRACKER
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_all

_ITERATIONS = "--train-iters 4"
_BASE = TINY.replace(_ITERATIONS, "")
_CONSTANT = "--lr-decay-style constant"
# 16 tokens a sample: batches of 8 for 16 samples, then of 16
_STEPS = "--step-batch-size-schedule 0:8,256:16 --global-batch-size 16"
_RETAINED = "--save-interval 1 --save-retain-interval 3 --log-progress --train-iters 5"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course")
    killed = (
        folder / "retained" / ".iter_0000001.deleted-0123456789ab"
    )  # as the deletion of a run that was killed leaves it
    killed.mkdir(parents=True)
    (killed / "__0_0.distcp").touch()
    (killed / ".saved-by-megatron-fsdp").write_text("0123456789ab")
    return folder


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    """Run all cases by name; each finds the checkpoints of those above it."""
    schedule = f"{SHARDED} {_CONSTANT} {_STEPS}"
    flags = {
        "scheduled": f"{schedule} --log-throughput",
        "in iterations of 8": f"{SHARDED} {_CONSTANT} --train-samples 16 --save {root}/eight",
        "then of 16": f"{SHARDED} {_CONSTANT} --train-samples 48 --global-batch-size 16 --load {root}/eight "
        "--override-opt-param-scheduler",
        "halfway": f"{schedule} --exit-interval 3 --save {root}/three",
        "resumed": f"{schedule} --load {root}/three",
        "ramp": f"{_CONSTANT} --rampup-batch-size 4 4 24 --global-batch-size 12 --train-samples 60",
        "experts": f"{SHARDED} {_STEPS} --num-experts 2 --moe-aux-loss-coeff 0.1 --disable-bias-linear "
        "--moe-router-load-balancing-type global_aux_loss",
        "does not fit": f"{SHARDED} --step-batch-size-schedule 0:6,256:16 --global-batch-size 16",
        "retained": f"{SHARDED} {_RETAINED} --save {root}/retained",
        "retained in the background": f"{SHARDED} {_RETAINED} --async-save --save {root}/async",
        "evaluated": f"{SHARDED} --eval-interval 1 --start-eval-at-iter 3 --eval-iters 2 --eval-global-batch-size 4",
        "not compared": f"{SHARDED} --bf16",
        "compared": f"{SHARDED} --bf16 --check-weight-hash-across-dp-replicas-interval 2",
        "compared with sharded state": "--use-distributed-optimizer --bf16 "
        "--check-weight-hash-across-dp-replicas-interval 2",
        "compared without shards": "--check-weight-hash-across-dp-replicas-interval 4",
    }
    flags = {name: line if "--train-" in line else f"{line} {_ITERATIONS}" for name, line in flags.items()}
    return train_all(2, flags, base=_BASE)


def _batch_sizes(run: Run) -> list[int]:
    return [int(size) for size in re.findall(r"global batch size: +(\d+)", run.output)]


def test_batches_grow_at_the_scheduled_sample(runs: dict[str, Run]) -> None:
    """Losses are those of two runs with constant sizes, the second of which continues the first."""
    run = runs["scheduled"]
    assert run.error is None and _batch_sizes(run) == [8, 8, 16, 16]
    apart = runs["in iterations of 8"].losses | runs["then of 16"].losses
    assert run.losses == apart and len(apart) == 4
    assert "the global batch size is 16 from iteration 3 on, after 16 samples" in run.output
    assert re.findall(r"consumed samples: +(\d+)", run.output) == ["8", "16", "32", "48"]


def test_a_schedule_goes_on_after_a_restart(runs: dict[str, Run]) -> None:
    assert {**runs["halfway"].losses, **runs["resumed"].losses} == runs["scheduled"].losses
    assert list(runs["resumed"].losses) == [4] and _batch_sizes(runs["resumed"]) == [16]


def test_a_ramp_grows_by_increments_and_ends_with_the_samples(runs: dict[str, Run]) -> None:
    run = runs["ramp"]
    assert run.error is None and _batch_sizes(run) == [4, 4, 4, 8, 8, 12, 12]
    assert "52 of --train-samples 60 are consumed" in run.output


def test_auxiliary_losses_are_means_over_the_microbatches_that_there_are(runs: dict[str, Run]) -> None:
    run = runs["experts"]
    assert run.error is None and _batch_sizes(run) == [8, 8, 16, 16]
    assert all(0.9 < losses["global_load_balancing_loss"] < 1.5 for losses in run.auxiliary.values())


def test_a_size_that_does_not_fit_is_refused(runs: dict[str, Run]) -> None:
    assert "a scheduled batch size must be a multiple of --micro-batch-size" in str(runs["does not fit"].error)


@pytest.mark.parametrize(("run", "folder"), [("retained", "retained"), ("retained in the background", "async")])
def test_only_retained_checkpoints_and_the_last_stay(runs: dict[str, Run], root: Path, run: str, folder: str) -> None:
    assert runs[run].error is None
    assert sorted(path.name for path in (root / folder).glob("*iter_*")) == ["iter_0000003", "iter_0000005"]
    assert (root / folder / TRACKER).read_text() == "5"
    lines = [line.split("\t") for line in (root / folder / "progress.txt").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line[0]) and line[2] == "# GPUs: 2" for line in lines)
    events = [tuple(line[3:5]) for line in lines]
    began = "Saved checkpoint" if run == "retained" else "Saving async checkpoint"
    assert events[0] == ("Starting job",)
    assert [event for event in events if event[0] == began] == [(began, f"Iteration: {i}") for i in range(1, 6)]
    assert [event[1] for event in events if event[0] == "Deleted checkpoint"] == [f"Iteration: {i}" for i in (1, 2, 4)]
    assert (("Saved async checkpoint", "Iteration: 5") in events) == (run != "retained")
    assert all(re.search(r"Job throughput: [\d.]+ TFLOP/s/GPU", line[5]) for line in lines if line[3] == began)


def test_evaluations_have_their_own_size_and_start(runs: dict[str, Run]) -> None:
    output = runs["evaluated"].output
    assert runs["evaluated"].error is None
    assert re.findall(r"validation loss at iteration (\d)(?! on)", output) == ["3", "4"]


def test_replicas_are_compared_and_training_goes_on(runs: dict[str, Run]) -> None:
    for name, expected in {
        "compared": ["2", "4"],
        "compared with sharded state": ["2", "4"],
        "compared without shards": ["4"],
    }.items():
        assert runs[name].error is None
        assert re.findall(r"weights of replicas are the same after iteration (\d)", runs[name].output) == expected
    assert runs["compared"].losses == runs["not compared"].losses


def _difference() -> list[str]:
    """Return what is said before and after a weight of rank 1 alone has changed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(model[1], placements="no_shard")
    fully_shard(model, placements="no_shard")
    check_replicas(model)
    if dist.get_rank() == 1:
        (context,) = contexts_of(model)
        context.units[0].own_groups[0].weights.main.local.add_(1)
    try:
        check_replicas(model)
    except RuntimeError as error:
        return [str(error)]
    return []


def test_a_replica_that_differs_is_named_on_all_ranks() -> None:
    first, second = run_ranks(2, _difference)
    assert first == second and len(first) == 1
    assert "different ones in 1 groups: " in first[0] and "weight" in first[0].split("groups: ")[1]
