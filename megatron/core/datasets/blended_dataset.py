"""The dataset of a blend: samples of several datasets, interleaved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megatron.core.datasets.blend import check_weights
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.blending import MAX_DATASETS, build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.index_size import BLEND_NBYTES, check_index_fits
from megatron.core.datasets.megatron_dataset import MegatronDataset, describe, hash_of
from megatron.core.datasets.split import normalize


class BlendedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples of several datasets, interleaved so that at every point each has given its share.

    Args:
        datasets: [D] datasets of the same part (train, valid or test).
        weights: [D] positive shares of the samples; with ``size`` None the number of samples of each dataset.
        size: samples of the blend; None: the sum of ``weights``.
        config: the settings; with ``path_to_cache`` the indices are cached.

    Raises:
        ValueError: datasets and weights do not match, or a dataset is too small for its share.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check(datasets, weights, size)
        self.datasets = list(datasets)
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["datasets"] = [dataset.unique_identifiers for dataset in datasets]
        identifiers["split"] = self.split.name
        identifiers["weights"] = self.weights
        identifiers["size"] = size
        self.unique_identifiers = identifiers
        self.unique_description = describe(identifiers)
        self.unique_description_hash = hash_of(self.unique_description)
        indices = self._load_or_build_indices()
        self.dataset_index, self.dataset_sample_index = indices["dataset_index"], indices["dataset_sample_index"]
        self._check_shares()

    def __len__(self) -> int:
        return int(self.dataset_index.shape[0])

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return a sample, with the index of its dataset as ``dataset_id``."""
        dataset_id = int(self.dataset_index[idx])
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][int(self.dataset_sample_index[idx])]}

    def _load_or_build_indices(self) -> Arrays:
        if self.config.path_to_cache is None:
            return self._build_indices(is_shared=False)
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        return IndexCache(self.config.path_to_cache, stem, self.unique_description).load_or_build(self._build_indices)

    def _build_indices(self, *, is_shared: bool = True) -> Arrays:
        size = int(sum(self.weights)) if self.size is None else self.size
        what = f"the index of a {self.split.name} blend of {size:,} samples"
        check_index_fits(what, size * BLEND_NBYTES, is_shared=is_shared)
        if self.size is None:
            datasets, samples = build_exhaustive_blending_indices([int(weight) for weight in self.weights])
        else:
            datasets, samples = build_blending_indices(self.weights, self.size)
        return {"dataset_index": datasets, "dataset_sample_index": samples}

    def _check_shares(self) -> None:
        counts = numpy.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count > len(dataset):
                raise ValueError(
                    f"the {self.split.name} blend draws {count} samples from {dataset.dataset_path}, which must hold "
                    f"as many, got {len(dataset)}; increase mid_level_dataset_surplus "
                    f"(now {self.config.mid_level_dataset_surplus})"
                )


def _check(datasets: Sequence[MegatronDataset], weights: Sequence[float], size: int | None) -> None:
    check_weights(weights)
    faults = [
        (
            not 0 < len(datasets) <= MAX_DATASETS,
            f"a blend must have 1 to {MAX_DATASETS} datasets, got {len(datasets)}",
        ),
        (
            len(datasets) != len(weights),
            f"a blend must have one weight for each dataset, got {len(weights)} for {len(datasets)}",
        ),
        (
            len({dataset.index_split for dataset in datasets}) > 1,
            "the datasets of a blend must be of the same part (train, valid or test)",
        ),
        (
            size is None and any(weight != int(weight) for weight in weights),
            f"without a size the weights are numbers of samples and must be integers, got {list(weights)}",
        ),
    ]
    for condition, message in faults:
        if condition:
            raise ValueError(message)
