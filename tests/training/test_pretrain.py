"""The command line end to end on gloo ranks: what must not change the losses does not change them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.training.tiny_run import SHARDED, Run, train


@pytest.fixture(scope="module")
def alone() -> Run:
    return train(1, "")


def _assert_same(run: Run, reference: Run, *, tolerance: float) -> None:
    assert run.error is None
    assert run.losses.keys() == reference.losses.keys() == {1, 2, 3, 4}
    for iteration, loss in reference.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=tolerance)
        assert run.grad_norms[iteration] == pytest.approx(reference.grad_norms[iteration], rel=10 * tolerance)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ""),
        (2, "--use-distributed-optimizer"),
        (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"),
        (2, f"{SHARDED} --init-model-with-meta-device --overlap-param-gather"),
        (4, f"{SHARDED} --no-gradient-accumulation-fusion"),
        (2, f"{SHARDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (2, f"{SHARDED} --calculate-per-token-loss"),
    ],
)
def test_ranks_and_sharding_do_not_change_the_losses(alone: Run, ranks: int, flags: str) -> None:
    """Dropout is on: it is a function of seed, iteration and microbatch. What is left is the order of fp32 sums."""
    assert alone.losses[4] < alone.losses[1]
    _assert_same(train(ranks, flags), alone, tolerance=1e-6)


def test_two_runs_are_equal_to_the_last_bit() -> None:
    first, second = train(2, SHARDED), train(2, SHARDED)
    assert first.losses == second.losses and first.grad_norms == second.grad_norms


def test_bf16_stays_near_fp32(alone: Run) -> None:
    run = train(2, f"{SHARDED} --bf16 --megatron-fsdp-grad-comm-dtype bf16 --use-distributed-optimizer")
    _assert_same(run, alone, tolerance=2e-2)  # bf16 has 8 bits of mantissa
    assert run.losses != alone.losses
    assert "compute dtype ............... bfloat16" in run.output
    assert "gradients on the wire ....... bfloat16" in run.output


def test_everything_that_can_be_logged_is_logged(tmp_path: Path) -> None:
    flags = (
        f"{SHARDED} --log-throughput --log-params-norm --log-num-zeros-in-grad --decoupled-lr 1e-3 --eval-iters 1 "
        f"--eval-interval 2 --tensorboard-dir {tmp_path} --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --manual-gc --manual-gc-interval 1 --optimizer sgd"
    )
    run = train(2, flags)
    assert run.error is None
    for name in ("throughput per GPU", "params norm", "num zeros", "decoupled learning rate", "memory resident"):
        assert run.output.count(f"{name}") >= 4
    assert run.output.count("effective configuration:") == 1
    assert run.output.count("validation loss at iteration") == 4  # twice in between, on validation and test at the end
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [round(event.value, 4) for event in events.Scalars("lm loss")] == [
        round(run.losses[iteration], 4) for iteration in range(1, 5)
    ]
    assert {"iteration-time", "memory resident (MiB)", "lm loss validation ppl"} <= set(events.Tags()["scalars"])


def test_a_loss_that_is_not_finite_ends_training_and_can_be_allowed() -> None:
    flags = f"{SHARDED} --lr 1e30 --optimizer sgd --clip-grad 0 --train-iters 6"
    run = train(2, flags)
    assert run.error is not None and "must be finite" in run.error
    allowed = train(2, f"{flags} --no-check-for-nan-in-loss-and-grad")
    assert allowed.error is None
    assert "number of nan iterations:   1" in allowed.output
    assert math.isnan(allowed.losses.get(6, math.nan))
