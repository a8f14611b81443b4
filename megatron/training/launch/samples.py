"""The samples of a run: how many it draws, and this rank's microbatches of them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from megatron.core.datasets.split import parse_and_normalize_split
from megatron.core.process_groups_config import group_rank
from megatron.training.data.batches import BatchConfig, CyclicBatchSampler, SequentialBatchSampler
from megatron.training.data.data_loader import CheckedIds, PaddedToBatches, iterate_batches
from megatron.training.data.datasets import DEFAULT_SPLIT
from megatron.training.loop.evaluation import ValidationSet

if TYPE_CHECKING:
    from megatron.training.arguments import Settings
    from megatron.training.launch.pretrain import TrainingSetup


def num_samples(settings: Settings) -> tuple[int, int | None, int]:
    """Compute the numbers of samples of training, validation and test that the whole run draws, as Megatron-LM does.

    Without training the first is 0. None stands for all samples of the validation data, once.
    """
    loop, batch, validation = settings.loop, settings.batch, settings.validation
    per_evaluation = loop.eval_iters * settings.eval_batch.global_batch_size
    valid = None if validation.full else _num_evaluations(settings) * per_evaluation
    if validation.skip_train:
        return 0, valid, per_evaluation
    return loop.train_samples or batch.consumed_after(loop.train_iters), valid, per_evaluation


def _num_evaluations(settings: Settings) -> int:
    loop = settings.loop
    if settings.validation.skip_train or not loop.eval_interval:
        return 1
    left_out = (loop.start_eval_at_iter or 0) // loop.eval_interval
    return max(1, 1 + loop.train_iters // loop.eval_interval - left_out)


def origin_of_samples(settings: Settings, compared: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that determine the training samples, by their user-visible names, for checkpoints.

    Args:
        compared: the result of ``values_to_compare``, which describes corpora by their content.
    """
    data = settings.data
    names = [name for name in ("data_path", "train_data_path") if getattr(data, name)]
    origin = {name: getattr(data, name) for name in ("seq_length", "sft", "mock_data")} | {
        "dataloader_type": data.order
    }
    origin |= {name: compared[f"data.{name}"] for name in names}
    if "data_path" in names:
        origin["split"] = " ".join(map(str, parse_and_normalize_split(data.split or DEFAULT_SPLIT)))
    return origin


def data_rank(setup: TrainingSetup) -> int:
    """Return this rank's index among the ranks that compute different samples."""
    return group_rank(setup.model.pg_collection.dp)


def train_batches(setup: TrainingSetup, consumed_samples: int) -> Generator[dict[str, torch.Tensor]] | None:
    """Iterate over this rank's microbatches of the training data; None where there are none."""
    data = setup.datasets.train
    return None if data is None else draw(setup, data, setup.settings.batch, consumed_samples)


def test_batches(setup: TrainingSetup) -> Generator[dict[str, torch.Tensor]] | None:
    """Iterate over this rank's microbatches of the test data; None where there are none."""
    data = setup.datasets.test
    return (
        None if data is None or setup.settings.loop.eval_iters == 0 else draw(setup, data, setup.settings.eval_batch, 0)
    )


def validation_sets(setup: TrainingSetup, consumed_samples: int) -> list[ValidationSet]:
    """Return the validation sets, as this rank reads them; none where nothing is to be evaluated.

    Args:
        consumed_samples: those of each set that earlier evaluations have read. A resumed run may evaluate more often than
            planned, and then starts over.
    """
    config, batch = setup.settings.validation, setup.settings.eval_batch
    given = setup.datasets.valid
    sets: list[ValidationSet] = []
    if setup.settings.loop.eval_iters == 0 and not config.full:
        return sets
    for index, data in enumerate(given if isinstance(given, list) else [given]):
        if data is None or len(data) == 0:
            continue
        name = (config.set_names or [str(number) for number in range(index + 1)])[index]
        drawn = PaddedToBatches(data, batch.samples_per_microbatch) if config.full else data
        microbatches = setup.settings.loop.eval_iters * batch.num_microbatches
        if config.full:
            microbatches = len(drawn) // batch.samples_per_microbatch
        sets.append(
            ValidationSet(
                suffix=f"-{name}" if config.separate_sets else "",
                batches=draw(setup, drawn, batch, 0 if config.full else consumed_samples, repeats=True),
                num_microbatches=microbatches,
                num_consumed=0 if config.full else microbatches * batch.samples_per_microbatch,
            )
        )
    return sets


def draw(
    setup: TrainingSetup, dataset: Any, batch: BatchConfig, consumed_samples: int, *, repeats: bool = False
) -> Generator[dict[str, torch.Tensor]]:
    """Iterate over this rank's microbatches of a dataset; ``repeats``: start over after the last sample.

    Ranks over which the model is split draw the same samples.
    """
    config = setup.settings.data
    is_whole = isinstance(dataset, PaddedToBatches)
    if config.order == "cyclic" and not is_whole:
        endless = CyclicBatchSampler(
            batch,
            rank=data_rank(setup),
            total_samples=len(dataset),
            consumed_samples=consumed_samples,
            shards_data=config.data_sharding,
        )
        yield from _load(setup, dataset, endless)
    while True:
        sampler = SequentialBatchSampler(
            batch, rank=data_rank(setup), total_samples=len(dataset), consumed_samples=consumed_samples
        )
        yield from _load(setup, dataset, sampler)
        if not repeats:
            return
        consumed_samples = 0


def _load(setup: TrainingSetup, dataset: Any, sampler: Sampler[list[int]]) -> Generator[dict[str, torch.Tensor]]:
    yield from iterate_batches(
        CheckedIds(dataset, setup.settings.model.padded_vocab_size(setup.vocab_size)),
        sampler,
        num_workers=setup.settings.data.num_workers,
        device=setup.device,
        cp_group=setup.model.pg_collection.cp,
    )
