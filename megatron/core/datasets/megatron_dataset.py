"""Base class of datasets over one corpus: a part of the documents, and a description from which cache names follow."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import numpy
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.split import Split


class MegatronDataset(ABC, torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of one part of one corpus.

    Args:
        dataset: the corpus.
        dataset_path: its prefix; None for mock data.
        indices: [D] int32 ids of the documents of this part.
        num_samples: minimum number of samples; None: those of one epoch.
        index_split: the part (train, valid or test).
        config: the settings.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["dataset_path"] = dataset_path
        self.unique_identifiers["num_samples"] = num_samples
        self.unique_identifiers["index_split"] = index_split.name
        for attribute in self._key_config_attributes():
            self.unique_identifiers[attribute] = getattr(config, attribute)
        self.unique_identifiers.update(self._key_contents())
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = hash_of(self.unique_description)

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of pieces of the corpus, which the split divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the corpus."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """List the settings on which the indices depend."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _key_contents(self) -> dict[str, Any]:
        """Return properties of the corpus on which the indices depend, so that a rewritten corpus has other caches."""
        return {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]: ...


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """Format identifiers as text; an object such as a tokenizer is described by its own ``unique_identifiers``."""
    return json.dumps(
        identifiers, indent=4, default=lambda value: getattr(value, "unique_identifiers", type(value).__qualname__)
    )


def hash_of(description: str) -> str:
    """Hash a description for the name of a cache file."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()
