"""The file ``progress.txt`` in the folder of ``--save``, in Megatron-LM's format: when jobs started and what they saved."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

FILE_NAME = "progress.txt"


class ProgressLog:
    """Appends to the file; made when training starts.

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
        self._append("Starting job")
        self._first_start, self._flops_at_first_start = self._first_of_this_size()

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

    def _append(self, text: str) -> None:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{now}\tJob ID: {os.environ.get('SLURM_JOB_ID', '')}\t# GPUs: {self.num_ranks}\t{text}\n")

    def _first_of_this_size(self) -> tuple[datetime, float]:
        """Return when the first of the latest jobs with as many ranks started, and the FLOPs until then."""
        start, flops_at_start, flops, pending = "", 0.0, 0.0, 0.0
        for line in self.path.read_text(encoding="utf-8").splitlines():
            fields = line.split("\t")
            if len(fields) < 4:
                continue
            when, num_ranks, what = fields[0], fields[2].split(": ")[-1], fields[3]
            if what == "Saved checkpoint":
                flops = float(fields[7].split(": ")[1])
            elif what == "Saving async checkpoint":
                pending = float(fields[7].split(": ")[1])
            elif what == "Saved async checkpoint":
                flops = pending or flops
            if num_ranks != str(self.num_ranks):
                start = ""
            elif what == "Starting job" and not start:
                start, flops_at_start = when, flops
        return datetime.strptime(start, "%Y-%m-%d %H:%M:%S"), flops_at_start
