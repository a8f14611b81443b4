"""What a run cannot save or load is said at its start, or names file, iteration and what to do; nothing has changed then."""

from __future__ import annotations

import contextlib
import inspect
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import pretrain_gpt
from megatron.core.distributed.fsdp.checkpoint import CheckpointReader, StoredTensor
from megatron.training import checkpointing
from megatron.training.checkpointing import CheckpointConfig
from megatron.training.folder_lock import LOCK, Owner
from megatron.training.run_folder import TRACKER, read_tracker, saved_iterations, try_to_write, write_tracker
from tests.core.test_regular_file import KINDS
from tests.support.launch import run_ranks
from tests.support.rank_processes import write_corpus
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

_RUN = f"{TINY} {SHARDED}"
_ITERATION = "iter_0000002"
_OF_THE_USER = "iter_0000003"
_HOLDS = "halfway must hold no checkpoints but those of the run that --load continues, got iteration 2 there, while training "


def save_and_fail(root: str) -> dict[str, Run]:
    """Run what saves: once as it should be, then where it cannot."""
    folder = Path(root)
    if dist.get_rank() == 0:
        (folder / "file").touch()
        (folder / "of_the_user" / _OF_THE_USER).mkdir(parents=True)
        (folder / "of_the_user" / _OF_THE_USER / "notes.txt").touch()
    dist.barrier()
    runs = {"halfway": train_one(f"{_RUN} --exit-interval 2 --save {root}/halfway".split())}
    runs["taken back"] = train_one(f"{_RUN} --exit-interval 1 --save {root}/halfway".split())
    runs["tuned from itself"] = train_one(f"{_RUN} --finetune --load {root}/halfway --save {root}/halfway".split())
    runs["from elsewhere"] = train_one(f"{_RUN} --load {root}/nothing --save {root}/halfway".split())
    runs["of the user"] = train_one(f"{_RUN} --save {root}/of_the_user".split())
    runs["under a file"] = train_one(f"{_RUN} --save {root}/file/runs".split())
    with contextlib.ExitStack() as patches:
        if dist.get_rank() == 1:  # a folder that only other ranks can write to
            elsewhere = patch.object(
                checkpointing, "try_to_write", lambda folder: try_to_write(folder.with_name("elsewhere"))
            )
            patches.enter_context(elsewhere)
        runs["elsewhere"] = train_one(f"{_RUN} --save {root}/seen_by_rank_0".split())
    runs["taken over"] = _taken_over(root)
    with _started_by_torchrun(1):
        runs["refused again"] = train_one(f"{_RUN} --save {root}/halfway".split())
    drawn = _RUN.replace("--mock-data", write_corpus(folder / f"corpus_{dist.get_rank()}")) + " --lr-decay-iters 8"
    runs["larger batches"] = train_one(f"{drawn} --global-batch-size 32 --train-iters 2 --save {root}/large".split())
    runs["smaller batches"] = train_one(f"{drawn} --load {root}/large --override-opt-param-scheduler".split())
    in_samples = drawn.replace("--train-iters 4", "--train-samples 80").replace("--lr-decay-iters 8", "")
    runs["by samples"] = train_one(f"{in_samples} --load {root}/large --override-opt-param-scheduler".split())
    runs["two saves"] = train_one(f"{_RUN} --save {root}/two --save-interval 2".split())
    dist.barrier()
    if dist.get_rank() == 0:
        write_tracker(folder / "two", 2)
    dist.barrier()
    runs["an older one"] = train_one(f"{_RUN} --load {root}/two".split())
    if dist.get_rank() == 0:
        shutil.copytree(folder / "two", folder / "spoiled")
        (folder / "spoiled" / "iter_0000004" / "notes").mkdir()
        write_tracker(folder / "spoiled", 4)
        (folder / "two" / TRACKER).unlink()
    dist.barrier()
    runs["no tracker"] = train_one(f"{_RUN} --load {root}/two".split())
    runs["gone back over notes"] = train_one(
        f"{_RUN} --load {root}/spoiled --save {root}/spoiled --ckpt-step 2".split()
    )
    runs |= _gone_back(f"{_RUN} --lr-decay-iters 8 --save {root}/branch")
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=100_000)
    runs["small disk"] = train_one(f"{_RUN} --save {root}/small".split())
    shutil.disk_usage = usage
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, flags in (("full disk", ""), ("full disk, async", "--async-save")):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        argv = f"{_RUN} --save {root}/full --save-interval 2 {flags}".split()
        runs[name] = train_one(argv)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return runs


