"""Write conversations about sums and a tokenizer for them, to try training on conversations.

    python examples/sums.py --output-folder runs/sums

The folder then has ``sums.jsonl``, and ``tokenizer``, whose tokens are bytes and the special tokens of Nemotron's prompt formats.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<unk>", "</s>", *(f"<SPECIAL_{number}>" for number in (10, 11, 12, 233))]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids are the special tokens and then the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))


def write_sums(path: Path, number: int) -> None:
    """Write lines of three conversations each: a question and its answer."""
    random.seed(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            turns = []
            for _ in range(3):
                first, second = random.randrange(50), random.randrange(50)
                turns += [
                    {"role": "system", "content": "Add."},
                    {"role": "user", "content": f"{first} + {second}"},
                    {"role": "assistant", "content": str(first + second)},
                ]
            print(json.dumps({"messages": turns}), file=file)


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-folder", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=400, help="conversations, three in a line (default: 400 lines)")
    options = parser.parse_args()
    write_tokenizer(options.output_folder / "tokenizer")
    write_sums(options.output_folder / "sums.jsonl", options.lines)


if __name__ == "__main__":
    main()
