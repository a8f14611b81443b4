"""A resumed run continues as if it had never stopped, on other ranks and strategies too; a mismatch is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.run_folder import TRACKER
from tests.support.rank_processes import write_corpus
from tests.support.tiny_run import SHARDED, TINY, Run, train_all

_SCHEDULE = "--lr-decay-style cosine --lr-warmup-iters 1 --lr-decay-iters 4"
_ITERATIONS = "--train-iters 4"
_BASE = TINY.replace(_ITERATIONS, "")
_RUN = f"{SHARDED} {_ITERATIONS} {_SCHEDULE} --eval-iters 1 --eval-interval 1"
_MISFITS = {
    "--norm-epsilon 1e-6": "layernorm_epsilon: now 1e-06, saved 1e-05",
    "--hidden-size 64": "hidden_size: now 64, saved 32",
    "--lr 1e-3": "max_lr: now 0.001, saved 0.01",
    "--ckpt-step 7": "iter_0000007",
    "--seed 4": "seed: now 4, saved 1234: it orders the samples",
}

_HALVES = "--bf16 --use-precision-aware-optimizer"
_SMALL = f"{_HALVES} --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
_ONE_BF16_WEIGHT = 1e-3
"""How far a loss or norm of these runs moves when one weight is the other of two bf16 numbers (2e-4 seen)."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "damaged").mkdir()
    (folder / "damaged" / TRACKER).write_text("release")
    return folder


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    """Run all cases by name; each finds the checkpoints of those above it."""
    load = f"{_RUN} --load {root}/halfway"
    samples = f"{SHARDED} --override-opt-param-scheduler --load {root}/samples"
    flags = {
        "whole": _RUN,
        "halfway": f"{_RUN} --exit-interval 2 --save {root}/halfway",
        "resumed": load,
        "other strategy": load.replace("optim_grads_params", "optim_grads"),
        "finetuned": f"{load} --finetune --train-iters 1",
        "fresh moments": f"{load} --no-load-optim --no-load-rng",
        "other seed": f"{load} --no-load-rng --seed 4",
        "shorter samples": f"{load} --seq-length 8",
        "corpus": f"{_RUN} {_corpus(root / 'first')} --exit-interval 2 --save {root}/corpus",
        "same corpus": f"{_RUN} {_corpus(root / 'first')} --load {root}/corpus",
        "other corpus": f"{_RUN} {_corpus(root / 'second', bad_token=5)} --load {root}/corpus",
        "other split": f"{_RUN} {_corpus(root / 'first')} --split 3,1,0 --load {root}/corpus",
        "other betas": f"{load} --adam-beta2 0.5",
        "from scratch": f"{_RUN} --train-iters 1 --load {root}/empty",
        "must exist": f"{_RUN} --load {root}/empty --exit-on-missing-checkpoint",
        "damaged": f"{_RUN} --load {root}/damaged",
        **{misfit: f"{load} {misfit}" for misfit in _MISFITS},
        "asynchronous": f"{_RUN} --async-save --save-interval 2 --save {root}/asynchronous",
        "from asynchronous": f"{_RUN} --load {root}/asynchronous --ckpt-step 2",
        "bf16": f"{_RUN} --bf16",
        "two halves": f"{_RUN} {_HALVES}",
        "two halves halfway": f"{_RUN} {_HALVES} --exit-interval 2 --save {root}/halves",
        "two halves resumed": f"{_RUN} {_HALVES} --load {root}/halves",
        "small moments": f"{_RUN} {_SMALL}",
        "small moments halfway": f"{_RUN} {_SMALL} --exit-interval 2 --save {root}/small",
        "small moments resumed": f"{_RUN} {_SMALL} --load {root}/small",
        "small moments made fp32": f"{_RUN} {_HALVES} --load {root}/small",
        "made whole": f"{_RUN} --bf16 --load {root}/halves",
        "bf16 halfway": f"{_RUN} --bf16 --exit-interval 2 --save {root}/bf16",
        "made two halves": f"{_RUN} {_HALVES} --load {root}/bf16",
        "slim": f"{_RUN} --exit-interval 2 --no-save-optim --no-save-rng --save {root}/slim",
        "slim without flags": f"{_RUN} --load {root}/slim",
        "slim without optimizer": f"{_RUN} --load {root}/slim --no-load-optim",
        "slim without random numbers": f"{_RUN} --load {root}/slim --no-load-rng",
        "slim with flags": f"{_RUN} --load {root}/slim --no-load-optim --no-load-rng",
        "40 samples": f"{SHARDED} --train-samples 43 --save {root}/samples",
        "80 samples in smaller batches": f"{samples} --train-samples 80 --global-batch-size 4",
        "152 samples in larger batches": f"{samples} --train-samples 160 --global-batch-size 16",
        "40 samples and no whole batch": f"{samples} --train-samples 52 --global-batch-size 16",
        "no batch at all": f"{SHARDED} --train-samples 7",
    }
    return train_all(2, flags, base=_BASE)


