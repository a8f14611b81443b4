"""A resumed run goes on as if it had never stopped, on other ranks and strategies too; what cannot be loaded is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.checkpointing import TRACKER
from tests.training.tiny_run import SHARDED, Run, train

_EVALUATED = "--eval-iters 1 --eval-interval 1 --lr-decay-style cosine --lr-warmup-iters 1"


@pytest.fixture(scope="module")
def whole() -> Run:
    """Four iterations without a stop."""
    return train(2, f"{SHARDED} {_EVALUATED}")


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of the same run after two iterations."""
    folder = tmp_path_factory.mktemp("halfway")
    run = train(2, f"{SHARDED} {_EVALUATED} --exit-interval 2 --save {folder}")
    assert run.error is None and "--exit-interval 2 divides iteration 2" in run.output
    assert (folder / TRACKER).read_text() == "2"
    assert sorted(entry.name for entry in folder.iterdir()) == ["iter_0000002", TRACKER]
    return folder


def _validation_losses(run: Run) -> list[str]:
    return [line for line in run.output.splitlines() if "validation loss at" in line]


def test_the_same_run_goes_on_to_the_last_bit(whole: Run, halfway: Path) -> None:
    resumed = train(2, f"{SHARDED} {_EVALUATED} --load {halfway}")
    assert resumed.error is None
    assert "training continues after iteration 2" in resumed.output
    assert resumed.losses == {3: whole.losses[3], 4: whole.losses[4]}
    assert resumed.grad_norms == {3: whole.grad_norms[3], 4: whole.grad_norms[4]}
    assert _validation_losses(resumed) == _validation_losses(whole)[2:]
    learning_rates = [line.split("learning rate: ")[1][:12] for line in whole.output.splitlines() if "lm loss:" in line]
    assert learning_rates[2] in resumed.output


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ""),
        (4, SHARDED),
        (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"),
    ],
)
def test_other_ranks_and_strategies_go_on_alike(whole: Run, halfway: Path, ranks: int, flags: str) -> None:
    """What is left is the order of fp32 sums."""
    resumed = train(ranks, f"{flags} {_EVALUATED} --load {halfway}")
    assert resumed.error is None
    assert resumed.losses == {i: pytest.approx(whole.losses[i], rel=1e-6) for i in (3, 4)}


def test_parts_can_be_left_out(whole: Run, halfway: Path) -> None:
    tuned = train(2, f"{SHARDED} {_EVALUATED} --load {halfway} --finetune --train-iters 1")
    assert tuned.error is None and "training starts at iteration 0" in tuned.output
    assert tuned.losses[1] < whole.losses[1]  # the weights are trained, the data are those of iteration 1
    fresh = train(2, f"{SHARDED} {_EVALUATED} --load {halfway} --no-load-optim --no-load-rng")
    assert fresh.losses[3] == whole.losses[3]  # the loss of the loaded weights
    assert fresh.losses[4] != whole.losses[4]  # the moments start at zero
    other_seed = train(2, f"{SHARDED} {_EVALUATED} --load {halfway} --no-load-rng --seed 4")
    assert other_seed.losses[3] != whole.losses[3]


def test_a_folder_without_checkpoint_is_a_start_from_scratch_or_an_error(whole: Run, tmp_path: Path) -> None:
    fresh = train(2, f"{SHARDED} {_EVALUATED} --train-iters 1 --lr-decay-iters 4 --load {tmp_path}")
    assert fresh.losses == {1: whole.losses[1]}
    assert "training starts from scratch" in fresh.output
    error = train(1, f"--load {tmp_path} --exit-on-missing-checkpoint").error
    assert error is not None and "must have a checkpoint" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--norm-epsilon 1e-6", "layernorm_epsilon: now 1e-06, saved 1e-05"),
        ("--hidden-size 64", "hidden_size: now 64, saved 32"),
        ("--lr 1e-3", "max_lr: now 0.001, saved 0.01"),
        ("--ckpt-step 7", "iter_0000007"),
    ],
)
def test_what_does_not_fit_is_named(halfway: Path, flags: str, message: str) -> None:
    error = train(2, f"{SHARDED} {_EVALUATED} --load {halfway} {flags}").error
    assert error is not None and message in error


def test_a_damaged_tracker_is_named(halfway: Path, tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release")
    error = train(1, f"--load {tmp_path}").error
    assert error is not None and "must hold the number of an iteration, got 'release'" in error


def test_an_asynchronous_save_holds_the_state_at_its_iteration(whole: Run, tmp_path: Path) -> None:
    """Training goes on while it is written: what is written must be a copy."""
    saved = train(2, f"{SHARDED} {_EVALUATED} --async-save --save-interval 2 --save {tmp_path}")
    assert saved.error is None and saved.losses == whole.losses
    assert (tmp_path / TRACKER).read_text() == "4"
    resumed = train(2, f"{SHARDED} {_EVALUATED} --load {tmp_path} --ckpt-step 2")
    assert resumed.losses == {3: whole.losses[3], 4: whole.losses[4]}


def test_state_can_be_left_out_of_a_checkpoint(whole: Run, tmp_path: Path) -> None:
    run = train(2, f"{SHARDED} {_EVALUATED} --exit-interval 2 --no-save-optim --no-save-rng --save {tmp_path}")
    assert run.error is None
    missing = train(2, f"{SHARDED} {_EVALUATED} --load {tmp_path} --no-load-optim").error
    assert missing is not None and "load it with --no-load-rng" in missing
    resumed = train(2, f"{SHARDED} {_EVALUATED} --load {tmp_path} --no-load-optim --no-load-rng")
    assert resumed.losses[3] == whole.losses[3]
