"""Loading of microbatches from a dataset to the device."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron.core.transformer.context_parallel import get_batch_on_this_cp_rank
from megatron.training.data.documents import collate


class PaddedToBatches(Dataset[dict[str, Tensor]]):
    """A dataset that is padded to a multiple of some number with samples that count nothing: their loss mask is zero.

    Args:
        dataset: of dicts of tensors, with a ``loss_mask``; not empty.
    """

    def __init__(self, dataset: Any, multiple: int) -> None:
        self.dataset, self._length = dataset, -(-len(dataset) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        if idx < len(self.dataset):
            sample: dict[str, Tensor] = self.dataset[idx]
            return sample
        sample = self.dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


class CheckedIds(Dataset[dict[str, Tensor]]):
    """A dataset whose ids of tokens are checked where a sample is read: on the host, in the loader's process.

    An embedding that is asked for an id that it has not ends the run with an error of a kernel, which names nothing.

    Args:
        dataset: of dicts of tensors; ``tokens`` and ``labels`` are checked where there are any.
        num_ids: of the model. Labels may be negative where they do not count.
    """

    def __init__(self, dataset: Any, num_ids: int) -> None:
        self.dataset, self.num_ids = dataset, num_ids

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = self.dataset[idx]
        for name in ("tokens", "labels"):
            ids = sample.get(name)
            if isinstance(ids, Tensor) and ids.numel() and not ids.is_floating_point():
                least, most = (int(extreme) for extreme in ids.aminmax())
                if most >= self.num_ids or (least < 0 and name == "tokens"):
                    self._refuse(idx, name, ids.flatten())
        return sample

    def _refuse(self, idx: int, name: str, ids: Tensor) -> None:
        bad = ids >= self.num_ids
        at = int((bad if name == "labels" else bad | (ids < 0)).nonzero()[0])
        raise ValueError(
            f"ids of tokens must be from 0 to {self.num_ids - 1}, since the model has {self.num_ids} (the tokenizer's, padded), got "
            f"{int(ids[at])} at position {at} of the {name} of sample {idx}: the data were prepared with another tokenizer; give theirs, or a "
            "larger --vocab-size or --padded-vocab-size"
        )


def iterate_batches(
    dataset: Dataset[Any],
    sampler: Sampler[list[int]],
    *,
    num_workers: int,
    device: torch.device,
    cp_group: ProcessGroup | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches on ``device``: one tensor for each key of the samples, stacked over [B].

    Args:
        cp_group: the ranks that split each sequence; they use the same sampler, and each yields its part.

    Loader processes ignore SIGTERM: a job scheduler sends it to all processes, and training needs data until it has saved.
    So nothing but ``close`` of the iterator, or its last batch, ends them; Python's exit would wait for them forever.

    Ranks: each its own; does not make the host wait for the device.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
        worker_init_fn=_ignore_termination if num_workers > 0 else None,
    )
    iterator = iter(loader)
    try:
        for batch in iterator:
            # Cut on the device: a cut on the host would copy out of pinned memory.
            on_device = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            yield get_batch_on_this_cp_rank(on_device, cp_group)
    finally:
        if num_workers > 0:
            _end_workers(iterator)


def _end_workers(iterator: Any) -> None:
    """End the loader processes, as the iterator's own destructor would; tracebacks may keep the iterator alive."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # it hangs, in a file system for instance, and ignores SIGTERM
            worker.kill()


def _ignore_termination(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
