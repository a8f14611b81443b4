"""The file ``progress.txt`` in the folder of ``--save``, in Megatron-LM's format: when jobs started and what they saved."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from megatron.core.regular_file import append_regular, read_regular

FILE_NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"


class ProgressLog:
    """Appends to the file; made when training starts. A damaged file, or one that cannot be written, is reported once.

    Args:
        folder: of ``--save``.
        num_ranks: of the run.
        flops_per_sample: model FLOPs.
        tokens_per_sample: tokens of a sample.
        consumed_samples: samples consumed before this job.

    Ranks: the one that writes.
    """

    def __init__(
        self, folder: Path, *, num_ranks: int, flops_per_sample: int, tokens_per_sample: int, consumed_samples: int
    ) -> None:
        self.path, self.num_ranks = folder / FILE_NAME, num_ranks
        self.flops_per_sample, self.tokens_per_sample = flops_per_sample, tokens_per_sample
        self.consumed_before, self.start_time = consumed_samples, time.time()
        self._problem = ""
        self._first_start, self._flops_at_first_start = self._first_of_this_size(self._read())
        self._append("Starting job")

    def saved(self, iteration: int, consumed_samples: int, *, is_async: bool) -> None:
        """Add a line when a save has ended, or begins in the background."""
        flops = consumed_samples * self.flops_per_sample
        of_job = (consumed_samples - self.consumed_before) * self.flops_per_sample
        elapsed = (datetime.now() - self._first_start).total_seconds()
        fields = (
            "Saving async checkpoint" if is_async else "Saved checkpoint",
            f"Iteration: {iteration}",
            f"Job throughput: {self._rate(of_job, time.time() - self.start_time):.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {self._rate(flops - self._flops_at_first_start, elapsed):.1f} TFLOP/s/GPU",
            f"Floating-point operations: {flops:.2e}",
            f"Tokens (in billions): {consumed_samples * self.tokens_per_sample / 1e9:.2f}",
        )
        self._append("\t".join(fields))

    def async_saved(self, iteration: int) -> None:
        """Add a line when a save in the background has ended."""
        self._append(f"Saved async checkpoint\tIteration: {iteration}")

    def deleted(self, iteration: int) -> None:
        """Add a line when a checkpoint has been deleted."""
        self._append(f"Deleted checkpoint\tIteration: {iteration}")

    def _rate(self, flops: float, seconds: float) -> float:
        return flops / (max(seconds, 1e-9) * 1e12 * self.num_ranks)

    def _read(self) -> list[str]:
        """Return the lines of earlier jobs, and complete the last one, which a crash may have cut."""
        try:
            content = read_regular(self.path)
            if content and not content.endswith(b"\n"):
                append_regular(self.path, "\n")
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._report(f"{self.path} cannot be read ({error})")
            return []
        return content.decode(errors="replace").splitlines()

    def _append(self, text: str) -> None:
        now = datetime.now().strftime(_TIME)
        line = f"{now}\tJob ID: {os.environ.get('SLURM_JOB_ID', '')}\t# GPUs: {self.num_ranks}\t{text}\n"
        try:
            append_regular(self.path, line)
        except (OSError, ValueError) as error:
            self._report(f"{self.path} cannot be written ({error}): it lacks lines of this job")

    def _report(self, problem: str) -> None:
        """Print a problem with the file, the first one alone: no run fails for it."""
        if not self._problem:
            self._problem = problem
            print(f" WARNING: {problem}", flush=True)

    def _first_of_this_size(self, lines: Sequence[str]) -> tuple[datetime, float]:
        """Return when the first of the latest jobs with as many ranks started, which may be this one, and the FLOPs until then."""
        start: datetime | None = None
        flops_at_start, flops, pending, unread = 0.0, 0.0, 0.0, 0
        for line in filter(str.strip, lines):
            try:
                when, _, num_ranks, what, *more = line.split("\t")
                time_of_line = datetime.strptime(when, _TIME)
                saved = (
                    float(more[3].split(": ")[1]) if what in ("Saved checkpoint", "Saving async checkpoint") else 0.0
                )
            except (ValueError, IndexError):
                unread += 1
                continue
            if what == "Saved checkpoint":
                flops = saved
            elif what == "Saving async checkpoint":
                pending = saved
            elif what == "Saved async checkpoint":
                flops = pending or flops
            if num_ranks.split(": ")[-1] != str(self.num_ranks):
                start = None
            elif what == "Starting job" and start is None:
                start, flops_at_start = time_of_line, flops
        if unread:
            self._report(
                f"{self.path} has {unread} lines that are not of its format: they are passed over, and the throughput of "
                "earlier jobs may be wrong"
            )
        return (start, flops_at_start) if start is not None else (datetime.now(), flops)
