"""Kill a run of two ranks at random moments of training and saving, and let it go on.

``python -m tests.damage.kills --trials 100`` kills so often, half of the time with ``--async-save``. After each kill the
checkpoint that the tracker names must be bitwise that of a run which nobody killed, at the same iteration; the losses that
were logged in between must be the same too. A run that reaches its end starts again in an empty folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, StoredTensor
from megatron.training.run_folder import TRACKER, checkpoint_path, read_tracker
from tests.damage.mutations import run_often
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

NUM_RANKS, ITERATIONS = 2, 40
_RUN = f"{TINY} {SHARDED} --train-iters {ITERATIONS} --save-interval 2"
_START_S = 120.0


@dataclass
class Outcomes:
    """How often what was seen."""

    counts: Counter[str]
    faults: list[str]


def kill_often(trials: int, *, seed: int = 0) -> Outcomes:
    """Kill runs so often and compare what is left. Runs in a process of its own, which can fork ranks.

    Returns:
        Counts of what the kills hit, and a line for each fault.
    """
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(trials, seed, sender))
    process.start()
    sender.close()
    try:
        outcomes: Outcomes = receiver.recv()
    except EOFError:
        return Outcomes(Counter(), ["the process that kills died; see its output"])
    finally:
        process.join()
    return outcomes


def _main(trials: int, seed: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    # What a rank would import first; then forked ranks start at once.
    for module in ("torch._dynamo", "megatron.training.launch.pretrain", "pretrain_gpt"):
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        sender.send(_kill_all(Path(folder), trials, random.Random(seed)))


def _kill_all(root: Path, trials: int, draw: random.Random) -> Outcomes:
    outcomes = Outcomes(Counter(), [])
    whole = root / "whole"
    ranks = [_fork(root, rank, "whole", f"{_RUN} --save {whole}") for rank in range(NUM_RANKS)]
    if any(os.waitpid(child, 0)[1] for child in ranks):
        return Outcomes(outcomes.counts, [f"the run that nobody kills failed: {(root / 'whole.0').read_text()}"])
    expected = _losses(root / "whole.0")
    digests = {iteration: _digest(checkpoint_path(whole, iteration)) for iteration in range(2, ITERATIONS + 1, 2)}
    folder, before = root / "killed", 0
    for trial in range(trials):
        kind = draw.choice(("sync", "async"))
        flags = f"{_RUN} --save {folder} --load {folder} {'--async-save' if kind == 'async' else ''}"
        is_last_chance = trial == trials - 1 and not outcomes.counts["checkpoints compared"]
        ended = _kill_one(root, f"trial{trial}", flags, draw, needs_checkpoint=is_last_chance)
        iteration = read_tracker(folder / TRACKER) if folder.exists() else None
        outcomes.counts[f"{kind}: {ended}"] += 1
        outcomes.counts["left something half written"] += any(folder.glob("*.tmp-*")) or any(folder.glob("*.old-*"))
        losses = _losses(root / f"trial{trial}.0")
        outcomes.counts["iterations trained"] += len(losses)
        for wrong in (i for i, loss in losses.items() if loss != expected[i]):
            outcomes.faults.append(f"trial {trial}: loss {losses[wrong]} at iteration {wrong}, not {expected[wrong]}")
        if (iteration or 0) < before:
            outcomes.faults.append(f"trial {trial}: the tracker went back from {before} to {iteration}")
        if iteration is not None:
            outcomes.counts["checkpoints compared"] += 1
            if _digest(checkpoint_path(folder, iteration)) != digests[iteration]:
                outcomes.faults.append(f"trial {trial}: the checkpoint of iteration {iteration} is another one")
        before = iteration or 0
        if before >= ITERATIONS:
            outcomes.counts["runs that reached their end"] += 1
            shutil.rmtree(folder)
            before = 0
        for log in root.glob(f"trial{trial}.*"):
            log.unlink()
    return outcomes


def _kill_one(root: Path, name: str, flags: str, draw: random.Random, *, needs_checkpoint: bool) -> str:
    """Start ranks and kill both, in either order, after the first of them trains; say what the first one was hit in.

    A run without a checkpoint is killed after its third iteration at the earliest: its first checkpoint is due then.

    Args:
        needs_checkpoint: wait until there is one, however slow the machine.
    """
    ranks = [_fork(root, rank, name, flags) for rank in range(NUM_RANKS)]
    log, deadline = root / f"{name}.0", time.monotonic() + _START_S
    tracker = root / "killed" / TRACKER
    least = 1 if tracker.exists() else 3
    while not (log.exists() and log.read_text().count(" iteration ") >= least) or (
        needs_checkpoint and not tracker.exists()
    ):
        if time.monotonic() > deadline:
            break
        if os.waitpid(ranks[0], os.WNOHANG) != (0, 0):
            ranks.pop(0)
            break
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.5))
    draw.shuffle(ranks)
    text = log.read_text() if log.exists() else ""
    saving = any(Path(root / "killed").glob("*.tmp-*"))
    for child in ranks:
        os.kill(child, signal.SIGKILL)
        time.sleep(draw.choice((0.0, 0.05)))
    for child in ranks:
        os.waitpid(child, 0)
    if "training ended" in text:
        return "after its end"
    return "killed while it saved" if saving else "killed while it trained"


def _fork(root: Path, rank: int, name: str, flags: str) -> int:
    """Fork a rank that runs ``pretrain_gpt.py`` with these flags, and prints into a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(root / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank))
        store = f"file://{root}/{name}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
        with open(descriptor, "w", buffering=1, closefd=False) as log:
            run = train_one(flags.split(), stream=log)
        code = 0 if run.error is None else 1
        print(run.error, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _losses(log: Path) -> dict[int, float]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return Run(text.rpartition("\n")[0]).losses  # the last line may be cut by the kill


def _digest(path: Path) -> str:
    """Return a hash of all tensors and values of a checkpoint, compared with its checksums as it is read.

    But for the arguments of the run, which name the folder and how it saves.
    """
    reader = CheckpointReader(path)
    digest = hashlib.sha256()
    for name, entry in sorted(reader.entries.items()):
        if isinstance(entry, StoredTensor):
            digest.update(name.encode() + reader.tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
        elif name != f"{EXTRA_STATE}args":
            digest.update(repr((name, reader.values([name])[name])).encode())
    return digest.hexdigest()


def _counted(trials: int, *, seed: int) -> tuple[Counter[str], list[str]]:
    outcomes = kill_often(trials, seed=seed)
    return outcomes.counts, outcomes.faults


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(run_often(__doc__, 100, _counted))
