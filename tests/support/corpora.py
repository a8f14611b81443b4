"""Corpora, tokenizers and configurations that dataset tests share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

FIXTURES = Path(__file__).parent / "fixtures" / "datasets"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
PARTS = ("train", "valid", "test")


class FixtureTokenizer:
    """The tokenizer that the fixtures were drawn with."""

    vocab_size = 512
    eod = 0
    pad = -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {"class": "FixtureTokenizer"}


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[numpy.number] = numpy.uint16) -> str:
    """Write a corpus of one sequence a document and return its prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        builder.add_document(numpy.array(document, dtype=dtype), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def config(**settings: Any) -> GPTDatasetConfig:
    """Return a configuration like the fixtures'; ``settings`` take precedence."""
    defaults: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 16,
        "tokenizer": FixtureTokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**{**defaults, **settings})


def build(
    sizes: Sequence[int | None], dataset_config: GPTDatasetConfig, cls: type[GPTDataset] = GPTDataset
) -> list[Any]:
    """Return the train, valid and test datasets."""
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, dataset_config).build()


def texts(dataset: Any, count: int | None = None) -> list[list[int]]:
    """Return the first samples of a dataset as Megatron's expected samples are written: inputs and the last label."""
    samples = (dataset[index] for index in range(len(dataset) if count is None else count))
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]
