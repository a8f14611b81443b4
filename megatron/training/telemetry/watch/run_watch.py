"""What rank 0 tells of a run while it runs, beside the log lines: the time that is left, and files that show how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.training.telemetry.log_line import LogRecord
from megatron.training.telemetry.watch.board import Board
from megatron.training.telemetry.watch.history import finite
from megatron.training.telemetry.watch.paced_thread import PacedThread
from megatron.training.telemetry.watch.run_state import About
from megatron.training.telemetry.watch.time_left import TimeLeft, format_duration

_INTERVAL_S = 5.0
"""The least seconds between two writings of the files."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Settings of what shows how a run goes."""

    time_left_interval_s: float = 60.0
    """Seconds between lines with the time that is left; 0: there are none. They follow log lines."""

    status_page: str | None = None
    """File of a page about the run; its history is kept beside it."""

    prometheus_file: str | None = None
    """File of metrics, for the textfile collector of Prometheus's node exporter."""

    def __post_init__(self) -> None:
        if not self.time_left_interval_s >= 0:
            raise ValueError(
                f"--time-left-interval must be 0 (no lines) or more seconds, got {self.time_left_interval_s}"
            )
        if self.prometheus_file is not None and not self.prometheus_file.endswith(".prom"):
            raise ValueError(
                f"--prometheus-file must end with .prom, since node_exporter reads no others, got {self.prometheus_file}"
            )

    @property
    def writes_files(self) -> bool:
        """Whether there is a file to write."""
        return bool(self.status_page or self.prometheus_file)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What makes rates of a log line's values."""

    num_devices: int
    tokens_per_sample: int
    flops_per_sample: int


