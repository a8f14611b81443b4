"""Flags of data; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.core.regular_file import parse_json, read_regular
from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.data.datasets import FillInTheMiddle

SPLITS = ("train", "valid", "test")


def unquoted(text: str) -> str:
    """Strip quotes, which launch scripts pass on when they keep flags in an array of strings."""
    return text.strip("'\"")


DATA_FLAGS = FlagGroup(
    "data",
    F("--data-path", "a prefix of .bin and .idx, or weights and prefixes in turn"),
    F("--train-data-path", "as --data-path, for training alone"),
    F("--valid-data-path", "as --data-path, for validation alone"),
    F("--test-data-path", "as --data-path, for the test alone"),
    F("--data-args-path", "a text file with what --data-path would be given"),
    F(
        "--per-split-data-args-path",
        "a JSON file with what --train-data-path, --valid-data-path and --test-data-path would be given, "
        "under train, valid and test",
    ),
    F(
        "--sft",
        "train on conversations: data paths are JSON lines with messages, and what the assistant says is "
        "learned; needs --tokenizer-type SFTTokenizer",
    ),
    F("--split", "parts for training, validation and test (default: 969,30,1)", type=unquoted),
    F("--data-cache-path", "folder of the index cache (default: next to the data)"),
    F("--mock-data", "use generated samples instead of --data-path"),
    F("--seq-length", "tokens of a sample"),
    F(
        "--dataloader-type",
        "one pass over the samples in the index's order (single), or epochs, each in a random order "
        "(cyclic); external, a loader of a script's own, is refused (default: single)",
    ),
    F(
        "--no-data-sharding",
        "with --dataloader-type cyclic, ranks draw from one order of all samples, instead of a part each",
    ),
    F("--num-workers", "loader processes of a rank"),
    F("--no-mmap-bin-files", "read .bin files instead of mapping them"),
    F(
        "--allow-gaps-in-corpora",
        "accept .idx files whose sequences do not follow each other in the .bin, such as selections (ours)",
    ),
    F("--reset-position-ids", "learned positions begin again after an end of document"),
    F("--reset-attention-mask", "tokens attend within their own document alone"),
    F(
        "--dataloader-inter-document-masking",
        "the same as --reset-attention-mask, which makes no masks of pairs of tokens either",
    ),
    F("--eod-mask-loss", "leave the prediction after an end of document out of the loss"),
    F(
        "--allow-ambiguous-pad-tokens",
        "leave padding out of the loss also where its id is that of another special token",
    ),
)


FIM_FLAGS = FlagGroup(
    "fill-in-the-middle samples",
    F("--fim-data", "cut texts in three at random and train on them with the middle last"),
    F("--fim-rate", "probability that a text is cut"),
    F("--fim-spm-rate", "probability that the suffix comes first"),
    F("--fim-split-sample", "token between fragments, such as files, that are cut each by itself"),
    F("--fim-fragment-rate", "probability that a fragment is cut"),
    F("--fim-no-prefix", "texts that begin so are not cut"),
    F("--fim-prefix-token", "token for prefix"),
    F("--fim-middle-token", "token for middle"),
    F("--fim-suffix-token", "token for suffix"),
    F("--fim-pad-token", "token for pad"),
    F("--fim-eod-token", "token for eod"),
)


_FIM_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")
"""Tokens that the tokenizer must have, by their use."""


def fill_in_the_middle(args: argparse.Namespace) -> FillInTheMiddle | None:
    """Map the flags of ``FIM_FLAGS``; None without ``--fim-data``."""
    settings = FillInTheMiddle(
        rate=args.fim_rate,
        spm_rate=args.fim_spm_rate,
        split_sample=args.fim_split_sample,
        fragment_rate=args.fim_fragment_rate,
        no_prefix=args.fim_no_prefix,
        tokens={name: getattr(args, f"fim_{name}_token") for name in _FIM_TOKENS},
    )
    return settings if args.fim_data else None


def take_data_args(args: argparse.Namespace, *, paths_exist: bool) -> list[str]:
    """Set data paths to what files of them hold, and return what is wrong with the files.

    Args:
        paths_exist: files that are not there are faults; else a blend in one counts as one prefix.
    """
    faults: list[str] = []
    for dest, flag, others in (
        ("data_args_path", "--data-args-path", ("data_path",)),
        ("per_split_data_args_path", "--per-split-data-args-path", tuple(f"{split}_data_path" for split in SPLITS)),
    ):
        path = getattr(args, dest, None)
        given = [f"--{other.replace('_', '-')}" for other in others if getattr(args, other, None)]
        if path is None:
            continue
        if given:
            faults.append(f"{flag} stands for {' and '.join(given)}; give one of the two")
            continue
        try:
            found = _blends(Path(path), of_splits=len(others) > 1)
        except FileNotFoundError:
            if paths_exist:
                faults.append(f"{flag} must name a file, got {path}, which does not exist")
            found = [[path]] * len(others)
        except (OSError, ValueError) as error:
            faults.append(f"{flag} {path}: {error}")
            found = [[path]] * len(others)
        for other, blend in zip(others, found, strict=True):
            setattr(args, other, blend)
    return faults


def _blends(path: Path, *, of_splits: bool) -> list[list[str] | None]:
    """Read a file with one blend, or with those of the splits.

    Raises:
        OSError: it cannot be read.
        ValueError: it is in another form.
    """
    text = read_regular(path).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    if not of_splits:
        if not text.split():
            raise ValueError("it must hold prefixes, or weights and prefixes in turn, got nothing")
        return [text.split()]
    parsed = parse_json(text)
    if not isinstance(parsed, dict) or not parsed or not set(parsed) <= set(SPLITS):
        raise ValueError(f"it must be a JSON object with keys among {', '.join(SPLITS)}, got {text.strip()[:60]}")
    blends = [parsed.get(split) for split in SPLITS]
    blends = [blend.split() if isinstance(blend, str) else blend for blend in blends]
    if not all(blend is None or (isinstance(blend, list) and all(map(_is_part, blend))) for blend in blends):
        raise ValueError("each split must have a list, or a string, of weights and prefixes")
    return [None if not blend else [str(part) for part in blend] for blend in blends]


def _is_part(value: object) -> bool:
    """Return whether a value is a prefix or a weight; NaN and integers too large for a float are not weights."""
    return isinstance(value, str) or (type(value) in (int, float) and abs(value) < 1e300)  # type: ignore[arg-type]