@contextmanager
def _started_by_torchrun(restarts: int) -> Iterator[None]:
    """Let the runs in the scope be starts of one job."""
    names = {"RUN_ID": "job", "USE_AGENT_STORE": "True", "RESTART_COUNT": str(restarts)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(f"TORCHELASTIC_{name}", value)
        yield


def _gone_back(flags: str) -> dict[str, Run]:
    """Go back to iteration 2 of 6; the run fails before its first save, then after it. The last start is that of a new host."""
    runs = {"branch": train_one(f"{flags} --train-iters 6 --save-interval 2".split())}
    argv = f"{flags} --train-iters 8 --save-interval 5 --load {flags.split()[-1]} --ckpt-step 2 --override-opt-param-scheduler".split()
    for name, restarts, first_failing in (("gone back", 0, 4), ("restarted", 1, 7), ("a host joined", 0, 9)):
        with _started_by_torchrun(restarts), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrain_gpt, "forward_step", _failing_in(first_failing))
            runs[name] = train_one(argv)
    return runs


def _failing_in(iteration: int) -> Callable[..., Any]:
    forward_step = pretrain_gpt.forward_step

    def fail(batch: Any, model: Any) -> Any:
        frames = [frame for frame in inspect.stack() if frame.function == "_train_one_step"]
        if frames and frames[0].frame.f_locals["self"].state.iteration + 1 == iteration:
            raise RuntimeError("a fault of this test")
        return forward_step(batch, model)

    return fail


def _taken_over(root: str) -> Run:
    """Run with two saves; after the first one another run takes the lock, as if this one had been stopped for long."""

    def write_and_lose(folder: Path, iteration: int) -> None:
        write_tracker(folder, iteration)
        (folder / LOCK).write_text(json.dumps(asdict(Owner(token="other", host="elsewhere", pid=7))))

    with patch.object(checkpointing, "write_tracker", write_and_lose):
        return train_one(f"{_RUN} --save {root}/taken_over --save-interval 2".split())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def saving(root: Path) -> list[dict[str, Run]]:
    ranks: list[dict[str, Run]] = run_ranks(2, save_and_fail, str(root))
    return ranks


@pytest.mark.parametrize(
    ("run", "messages"),
    [
        ("gone back over notes", ["iter_0000004 must be a checkpoint, an empty folder or not there", "notes"]),
        (
            "taken back",
            [_HOLDS + "would start from iteration 0; continue it with --load ", "give --save another folder"],
        ),
        ("refused again", [_HOLDS + "would start from iteration 0; "]),
        ("tuned from itself", [_HOLDS + "would start from iteration 0; "]),
        ("from elsewhere", [_HOLDS + "would start from what is in ", "nothing; continue it with --load "]),
        (
            "of the user",
            [f"of_the_user/{_OF_THE_USER} must be a checkpoint, an empty folder or not there", "notes.txt"],
        ),
        ("under a file", ["--save", "file/runs must be a folder that can be made"]),
        ("elsewhere", ["elsewhere must be one folder that all ranks see and can write to", "[rank 1]"]),
        ("small disk", ["small must have space for a checkpoint of ", "got 100,000 free"]),
        (
            "taken over",
            ["iteration 4 was not saved", "taken_over must be the", "in use by process 7 on host elsewhere"],
        ),
        ("full disk", ["iteration 2 was not saved", "__1_0.distcp could not be written", "File too large", "[rank 1]"]),
        ("full disk, async", ["iteration 2 was not saved", "__1_0.distcp could not be written", "[rank 1]"]),
    ],
)
def test_what_cannot_be_saved_all_ranks_say(saving: list[dict[str, Run]], run: str, messages: list[str]) -> None:
    for rank in saving:
        error = rank[run].error
        assert error is not None and all(message in error for message in messages), error
    trained = bool(saving[0][run].losses)
    assert trained == (run == "taken over" or run.startswith("full disk")), (
        "a folder that cannot be used is found before the first step"
    )


def test_a_resume_with_smaller_batches_that_needs_more_data_than_its_iterations_say(
    saving: list[dict[str, Run]],
) -> None:
    """Data are built for --train-iters times the batch size of this run, and earlier runs took more."""
    assert len(saving[0]["larger batches"].losses) == 2 and saving[0]["smaller batches"].losses == {}
    for rank in saving:
        error = rank["smaller batches"].error
        assert error is not None and "the training data must have 80 samples" in error
        assert "give --train-samples 80 instead of --train-iters" in error
    assert saving[0]["by samples"].error is None and list(saving[0]["by samples"].losses) == [3, 4]


