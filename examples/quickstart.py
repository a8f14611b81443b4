"""Quickstart: a small GPT trained on the sources of the Python standard library, from corpus to sampled text.

``bash examples/quickstart.sh`` installs the requirements and runs it. All files are in ``runs/quickstart``. Run it again to
continue training from the checkpoint.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.loss_curve import draw_losses
from examples.training_log import read_losses
from examples.training_run import TrainingError, TrainingInterruptedError, train

REPOSITORY = Path(__file__).resolve().parent.parent

STRETCH = 400
"""Iterations of one run of this command."""

NUM_GLOO_RANKS = 2
THREADS = {"OMP_NUM_THREADS": "1"}
"""Threads of each process: more gain little for matrices this small, and slow down a container with fewer cores than it shows."""
GLOBAL_BATCH_SIZE = 16
SEQ_LENGTH = 128
PROMPT = "import os\nimport sys\n\n\ndef "

MODEL_FLAGS = f"""
--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --init-method-std 0.06
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
--tokenizer-type ByteLevelTokenizer
"""

TRAINING_FLAGS = """
--lr 3e-3 --min-lr 0 --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
--log-interval 20 --log-throughput --eval-interval 100 --eval-iters 16 --save-interval 100 --num-workers 0
--exit-signal-handler --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
--overlap-grad-reduce --overlap-param-gather --override-opt-param-scheduler
"""
# The schedule of a second run is longer than that of the checkpoint, which is therefore overridden.


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the paths of its files."""

    path: Path

    @property
    def corpus(self) -> Path:
        return self.path / "corpus"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def flags(self) -> Path:
        return self.path / "flags.txt"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    def data_prefix(self, part: str) -> str:
        """Return the path of the ``.bin`` and ``.idx`` files of ``part``, without these endings."""
        return str(self.corpus / f"{part}_text_document")

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Lock the folder within the scope.

        Raises:
            BlockingIOError: another process trains here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"another quickstart trains in {self.path}; wait for it, or end it") from None
            yield

    def saved_iteration(self) -> int:
        """Return the iteration of the latest complete checkpoint; 0 without one."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a run."""

    count: int
    backend: str

    @property
    def global_batch_size(self) -> int:
        """``GLOBAL_BATCH_SIZE``, rounded up to a multiple of the ranks."""
        return -(-GLOBAL_BATCH_SIZE // self.count) * self.count


def find_ranks() -> Ranks:
    """Choose one rank for each GPU, or two on the CPU."""
    import torch

    if torch.cuda.is_available():
        return Ranks(count=torch.cuda.device_count(), backend="nccl")
    return Ranks(count=NUM_GLOO_RANKS, backend="gloo")


def target_iteration(saved_iteration: int, stretch: int) -> int:
    """Return the last iteration of this run: the next multiple of ``stretch``, which an interrupted run has not reached."""
    return (saved_iteration // stretch + 1) * stretch


def training_flags(folder: RunFolder, ranks: Ranks, *, target: int, stretch: int) -> list[str]:
    """Return the flags of ``pretrain_gpt.py``; the learning rate falls to 0 over the second half of the run."""
    flags = shlex.split(MODEL_FLAGS + TRAINING_FLAGS)
    flags += ["--distributed-backend", ranks.backend]
    flags += ["--micro-batch-size", str(ranks.global_batch_size // ranks.count)]
    flags += ["--global-batch-size", str(ranks.global_batch_size), "--train-iters", str(target)]
    flags += ["--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear"]
    flags += ["--lr-decay-iters", str(target), "--lr-wsd-decay-iters", str(stretch // 2)]
    flags += ["--train-data-path", folder.data_prefix("train"), "--valid-data-path", folder.data_prefix("valid")]
    flags += ["--data-cache-path", str(folder.corpus / "cache")]
    flags += ["--save", str(folder.checkpoints), "--load", str(folder.checkpoints)]
    if ranks.backend == "nccl":
        flags.append("--bf16")
    if importlib.util.find_spec("tensorboard") is not None:
        flags += ["--tensorboard-dir", str(folder.tensorboard)]
    return flags


def build_corpus(folder: RunFolder) -> None:
    """Build the corpus in Megatron's indexed format, unless it exists.

    Raises:
        subprocess.CalledProcessError: a tool failed, and has printed why.
    """
    if all(Path(f"{folder.data_prefix(part)}.idx").exists() for part in ("train", "valid")):
        print(f"corpus: {folder.corpus} exists already")
        return
    print("corpus: the sources of this Python's standard library, a byte is a token")
    corpus_tool = [sys.executable, str(REPOSITORY / "examples/stdlib_corpus.py")]
    subprocess.run([*corpus_tool, "--output-folder", str(folder.corpus)], check=True)
    for part in ("train", "valid"):
        tool = [sys.executable, str(REPOSITORY / "tools/preprocess_data.py"), "--append-eod", "--overwrite"]
        files = ["--input", str(folder.corpus / f"{part}.jsonl"), "--output-prefix", str(folder.corpus / part)]
        subprocess.run([*tool, *files], check=True)


def draw_sample(folder: RunFolder) -> str:
    """Sample a text from the trained model, prompt included; write it to ``folder.sample`` and return it."""
    command = [sys.executable, str(REPOSITORY / "examples/sample.py"), "--prompt", PROMPT, f"@{folder.flags}"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **THREADS}).stdout
    folder.sample.write_text(text, encoding="utf-8")
    return text


def run(folder: RunFolder, *, stretch: int) -> None:
    """Train ``stretch`` iterations, sample a text and plot the losses."""
    started = time.monotonic()
    build_corpus(folder)
    ranks = find_ranks()
    saved = folder.saved_iteration()
    target = target_iteration(saved, stretch)
    flags = training_flags(folder, ranks, target=target, stretch=stretch)
    folder.flags.write_text("\n".join(map(shlex.quote, flags)) + "\n", encoding="utf-8")
    where = f"from iteration {saved} in {folder.checkpoints} " if saved else ""
    print(f"training: {where}to iteration {target} on {ranks.count} ranks ({ranks.backend}); details in {folder.log}")
    script = REPOSITORY / "pretrain_gpt.py"
    train(script, flags, num_ranks=ranks.count, log=folder.log, environment=THREADS, show=sys.stdout)
    print("\nThe model continues the first lines:\n" + "-" * 80)
    print(draw_sample(folder).rstrip() + "\n" + "-" * 80)
    with folder.log.open(encoding="utf-8", errors="replace") as lines:
        curves = read_losses(lines)
    has_picture = importlib.util.find_spec("matplotlib") is not None
    if has_picture:
        draw_losses(curves, folder.picture, title="GPT on the standard library's sources", unit="nats per byte")
    validated, loss = max(curves.validation.items())
    print(f"validation loss {loss:.4f} nats per byte after {validated} iterations; {time.monotonic() - started:.0f} s")
    print(f"  sampled text . {folder.sample}")
    print(f"  checkpoint ... {folder.checkpoints / f'iter_{target:07d}'}")
    tensorboard = folder.tensorboard if "--tensorboard-dir" in flags else "left out: tensorboard is not installed"
    print(f"  TensorBoard .. {tensorboard}")
    print(f"  loss curve ... {folder.picture if has_picture else 'left out: matplotlib is not installed'}")
    print(f"  log .......... {folder.log}")
    print(f"The same command trains {stretch} iterations more; more text: examples/sample.py @{folder.flags}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-folder", type=Path, default=Path("runs/quickstart"), help="(default: runs/quickstart)")
    parser.add_argument("--iterations", type=int, default=STRETCH, help=f"iterations of this run (default: {STRETCH})")
    arguments = parser.parse_args(argv)
    if arguments.iterations < 40:
        parser.error(f"--iterations must be at least 40, got {arguments.iterations}: the warm-up takes 20")
    folder = RunFolder(arguments.run_folder)
    try:
        with folder.reserved():
            run(folder, stretch=arguments.iterations)
    except (TrainingInterruptedError, KeyboardInterrupt):
        print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    except subprocess.CalledProcessError as error:
        print(f"quickstart: {shlex.join(error.cmd[1:2])} failed; see above", file=sys.stderr)
        return 1
    except (TrainingError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
