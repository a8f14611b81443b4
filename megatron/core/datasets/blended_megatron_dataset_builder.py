"""Builder of the train, valid and test datasets of a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch

from megatron.core.datasets.blend import Blend, check_weights, sizes_per_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.build_once import build_once_per_node
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.rank_logging import warn_on_rank_0
from megatron.core.datasets.split import Bookends, Split, documents_of, normalize

logger = logging.getLogger(__name__)

TopLevelDataset = BlendedDataset | MegatronDataset
Sizes = Sequence[int | None]


class BlendedMegatronDatasetBuilder:
    """A builder of the datasets of a configuration.

    Args:
        cls: class of the dataset over one corpus, e.g. ``GPTDataset``.
        sizes: [3] minimum numbers of samples of train, valid and test; None: those of one epoch.
        is_built_on_rank: whether this rank needs the datasets; it gets None otherwise.
        config: the settings.

    Raises:
        ValueError: there are not three sizes, one is negative, or a blend has weights but no size.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        if config.full_validation and self.sizes[Split.valid.value] is not None:
            raise ValueError(
                f"the size of the validation data must be None with full_validation, got {self.sizes[Split.valid.value]}"
            )
        if len(self.sizes) != len(Split) or any(size is not None and size < 0 for size in self.sizes):
            raise ValueError(f"sizes must be {len(Split)} numbers (train, valid, test) or None, got {self.sizes}")
        for split, size, blend in zip(Split, self.sizes, self._blends(), strict=True):
            by_weight = blend is not None and blend[1] is not None and (self.config.blend or len(blend[0]) > 1)
            if size is None and by_weight:
                raise ValueError(
                    f"the {split.name} blend has weights and must have a size, got None; "
                    "give a number of samples, or weights of None"
                )

    def build(self) -> list[TopLevelDataset | list[TopLevelDataset | None] | None]:
        """Build the datasets [3] of train, valid and test; None where a part has no documents.

        With ``multiple_validation_sets`` valid is a list if its blend names several corpora: a dataset for each of them.

        A part of one corpus without a weight is a ``cls``. Otherwise it is a ``BlendedDataset``, in proportion to the
        weights, or without weights to the sizes of the corpora (capped at their sum).

        Raises:
            FileNotFoundError, ValueError: a corpus is missing, damaged, empty or too small for the requested samples.

        Ranks: all must call it; blocks until one rank of each node has built and cached the indices.
        """
        return build_once_per_node(self._build)

    def _build(self) -> list[TopLevelDataset | list[TopLevelDataset | None] | None]:
        if torch.distributed.is_initialized() and not self.is_built_on_rank():
            return [None] * len(Split)
        if self.config.mock:
            return list(self._build_corpus(None, self._split_matrix(), self.sizes))
        if self.config.blend is not None:
            return list(self._build_blend(self.config.blend, self._split_matrix(), self.sizes))
        datasets: list[TopLevelDataset | list[TopLevelDataset | None] | None] = []
        for split, blend in zip(Split, self._blends(), strict=True):
            whole = [(0.0, 1.0) if part is split else None for part in Split]
            if blend is not None and len(blend[0]) == 1:  # one corpus needs no blending, whatever its weight
                blend = (blend[0], None)
            elif blend is not None and split is Split.valid and self.config.multiple_validation_sets:
                sets = [self._build_blend(([prefix], None), whole, self.sizes) for prefix in blend[0]]
                datasets.append([parts[split.value] for parts in sets])
                continue
            datasets.append(None if blend is None else self._build_blend(blend, whole, self.sizes)[split.value])
        return datasets

    def _blends(self) -> list[Blend | None]:
        """Return the blend of each part."""
        per_split = self.config.blend_per_split
        if per_split is None or not any(per_split):
            return [self.config.blend] * len(Split)
        return list(per_split)

    def _split_matrix(self) -> list[Bookends | None]:
        assert self.config.split_matrix is not None, "the configuration makes it from split"
        return self.config.split_matrix

    def _build_blend(
        self, blend: Blend, split_matrix: Sequence[Bookends | None], sizes: Sizes
    ) -> list[TopLevelDataset | None]:
        """Build the parts [3] of a blend of corpora."""
        prefixes, weights = blend
        if weights is None and len(prefixes) == 1:
            return list(self._build_corpus(prefixes[0], split_matrix, sizes))
        asked = [size if bookends else 0 for size, bookends in zip(sizes, split_matrix, strict=True)]
        if weights is None:
            per_corpus: list[list[int | None]] = [[None] * len(Split) for _ in prefixes]
            return [
                self._blend_by_size(part, size)
                for part, size in zip(self._build_corpora(prefixes, split_matrix, per_corpus), asked, strict=True)
            ]
        check_weights(weights)
        shares = normalize(weights)
        targets = [size for size in asked if size is not None]
        surplus = self.config.mid_level_dataset_surplus
        parts = self._build_corpora(prefixes, split_matrix, sizes_per_dataset(shares, targets, surplus=surplus))
        totals = [sum(given) for given in zip(*sizes_per_dataset(shares, targets), strict=True)]
        return [
            self._blend_by_weight(split, part, prefixes, shares, total)
            for split, part, total in zip(Split, parts, totals, strict=True)
        ]

    def _blend_by_weight(
        self,
        split: Split,
        part: Sequence[MegatronDataset | None],
        prefixes: Sequence[str],
        shares: Sequence[float],
        size: int,
    ) -> BlendedDataset | None:
        present = [dataset for dataset in part if dataset is not None]
        if not present:
            return None
        if len(present) < len(part):
            absent = [prefix for prefix, dataset in zip(prefixes, part, strict=True) if dataset is None]
            if size == 0:
                return None
            raise ValueError(
                f"every corpus of a weighted blend must have documents in the {split.name} part, "
                f"got none in {', '.join(absent)}; change the split, or give each part its own blend"
            )
        return BlendedDataset(present, shares, size, self.config)

    def _blend_by_size(self, part: Sequence[MegatronDataset | None], size: int | None) -> BlendedDataset | None:
        present = [dataset for dataset in part if dataset is not None and len(dataset) > 0]
        if not present:
            return None
        lengths = [len(dataset) for dataset in present]
        return BlendedDataset(present, lengths, None if size is None else min(size, sum(lengths)), self.config)

    def _build_corpora(
        self,
        prefixes: Sequence[str],
        split_matrix: Sequence[Bookends | None],
        sizes: Sequence[Sequence[int | None]],
    ) -> list[list[MegatronDataset | None]]:
        """Build [3, D] datasets, ``num_dataset_builder_threads`` corpora at a time."""
        with ThreadPoolExecutor(max_workers=self.config.num_dataset_builder_threads) as pool:
            futures = [
                pool.submit(self._build_corpus, prefix, split_matrix, corpus_sizes)
                for prefix, corpus_sizes in zip(prefixes, sizes, strict=True)
            ]
            corpora = [future.result() for future in futures]
        return [list(part) for part in zip(*corpora, strict=True)]

    def _build_corpus(
        self, prefix: str | None, split_matrix: Sequence[Bookends | None], sizes: Sizes
    ) -> list[MegatronDataset | None]:
        """Build the datasets [3] of one corpus."""
        corpus = self.cls.build_low_level_dataset(prefix, self.config)
        num_pieces = self.cls.numel_low_level_dataset(corpus)
        if num_pieces == 0:
            raise ValueError(f"{prefix} must hold documents, got an empty corpus; prepare it again")
        datasets: list[MegatronDataset | None] = []
        for split, bookends, size in zip(Split, split_matrix, sizes, strict=True):
            documents = numpy.empty(0) if bookends is None else documents_of(bookends, num_pieces)
            datasets.append(self._build_part(corpus, prefix, documents, size, split) if documents.size else None)
            if bookends is not None and not documents.size:
                warn_on_rank_0(
                    logger, "the %s part of %s has no documents (of %d): no dataset", split.name, prefix, num_pieces
                )
        return datasets

    def _build_part(
        self, corpus: Any, prefix: str | None, documents: numpy.ndarray, size: int | None, split: Split
    ) -> MegatronDataset:
        dataset = self.cls(corpus, prefix, documents, size, split, self.config)
        assert size is None or len(dataset) >= size, "plan_epochs plans enough epochs"
        return dataset