def test_a_restart_continues_what_this_job_saved_and_until_then_starts_as_first(
    saving: list[dict[str, Run]], root: Path
) -> None:
    """A folder with --ckpt-step holds a branch that its run has left; continuing that one would look alike."""
    runs, folder = saving[0], root / "branch"
    for name, loaded, iterations in (
        ("branch", None, [1, 2, 3, 4, 5, 6]),
        ("gone back", 2, [3]),
        ("restarted", 2, [3, 4, 5, 6]),
        ("a host joined", 5, [6, 7, 8]),
    ):
        assert list(runs[name].losses) == iterations, runs[name]
        assert loaded is None or f"loaded {folder}/iter_000000{loaded};" in runs[name].output
    assert (
        f"restarted by torchrun: starts as it did first, since it has saved nothing in {folder}"
        in runs["restarted"].output
    )
    assert (
        f"restarted by torchrun: continues from iteration 5, which it saved in {folder}" in runs["a host joined"].output
    )
    assert "restarted" not in runs["gone back"].output
    assert (folder / TRACKER).read_text() == "8"


def test_a_tracker_that_names_an_older_checkpoint_is_told(saving: list[dict[str, Run]], root: Path) -> None:
    """It is a number without a checksum: a flipped bit may name another one."""
    runs = saving[0]
    assert list(runs["an older one"].losses) == [3, 4]
    line = f"{root}/two/{TRACKER} names iteration 2, which is loaded; iteration 4, which is complete too, is left."
    assert line in runs["an older one"].output and TRACKER not in runs["two saves"].output


def test_checkpoints_without_a_tracker_are_told(saving: list[dict[str, Run]], root: Path) -> None:
    """The tracker was deleted or not copied, or the run was killed after the first checkpoint and before the tracker."""
    run = saving[0]["no tracker"]
    line = f"no checkpoint in {root}/two (no {TRACKER}): training starts from scratch; the folder has a complete checkpoint of iteration 4"
    assert list(run.losses) == [1, 2, 3, 4] and line in run.output


def test_the_checkpoint_is_as_large_as_was_said(saving: list[dict[str, Run]], root: Path) -> None:
    error = saving[0]["small disk"].error
    assert error is not None
    planned = int(error.split("checkpoint of ")[1].split(" bytes")[0].replace(",", ""))
    halfway = root / "halfway" / _ITERATION
    metadata = FileSystemReader(halfway).read_metadata().state_dict_metadata
    tensors = [entry for entry in metadata.values() if isinstance(entry, TensorStorageMetadata)]
    stored = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    scalars = sum(4 for name in metadata if name.endswith(".step"))
    assert planned == stored - scalars


def test_a_refused_run_leaves_the_folder_as_it_was(saving: list[dict[str, Run]], root: Path) -> None:
    """The tracker of a run that began anew would go back to its first checkpoint."""
    assert saving[0]["taken back"].error is not None
    assert (root / "halfway" / TRACKER).read_text() == "2"
    assert sorted(entry.name for entry in (root / "halfway").iterdir()) == [_ITERATION, TRACKER]


def test_a_run_whose_folder_was_taken_over_writes_nothing_there(saving: list[dict[str, Run]], root: Path) -> None:
    """It was taken for lost, and has only been stopped. The lock is the other's to remove."""
    assert (root / "taken_over" / TRACKER).read_text() == "2"
    assert sorted(entry.name for entry in (root / "taken_over").iterdir()) == [LOCK, _ITERATION, TRACKER]


def test_a_full_disk_leaves_no_litter(saving: list[dict[str, Run]], root: Path) -> None:
    assert list((root / "full").iterdir()) == []


def _rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a change of a run's folder: its plain values are rewritten, as another program could."""

    def apply(run: Path) -> None:
        path = run / _ITERATION
        reader = CheckpointReader(path)
        tensors = [name for name, entry in reader.entries.items() if isinstance(entry, StoredTensor)]
        state: dict[str, Any] = reader.values([name for name in reader.entries if name not in tensors])
        state.update({name: reader.tensor(name) for name in tensors})
        change(state)
        shutil.rmtree(path)
        dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)

    return apply


def _flipped(run: Path) -> None:
    data = run / _ITERATION / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def _renamed(run: Path) -> None:
    (run / _ITERATION).rename(run / "iter_0000007")
    (run / TRACKER).write_text("7")


def _tracker(content: bytes) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / TRACKER).write_bytes(content)

    return write


