"""Writer to TensorBoard; the only file that imports it."""

from __future__ import annotations


class TensorboardWriter:
    """A writer of scalars to event files in a folder."""

    def __init__(self, folder: str, *, queue_size: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise OSError(
                f"--tensorboard-dir {folder} must be a folder that rank 0 can write to, got: {error}; give another one"
            ) from error

    def add_scalars(self, scalars: dict[str, float], iteration: int, *, samples: int | None = None) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