def _corpus(prefix: Path, *, bad_token: int | None = None) -> str:
    return f"--mock-data false --eval-iters 0 {write_corpus(prefix, bad_token=bad_token)}"


def _validation_losses(run: Run) -> list[str]:
    return [line for line in run.output.splitlines() if "validation loss at" in line]


def _learning_rates(run: Run) -> list[str]:
    return [line.split("learning rate: ")[1][:12] for line in run.output.splitlines() if "lm loss:" in line]


def test_a_checkpoint_has_its_folder_and_the_tracker_names_it(runs: dict[str, Run], root: Path) -> None:
    assert runs["halfway"].error is None
    assert "--exit-interval 2 divides iteration 2" in runs["halfway"].output
    line = (
        r"  \[[\d-]+ [\d:.]+\] successfully saved checkpoint from iteration       2 to \S+/halfway \[ t 1/1, p 1/1 \]\n"
    )
    assert re.search(line, runs["halfway"].output), "as Megatron-LM says it"
    assert (root / "halfway" / TRACKER).read_text() == "2"
    assert sorted(entry.name for entry in (root / "halfway").iterdir()) == ["iter_0000002", TRACKER]


def test_the_same_run_goes_on_to_the_last_bit(runs: dict[str, Run]) -> None:
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed.error is None
    assert "training continues after iteration 2" in resumed.output
    assert resumed.losses == {3: whole.losses[3], 4: whole.losses[4]}
    assert resumed.grad_norms == {3: whole.grad_norms[3], 4: whole.grad_norms[4]}
    assert _validation_losses(resumed) == _validation_losses(whole)[2:]
    assert _learning_rates(resumed) == _learning_rates(whole)[2:]


def test_main_weights_in_two_halves_train_and_go_on_as_fp32_ones(runs: dict[str, Run]) -> None:
    """Also when another run saved them whole, or loads them as whole ones: but for a weight at a tie, rounded otherwise.

    That the main weights themselves are those of the other kind, ``test_param_remainders.py`` checks to the last bit.
    """
    whole, halves, resumed = runs["bf16"], runs["two halves"], runs["two halves resumed"]
    assert len(whole.losses) == 4 and halves.losses == pytest.approx(whole.losses, rel=_ONE_BF16_WEIGHT)
    assert resumed.losses == {3: halves.losses[3], 4: halves.losses[4]}, resumed.error
    assert resumed.grad_norms == {3: halves.grad_norms[3], 4: halves.grad_norms[4]}
    for name in ("made whole", "made two halves"):
        for got, expected in ((runs[name].losses, whole.losses), (runs[name].grad_norms, whole.grad_norms)):
            assert got == {i: pytest.approx(expected[i], rel=_ONE_BF16_WEIGHT) for i in (3, 4)}, runs[name].error


def test_moments_in_fewer_bits_go_on_bit_by_bit(runs: dict[str, Run]) -> None:
    """And in fp32, of which they are numbers; the last loss differs, since something was rounded."""
    small, resumed, whole = (runs[f"small moments{name}"] for name in ("", " resumed", " made fp32"))
    assert resumed.losses == {3: small.losses[3], 4: small.losses[4]}, resumed.error
    assert whole.losses == {i: pytest.approx(small.losses[i], rel=_ONE_BF16_WEIGHT) for i in (3, 4)}, whole.error
    assert (
        small.losses == pytest.approx(runs["two halves"].losses, rel=0.01) and small.losses != runs["two halves"].losses
    )


def _assert_goes_on(resumed: Run, whole: Run) -> None:
    """Check losses up to the order of fp32 sums."""
    assert resumed.error is None
    assert resumed.losses == {i: pytest.approx(whole.losses[i], rel=1e-6) for i in (3, 4)}


def test_another_strategy_goes_on_alike(runs: dict[str, Run]) -> None:
    _assert_goes_on(runs["other strategy"], runs["whole"])


@pytest.mark.parametrize(("ranks", "flags"), [(1, _SCHEDULE), (4, f"{SHARDED} {_SCHEDULE}")])
def test_other_numbers_of_ranks_go_on_alike(runs: dict[str, Run], root: Path, ranks: int, flags: str) -> None:
    resumed = train_all(ranks, {"resumed": f"{flags} --load {root}/halfway"})["resumed"]
    _assert_goes_on(resumed, runs["whole"])


def test_parts_can_be_left_out_of_a_load(runs: dict[str, Run]) -> None:
    whole, tuned, fresh = runs["whole"], runs["finetuned"], runs["fresh moments"]
    assert tuned.error is None and "training starts at iteration 0" in tuned.output
    assert tuned.losses[1] < whole.losses[1]  # the weights are trained, the data are those of iteration 1
    assert fresh.losses[3] == whole.losses[3]  # the loss of the loaded weights
    assert fresh.losses[4] != whole.losses[4]  # the moments start at zero
    assert runs["other seed"].losses[3] != whole.losses[3]


