"""Evaluation from the command line: whole validation sets, several of them, batches of their own, and without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.corpora import write_corpus
from tests.support.tiny_run import SHARDED, TINY, Run, train_all

BASE = f"{TINY.replace('--mock-data ', '')} {SHARDED} --eval-iters 1 --train-data-path FOLDER/text"
WHOLE = "--full-validation --multiple-validation-sets --validation-set-names web code --valid-data-path FOLDER/web FOLDER/code"
OTHER_BATCHES = "--eval-micro-batch-size 3 --eval-global-batch-size 6"
EVALUATED = "--skip-train --load FOLDER/saved --save FOLDER/nothing --tensorboard-dir FOLDER/no_curves"
STANDING = "--lr 0 --min-lr 0 --eval-interval 2 --valid-data-path FOLDER/web"
RUNS = {
    "trained": f"{WHOLE} --eval-interval 2 --save FOLDER/saved --tensorboard-dir FOLDER/curves",
    "evaluated": f"{WHOLE} {EVALUATED} {OTHER_BATCHES} --test-data-path FOLDER/web",
    "pooled": f"{EVALUATED} --full-validation --valid-data-path FOLDER/web FOLDER/code",
    "part": f"{EVALUATED} {OTHER_BATCHES} --lr 3 --valid-data-path FOLDER/web",
    "in a row": f"{STANDING} --save FOLDER/parts --save-interval 2",
    "resumed": f"{STANDING} --load FOLDER/parts --ckpt-step 2",
    "numbered": f"{EVALUATED} --multiple-validation-sets --valid-data-path FOLDER/web FOLDER/code",
}
SAMPLES = {"web": 7, "code": 4}
"""Of 16 tokens; neither is a multiple of a batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    for name, samples in {"text": 40, **SAMPLES}.items():
        write_corpus(folder / name, [[(7 * place + samples) % 97 for place in range(16 * samples + 1)]])
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    return _train(2, folder, RUNS)


def _train(ranks: int, folder: Path, runs: dict[str, str]) -> dict[str, Run]:
    given = {name: added.replace("FOLDER", str(folder)) for name, added in runs.items()}
    return train_all(ranks, given, base=BASE.replace("FOLDER", str(folder)))


def _losses(run: Run) -> dict[tuple[str, str], float]:
    """Return the losses by (set, where)."""
    assert run.error is None, run.error
    found = re.findall(r"^ validation(\S*) loss at (.*) \| lm loss value: (\S+) \|", run.output, re.MULTILINE)
    return {(name, where): float(loss) for name, where, loss in found}


LAST = "iteration 4 on validation set"


def test_each_validation_set_has_a_loss_of_its_own(runs: dict[str, Run], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = _losses(runs["trained"])
    places = ["iteration 2", "iteration 4", LAST]
    assert list(losses) == [(name, where) for where in places for name in ("-web", "-code")]
    events = EventAccumulator(str(folder / "curves"))
    events.Reload()
    for name in ("-web", "-code"):
        assert [event.step for event in events.Scalars(f"lm loss validation{name}")] == [2, 4, 4]
    assert losses["-web", LAST] == losses["-web", "iteration 4"] != losses["-web", "iteration 2"]


def test_a_whole_set_gives_the_same_loss_in_other_batches_and_on_one_rank(runs: dict[str, Run], folder: Path) -> None:
    """So padding to whole batches counts nothing, and no sample is left out."""
    trained, evaluated = _losses(runs["trained"]), _losses(runs["evaluated"])
    alone = _losses(_train(1, folder, {"evaluated": RUNS["evaluated"]})["evaluated"])
    for name in ("-web", "-code"):
        assert evaluated[name, LAST] == pytest.approx(trained[name, LAST], rel=1e-6)
        assert alone[name, LAST] == pytest.approx(trained[name, LAST], rel=1e-6)
    assert ("", "iteration 4 on test set") in evaluated


def test_evaluations_go_on_with_the_samples_that_follow_also_in_a_resumed_run(runs: dict[str, Run]) -> None:
    """Weights do not change, so another loss is of other samples."""
    whole, resumed = _losses(runs["in a row"]), _losses(runs["resumed"])
    assert whole["", "iteration 2"] != whole["", "iteration 4"]
    assert resumed["", "iteration 4"] == whole["", "iteration 4"]


def test_sets_that_are_not_kept_apart_are_one(runs: dict[str, Run]) -> None:
    apart = _losses(runs["evaluated"])
    mean = sum(apart[f"-{name}", LAST] * samples for name, samples in SAMPLES.items()) / sum(SAMPLES.values())
    assert _losses(runs["pooled"]) == {("", LAST): pytest.approx(mean, rel=1e-6)}


def test_without_training_nothing_is_trained_or_saved(runs: dict[str, Run], folder: Path) -> None:
    """A part of a set, and a learning rate of another run: only weights and counters of the checkpoint count."""
    for name in ("evaluated", "pooled", "part"):
        assert "| global batch size:" not in runs[name].output and "nothing was trained" in runs[name].output
    assert not (folder / "nothing").exists() and not (folder / "no_curves").exists()
    (loss,) = _losses(runs["part"]).values()
    assert loss != _losses(runs["evaluated"])["-web", LAST]


def test_sets_without_names_are_numbered(runs: dict[str, Run]) -> None:
    """Each is evaluated on --eval-iters batches."""
    assert list(_losses(runs["numbered"])) == [("-0", LAST), ("-1", LAST)]