class RunWatch:
    """Follows a run, prints the time that is left, and keeps its files.

    Training only hands over what is known on the host; a thread of its own writes, at most a thousandth of the time. What
    it cannot write is told once and stops nobody.

    Args:
        time_left: at the point where training starts.
        about: None: nothing is written.
        engine_memory: returns bytes by kind once steps have run.
        clock: in seconds.

    Raises:
        OSError: a file cannot be written; names its flag.

    Ranks: 0.
    """

    def __init__(
        self,
        config: WatchConfig,
        time_left: TimeLeft,
        *,
        scale: Scale,
        about: About | None = None,
        engine_memory: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.time_left, self.scale, self._clock = config, time_left, scale, clock
        self._engine_memory = engine_memory
        self._next_line_s = clock() + config.time_left_interval_s
        self._pause: tuple[str, float] | None = None
        self._unsaved: tuple[int, float] | None = None  # a save in the background
        self._has_ended = self._knows_memory = False
        self._board: Board | None = None
        if about is not None and config.writes_files:
            self._board = self._begin(about)
            self._thread = PacedThread(self._board.write, interval_s=_INTERVAL_S)

    def _begin(self, about: About) -> Board:
        page, prometheus = self.config.status_page, self.config.prometheus_file
        for flag, path, name in (("--status-page", page, "status.html"), ("--prometheus-file", prometheus, "run.prom")):
            if path and Path(path).is_dir():
                raise OSError(f"{flag} {path} must be a file, got a folder; give {Path(path) / name}, say")
        board = Board(about, page=page and Path(page), prometheus=prometheus and Path(prometheus))  # type: ignore[arg-type]
        board.set_progress(**self._progress())
        start = self.time_left.iteration
        try:
            board.begin(start, f"training goes on after iteration {start}" if start else "training starts")
        except (OSError, ValueError) as error:
            flags = {"--status-page": page, "--prometheus-file": prometheus}
            asked = " and ".join(f"{flag} {path}" for flag, path in flags.items() if path)
            raise OSError(
                f"{asked} must be files that rank 0 can write, new or of an earlier start, got: {error}; or give another one"
            ) from error
        return board

    def _post(self, act: Callable[..., None], *given: Any, **named: Any) -> None:
        self._thread.post(partial(act, *given, **named))

    def add_line(self, record: LogRecord) -> None:
        """Take the values of a log line."""
        steps = record.iteration - self.time_left.iteration
        samples = record.consumed_samples - self.time_left.consumed_samples
        seconds = steps * record.ms_per_iteration / 1000.0
        values = self._values(record, samples / seconds if seconds > 0 else None)
        if record.is_due:  # else the next line counts these iterations too
            self.time_left.add_interval(record.iteration, record.consumed_samples, seconds)
            self._print_time_left()
        if self._board is not None:
            self._post(self._board.add_line, record.iteration, time.time(), values, is_due=record.is_due)
            self._post(self._board.set_progress, **self._progress(), **self._memory(record))

    def _memory(self, record: LogRecord) -> dict[str, Any]:
        """Return the engine's memory, once: after the first steps it stays as planned."""
        if self._knows_memory or not record.is_due:
            return {}
        self._knows_memory = True
        return {"engine_memory": dict(self._engine_memory())}

    def _values(self, record: LogRecord, samples_per_second: float | None) -> dict[str, float | None]:
        """Return the values of a line by the names that the page shows."""
        values: dict[str, float | None] = {
            "loss": record.loss,
            "loss low": record.loss,
            "loss high": record.loss,
            **record.auxiliary_losses,
            "grad norm": record.grad_norm,
            "grad norm low": record.grad_norm,
            "grad norm high": record.grad_norm,
            "params norm": record.params_norm,
            "num zeros": record.num_zeros,
            "learning rate": record.learning_rate,
            "decoupled learning rate": record.decoupled_learning_rate,
            "loss scale": record.loss_scale if record.loss_scale != 1.0 else None,
            "batch size": record.global_batch_size,
            "ms per iteration": record.ms_per_iteration,
            "skipped iterations": record.skipped_iterations,
            "nan iterations": record.nan_iterations,
        }
        if samples_per_second is not None:
            of_device = samples_per_second / self.scale.num_devices
            values["tokens/s/GPU"] = of_device * self.scale.tokens_per_sample
            values["TFLOP/s/GPU"] = of_device * self.scale.flops_per_sample / 1e12
        values |= {f"{kind} (MiB)": mebibytes for kind, mebibytes in record.memory.items()}
        # Where every iteration has been skipped, no norm is known, and the point says so.
        return {name: value for name, value in values.items() if value is not None or name.startswith("grad norm")}

    def _progress(self) -> dict[str, Any]:
        left = self.time_left
        return {
            "iteration": left.iteration,
            "last_iteration": left.last_iteration,
            "consumed_samples": left.consumed_samples,
            "consumed_tokens": left.consumed_samples * self.scale.tokens_per_sample,
            "fraction_done": left.fraction_done,
            "seconds_left": left.seconds(),
            "progress": left.sentence(),
        }

    def _print_time_left(self) -> None:
        interval, now = self.config.time_left_interval_s, self._clock()
        if interval and now >= self._next_line_s and self.time_left.fraction_done < 1:
            self._next_line_s = now + interval
            print(f" {self.time_left.sentence()}", flush=True)

    def pause(self, what: str) -> None:
        """Note that no steps run from now on, and what does; it ends a pause before."""
        self.resume()
        self._pause = (what, self._clock())
        if self._board is not None:
            self._post(self._board.pause, what, time.time())

    def resume(self) -> None:
        """Note that steps run from now on."""
        if self._pause is None:
            return
        what, began = self._pause
        self._pause, seconds = None, self._clock() - began
        self.time_left.add_pause(what, seconds)
        if self._board is not None:
            self._post(self._board.resume, what, seconds, time.time())

    def evaluated(self, name: str, loss: float, iteration: int) -> None:
        """Take the loss of an evaluation."""
        if self._board is not None:
            self._post(self._board.history.add_evaluation, iteration, time.time(), name, finite(loss))

    def saved(self, iteration: int, consumed_samples: int, *, is_async: bool) -> None:
        """Note a save that has ended, or begins in the background."""
        if is_async:
            self._unsaved = (iteration, self._clock())
        else:
            self._tell("save", iteration, f"saved iteration {iteration}{self._in_pause()}")

    def async_saved(self, iteration: int) -> None:
        """Note that a save in the background has ended."""
        began = self._unsaved[1] if self._unsaved is not None else self._clock()
        text = f"saved iteration {iteration}, in the background within {format_duration(self._clock() - began)}"
        self._tell("save", iteration, text)

    def deleted(self, iteration: int) -> None:
        """Note nothing: what is deleted was asked for."""

    def add_overlap_report(self, page: Path, iteration: int) -> None:
        """Link an overlap report from the page, with what it says in a sentence."""
        if self._board is not None:
            self._post(self._board.add_overlap_report, page, iteration, time.time())

    def _in_pause(self) -> str:
        if self._pause is None:
            return ""
        seconds = self._clock() - self._pause[1]
        return f" in {seconds:.1f} s" if seconds < 10 else f" in {format_duration(seconds)}"

    def warn(self, text: str) -> None:
        """Note a warning."""
        self._tell("warning", self.time_left.iteration, text)

    def tell_of_silence(self, ranks: Sequence[tuple[int, str, float, str]]) -> None:
        """Take the ranks that give no sign of life: rank, host, when the last one was given, where it was. Does not block."""
        if self._board is not None:
            self._post(self._board.set_silent, ranks, time.time())

    def follow_warnings(self, take: Callable[[], Iterable[str]]) -> None:
        """Ask with each writing for the warnings that other ranks have left. The thread calls it."""
        if self._board is not None:
            self._post(setattr, self._board, "take_warnings", take)

    def end(self, reason: str, *, iteration: int, consumed_samples: int) -> None:
        """Note that training has ended as it should, after an iteration that need not have had a log line."""
        self.time_left.iteration, self.time_left.consumed_samples = iteration, consumed_samples
        if self._board is not None:
            self._post(self._board.set_progress, **self._progress())
        self._end("end", f"training ended: {reason}")

    def fail(self, error: BaseException) -> None:
        """Note the error that ends the run."""
        what = f"{type(error).__name__}: {error}"
        self._end("failure", "stopped by Ctrl-C (SIGINT)" if isinstance(error, KeyboardInterrupt) else what)

    def tell_of_failure(self, text: str) -> None:
        """Note that another rank has failed, which ends this one too, and write it; waits a few seconds at most."""
        self._end("failure", text)
        self.close()

    def _end(self, what: str, text: str) -> None:
        if self._board is not None and not self._has_ended:
            self._post(self._board.end, what, text, time.time())
        self._has_ended = True

    def _tell(self, what: str, iteration: int, text: str) -> None:
        if self._board is not None:
            self._post(self._board.history.add_event, what, iteration, time.time(), text)

    def close(self) -> None:
        """Write what is left; waits a few seconds at most."""
        if self._board is not None:
            self._thread.close()
