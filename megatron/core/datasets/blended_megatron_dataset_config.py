"""Settings of datasets: corpora, their split and their blend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.datasets.blend import Blend
from megatron.core.datasets.split import (
    Bookends,
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

MOCK_SPLIT = "1,1,1"


@dataclass(frozen=True, kw_only=True)
class BlendedMegatronDatasetConfig:
    """Settings of all datasets; fields and defaults are Megatron-Core's."""

    random_seed: int
    """Seed of all shuffles."""

    sequence_length: int
    """Tokens of a sample that the model gets."""

    blend: Blend | None = None
    """Prefixes [D] and weights [D] of the corpora that ``split`` divides; weights None: their sizes. Without ``blend`` and
    ``blend_per_split`` the data is mock data."""

    blend_per_split: list[Blend | None] | None = None
    """A blend, or None, for each of train, valid and test, instead of ``blend`` and ``split``."""

    split: str | None = None
    """Shares of train, valid and test of each corpus of ``blend``, e.g. "969,30,1"."""

    num_dataset_builder_threads: int = 1
    """Corpora of a blend that are opened and indexed concurrently."""

    path_to_cache: str | None = None
    """Folder of the cached indices. None: beside each corpus; the indices of a blend are then not cached."""

    mmap_bin_files: bool = True
    """Map ``.bin`` files into memory; otherwise read them piece by piece."""

    allow_gaps_in_corpora: bool = False
    """Accept indices whose sequences do not fill their ``.bin`` file one after the other; ours."""

    tokenizer: Any = None
    """A tokenizer with ``eod``, and optionally ``pad``, ``vocab_size`` and ``unique_identifiers``."""

    mid_level_dataset_surplus: float = 0.005
    """Fraction by which each corpus of a weighted blend is indexed beyond its share of the samples: a blend may draw a few
    more from a corpus than its weight says."""

    allow_ambiguous_pad_tokens: bool = False
    """Use the tokenizer's padding id even if it is also another special id. Otherwise such an id is not treated as
    padding: it would take real ends of documents out of the loss."""

    multiple_validation_sets: bool | None = None
    """Each corpus of the validation blend of ``blend_per_split`` is a dataset of its own; they are not blended."""

    full_validation: bool | None = None
    """The validation data are all their samples, once: their size must be None."""

    fast_cache_load: bool = False
    """Not served."""

    defer_npy_index_mmap: bool = False
    """Not served."""

    split_matrix: list[Bookends | None] | None = field(init=False, default=None)
    """[3] start and end of each part as fractions, computed from ``split``."""

    mock: bool = field(init=False, default=False)
    """Whether the data is mock data."""

    def __post_init__(self) -> None:
        for condition, message in self._refusals():
            if condition:
                raise NotImplementedError(message)
        for condition, message in self._faults():
            if condition:
                raise ValueError(message)
        if self.blend_per_split is not None and any(self.blend_per_split):
            return
        if self.blend is None:
            object.__setattr__(self, "mock", True)
            object.__setattr__(self, "split", MOCK_SPLIT)
        assert self.split is not None, "checked above"
        shares = parse_and_normalize_split(self.split)
        object.__setattr__(self, "split_matrix", convert_split_vector_to_split_matrix(shares))

    def _refusals(self) -> list[tuple[bool, str]]:
        """List (condition, message) of settings that are not served."""
        return [
            (
                self.fast_cache_load,
                "fast_cache_load is not served: cached indices are always verified",
            ),
            (
                self.defer_npy_index_mmap,
                "defer_npy_index_mmap is not served: cached indices are always verified",
            ),
        ]

    def _faults(self) -> list[tuple[bool, str]]:
        """List (condition, message) of settings that are out of range or contradict each other."""
        per_split = self.blend_per_split is not None and any(self.blend_per_split)
        blends = [blend for blend in [self.blend, *(self.blend_per_split or [])] if blend is not None]
        return [
            (self.sequence_length < 1, f"sequence_length must be positive, got {self.sequence_length}"),
            (
                self.num_dataset_builder_threads < 1,
                f"num_dataset_builder_threads must be positive, got {self.num_dataset_builder_threads}",
            ),
            (
                self.mid_level_dataset_surplus < 0,
                f"mid_level_dataset_surplus must not be negative, got {self.mid_level_dataset_surplus}",
            ),
            (per_split and self.blend is not None, "blend and blend_per_split exclude each other, got both"),
            (
                per_split and self.split is not None,
                f"split divides the corpora of blend and must be None with blend_per_split, got {self.split!r}",
            ),
            (
                per_split and len(self.blend_per_split or []) != len(Split),
                f"blend_per_split must have {len(Split)} entries (train, valid, test), "
                f"got {len(self.blend_per_split or [])}",
            ),
            (
                self.blend is not None and self.split is None,
                "split must be given with blend, e.g. split='969,30,1', got None",
            ),
            (
                any(not prefixes for prefixes, _ in blends),
                "a blend must name one corpus or more, got an empty list of prefixes",
            ),
            (
                any(weights is not None and len(weights) != len(prefixes) for prefixes, weights in blends),
                f"a blend must have one weight for each prefix, or weights of None, got {blends}",
            ),
        ]
