"""TensorBoard; the only file that imports it."""

from __future__ import annotations


class TensorboardWriter:
    """Scalars go to event files in a folder.

    Raises:
        RuntimeError: the package is not installed.
    """

    def __init__(self, folder: str, *, queue_size: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError(
                "--tensorboard-dir needs the package tensorboard, which is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(log_dir=folder, max_queue=queue_size)

    def add_scalars(self, scalars: dict[str, float], iteration: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
        # An event file that ends with the process shows all that was logged, also when the process is killed.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