_DAMAGES: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "bit": (_flipped, "__1_0.distcp: the "),
    "renamed": (
        _renamed,
        "iter_0000007 must hold iteration 7, got a checkpoint of iteration 2",
    ),
    "no schedule": (
        _rewritten(lambda state: state.pop("extra_state.scheduler")),
        f"{_ITERATION} must be a checkpoint of a",
    ),
    "schedule": (
        _rewritten(lambda state: state.update({"extra_state.scheduler": {"num_steps": 3}})),
        f"{_ITERATION}: the saved schedule must have a value for each setting",
    ),
    "counters": (_rewritten(lambda state: state.update({"extra_state.state": {"x": 3}})), f"{_ITERATION}: "),
    "negative": (
        _rewritten(lambda state: state.update({"extra_state.state": {"iteration": -2}})),
        f"{_ITERATION}: counters",
    ),
    "random": (
        _rewritten(lambda state: state.update({"extra_state.rng": {"python": 3}})),
        f"{_ITERATION}: the state of random numbers must be as it was saved",
    ),
    "groups": (
        _rewritten(lambda state: state.update({"optimizer.param_groups": [3]})),
        f"{_ITERATION}: the optimizer's values must be those that save_checkpoint writes",
    ),
    "architecture": (
        _rewritten(lambda state: state.update({"extra_state.architecture": [3]})),
        f"{_ITERATION} must be a",
    ),
    "tracker": (_tracker(b"\xff\xfe\x00"), f"{TRACKER} must hold the number of an iteration"),
    "long tracker": (_tracker(b"9" * 5000), f"{TRACKER} must hold the number of an iteration"),
    "another iteration": (_tracker(b"3"), "a checkpoint must be at"),
}


@pytest.fixture(scope="module")
def loading(saving: list[dict[str, Run]], root: Path) -> dict[str, Run]:
    """Load each damaged copy of the run."""
    assert saving[0]["halfway"].error is None
    for name, (damage, _) in _DAMAGES.items():
        shutil.copytree(root / "halfway", root / name)
        damage(root / name)
    runs: dict[str, Run] = run_ranks(2, load_all, str(root), list(_DAMAGES))[0]
    return runs


def load_all(root: str, names: list[str]) -> dict[str, Run]:
    runs = {name: train_one([*_RUN.split(), "--load", f"{root}/{name}"]) for name in names}
    runs["a file"] = train_one([*_RUN.split(), "--load", f"{root}/file"])
    runs["trusted"] = train_one([*_RUN.split(), "--load", f"{root}/bit", "--no-verify-checkpoint"])
    return runs


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("damage", _DAMAGES)
def test_what_cannot_be_loaded_is_named_before_training(loading: dict[str, Run], root: Path, damage: str) -> None:
    run = loading[damage]
    assert run.error is not None and _DAMAGES[damage][1] in run.error and f"{root}/{damage}" in run.error, run.error
    assert run.losses == {}


def test_any_error_of_the_system_is_a_refusal(loading: dict[str, Run], root: Path) -> None:
    """OSError has many subclasses, such as NotADirectoryError and PermissionError; all must give a one-line error."""
    error = loading["a file"].error
    assert error is not None and error.startswith("StartRefusedError") and f"Not a directory: '{root}/file" in error


def test_files_can_be_trusted_on_request(loading: dict[str, Run]) -> None:
    assert loading["trusted"].error is None and len(loading["trusted"].losses) == 2


@pytest.mark.parametrize("name", ["save", "load"])
def test_an_empty_path_is_refused(name: str) -> None:
    """A launch script whose variable is not set."""
    with pytest.raises(ValueError, match=f"--{name} must be the path of a folder, got an empty text"):
        CheckpointConfig(save=" ") if name == "save" else CheckpointConfig(load="")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Also a link to nothing: a run that began anew would lose what is trained."""
    KINDS[kind](tmp_path / TRACKER)
    with pytest.raises(ValueError, match=f"{TRACKER} must be a regular file, got {kind}"):
        read_tracker(tmp_path / TRACKER)


def test_folders_that_other_digits_name_are_no_checkpoints(tmp_path: Path) -> None:
    """``int`` does not take all that ``isdigit`` does."""
    for name in ("iter_²", "iter_٣٣٣٣٣٣٣", "iter_0000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert list(saved_iterations(tmp_path)) == [3]
    with pytest.raises(ValueError, match="the latest complete one is 3"):
        (tmp_path / TRACKER).write_text("²")
        read_tracker(tmp_path / TRACKER)


def test_a_tracker_may_end_with_a_line_end(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("12\n")
    assert read_tracker(tmp_path / TRACKER) == 12
