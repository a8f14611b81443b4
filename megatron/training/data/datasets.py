"""The datasets of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.fim_dataset import SPLIT_SAMPLE, GPTFIMDataset, GPTFIMDatasetConfig, fim_ids
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.datasets.split import parse_and_normalize_split
from megatron.core.distributed.fsdp.checkpoint import agree
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.training.data.documents import WithDocuments

DEFAULT_SPLIT = "969,30,1"


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Settings of samples whose middle comes last; see ``GPTFIMDatasetConfig``."""

    rate: float = 0.5
    spm_rate: float = 0.5
    split_sample: str | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates: dict[str, float | None] = {"--fim-rate": self.rate, "--fim-spm-rate": self.spm_rate}
        if self.split_sample is not None:
            rates["--fim-fragment-rate (with --fim-split-sample)"] = self.fragment_rate
        for flag, rate in rates.items():
            if rate is None or not 0 <= rate <= 1:
                raise ValueError(f"{flag} must be from 0 to 1, got {rate}")

    def check_tokens(self, tokenizer: MegatronTokenizerBase) -> None:
        """Check that a tokenizer has the tokens that name parts of a text.

        Raises:
            ValueError: it lacks one; names it.
        """
        fim_ids(
            tokenizer, self.tokens if self.split_sample is None else {**self.tokens, SPLIT_SAMPLE: self.split_sample}
        )

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of ``GPTFIMDatasetConfig``."""
        names = ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix")
        return {f"fim_{name}": getattr(self, name) for name in names} | {"fim_extra_tokens": self.tokens}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the data of a run."""

    data_path: tuple[str, ...] | None = None
    """A prefix, or weights and prefixes in turn, that ``split`` divides; None: the next three are given, or mock data."""

    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None

    mock_data: bool = False
    """Use generated samples."""

    sft: bool = False
    """The paths are files of conversations, whose assistants' turns are learned; see ``SFTDataset``."""

    split: str | None = None
    """Parts for training, validation and test of ``data_path``; None: ``DEFAULT_SPLIT``."""

    cache_path: str | None = None
    """Folder of the index cache; None: next to the data."""

    seq_length: int
    """Tokens of a sample."""

    seed: int = 1234
    """Seed of the order of samples."""

    num_workers: int = 2
    """Loader processes of a rank; 0 loads in the training process."""

    order: Literal["single", "cyclic"] = "single"
    """One pass in the order of the index, or epochs in random orders (``CyclicBatchSampler``)."""

    data_sharding: bool = True
    """With "cyclic", each data-parallel rank draws from a part of its own."""

    mmap_bin_files: bool = True
    allow_gaps: bool = False
    """Accept ``.idx`` files that are a selection of the sequences of their ``.bin``."""

    reset_position_ids: bool = False
    """Learned positions begin anew in each document."""

    reset_attention_mask: bool = False
    """Tokens attend within their own document."""

    eod_mask_loss: bool = False
    """Leave the prediction after an end of document out of the loss."""

    allow_ambiguous_pad_tokens: bool = False
    """Leave padding out of the loss also where its id is that of another special token."""

    fim: FillInTheMiddle | None = None
    """Cut texts and train on them with the middle last; None: texts are as they are."""

    separate_validation_sets: bool = False
    """Each corpus of ``valid_data_path`` is a validation set of its own."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1, got {self.seq_length}")
        if self.split is not None:
            try:
                parse_and_normalize_split(self.split)
            except ValueError as error:
                raise ValueError(
                    f"--split must be parts of the data, such as 969,30,1, got {self.split}: {error}"
                ) from error
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            try:
                get_blend_from_list(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from error


class Datasets(NamedTuple):
    """Datasets of training, validation and test; None where there are no samples."""

    train: Any
    valid: Any
    """One dataset, or a list of several sets."""
    test: Any


def _with_documents(dataset: Any, eod: int | None) -> Any:
    if dataset is None:
        return None
    if isinstance(dataset, list):
        return [_with_documents(one, eod) for one in dataset]
    return WithDocuments(dataset, eod)


def build_gpt_datasets(config: DataConfig, tokenizer: MegatronTokenizerBase, sizes: Sequence[int | None]) -> Datasets:
    """Build GPT datasets of at least ``sizes`` samples.

    Args:
        sizes: [3] samples of training, validation and test; 0: no dataset is needed; None: all samples, once.

    Raises:
        ValueError: the data have fewer samples.

    Ranks: all; one rank of each node builds the indices, the others wait for it.
    """
    per_split = (config.train_data_path, config.valid_data_path, config.test_data_path)
    kind: type[MegatronDataset]
    kind, config_kind = (GPTDataset, GPTDatasetConfig) if config.fim is None else (GPTFIMDataset, GPTFIMDatasetConfig)
    dataset_config = config_kind(
        **({} if config.fim is None else config.fim.as_fields()),
        random_seed=config.seed,
        sequence_length=config.seq_length,
        blend=get_blend_from_list(config.data_path),
        blend_per_split=[get_blend_from_list(path) for path in per_split] if any(per_split) else None,
        split=(config.split or DEFAULT_SPLIT) if config.data_path else config.split,
        path_to_cache=config.cache_path,
        mmap_bin_files=config.mmap_bin_files,
        allow_gaps_in_corpora=config.allow_gaps,
        tokenizer=tokenizer,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=False,  # no mask of each pair of tokens: batches say where documents begin
        eod_mask_loss=config.eod_mask_loss,
        allow_ambiguous_pad_tokens=config.allow_ambiguous_pad_tokens,
        create_attention_mask=False,
        multiple_validation_sets=config.separate_validation_sets,
        full_validation=sizes[1] is None,
    )
    kind = SFTDataset if config.sft else MockGPTDataset if config.mock_data else kind
    built = BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, dataset_config).build()
    if config.reset_attention_mask or config.sft:
        built = [_with_documents(dataset, None if config.sft else tokenizer.eod) for dataset in built]
    if dist.is_initialized():  # all ranks refuse alike: with one message
        agree(partial(_check_lengths, built, sizes), lambda _: None)
    else:
        _check_lengths(built, sizes)
    return Datasets(*(None if size == 0 else dataset for dataset, size in zip(built, sizes, strict=True)))


def _check_lengths(built: Sequence[Any], sizes: Sequence[int | None]) -> None:
    for name, dataset, size in zip(("training", "validation", "test"), built, sizes, strict=True):
        if size is None:
            continue
        held = min((0 if part is None else len(part)) for part in (dataset if isinstance(dataset, list) else [dataset]))
        if held < size and (name == "training" or held > 0):
            raise ValueError(
                f"the data must have {size} samples for {name}, got {held}; give weights with --data-path (which "
                "repeats the data), shorten the run or its evaluations, or change --split"
            )