def test_other_samples_than_the_checkpoints_are_said(runs: dict[str, Run]) -> None:
    """A longer context in mid-training is lawful, but which data were drawn is not known then."""
    run, words = runs["shorter samples"], "WARNING: samples are not those of the checkpoint"
    assert run.error is None and f"{words} (seq_length: now 8, saved 16)" in run.output
    assert words not in runs["resumed"].output and words not in runs["finetuned"].output
    assert words not in runs["same corpus"].output and len(runs["same corpus"].losses) == 2
    assert f"{words} (data_path: now 1.0 (.idx of " in runs["other corpus"].output
    assert f"{words} (split: now 0.75 0.25 0.0, saved 1.0 0.0 0.0)" in runs["other split"].output


def test_hyperparameters_of_the_command_line_stay_in_effect(runs: dict[str, Run]) -> None:
    assert runs["other betas"].losses[3] == runs["whole"].losses[3]
    assert runs["other betas"].losses[4] != runs["whole"].losses[4]


@pytest.mark.parametrize(
    ("name", "iterations", "batch", "end"),
    [
        ("40 samples", range(1, 6), 8, "40 of --train-samples 43 are consumed, and a global batch is 8"),
        ("80 samples in smaller batches", range(6, 16), 4, "all of --train-samples 80 are consumed"),
        (
            "152 samples in larger batches",
            range(6, 13),
            16,
            "152 of --train-samples 160 are consumed, and a global batch is",
        ),
        (
            "40 samples and no whole batch",
            range(6, 6),
            16,
            "40 of --train-samples 52 are consumed, and a global batch is 16",
        ),
    ],
)
def test_training_by_samples_ends_after_the_last_whole_batch_of_all_runs(
    runs: dict[str, Run], name: str, iterations: range, batch: int, end: str
) -> None:
    """Counted over runs with batches of any sizes, as the schedule is."""
    run = runs[name]
    assert run.error is None and list(run.losses) == list(iterations)
    assert f"training ended after iteration {iterations.stop - 1}: {end}" in run.output
    total = int(re.findall(r"--train-samples (\d+)", end)[0])
    for iteration, rate in zip(iterations, _learning_rates(run), strict=True):
        consumed = 40 + (iteration - 5) * batch if iteration > 5 else iteration * batch
        assert f"iteration {iteration:8d}/{iterations.stop - 1:8d} | consumed samples: {consumed:12d} " in run.output
        assert float(rate) == pytest.approx(1e-2 * (1 - consumed / total), rel=1e-5)


def test_samples_for_less_than_a_batch_are_refused(runs: dict[str, Run]) -> None:
    error = runs["no batch at all"].error
    assert error is not None and "--train-samples must be at least --global-batch-size (8), got 7" in error


def test_a_folder_without_checkpoint_is_a_start_from_scratch_or_an_error(runs: dict[str, Run]) -> None:
    assert runs["from scratch"].losses == {1: runs["whole"].losses[1]}
    assert "training starts from scratch" in runs["from scratch"].output
    error = runs["must exist"].error
    assert error is not None and "must have a checkpoint" in error
    assert error.startswith("StartRefusedError"), "one message of all ranks"


@pytest.mark.parametrize("misfit", _MISFITS)
def test_what_does_not_fit_is_named(runs: dict[str, Run], misfit: str) -> None:
    error = runs[misfit].error
    assert error is not None and _MISFITS[misfit] in error


def test_a_damaged_tracker_is_named(runs: dict[str, Run]) -> None:
    error = runs["damaged"].error
    assert error is not None and "must hold the number of an iteration, got 'release'" in error


def test_an_asynchronous_save_holds_the_state_at_its_iteration(runs: dict[str, Run], root: Path) -> None:
    """Training goes on while it is written: what is written must be a copy."""
    assert runs["asynchronous"].error is None
    assert runs["asynchronous"].losses == runs["whole"].losses
    assert (root / "asynchronous" / TRACKER).read_text() == "4"
    assert runs["from asynchronous"].losses == runs["resumed"].losses


def test_state_can_be_left_out_of_a_checkpoint(runs: dict[str, Run]) -> None:
    assert runs["slim"].error is None
    rng = "load it with --no-load-rng"
    for name, word in (
        ("slim without flags", rng),
        ("slim without optimizer", rng),
        ("slim without random numbers", "without an optimizer; pass --no-load-optim to load the model alone"),
    ):
        error = runs[name].error
        assert error is not None and word in error
    assert runs["slim with flags"].losses == runs["fresh moments"].losses
