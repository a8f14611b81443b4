"""Text to ids and back, and which files and settings are refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import TOKENIZER_TYPES, MegatronTokenizerBase, build_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor.\n" * 3


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_bytes_come_back_without_loss(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


def test_byte_level_ids() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer", vocab_size=257)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.bos) == (257, 256, -1, -1)
    assert tokenizer.detokenize([0xC3, 65]) == "\ufffdA"
    assert tokenizer.tokenize("a\ud800") == [97, 63]
    with pytest.raises(ValueError, match=r"must be in \[0, 256\], got 5 to 257"):
        tokenizer.detokenize([5, 257])


def test_null_tokenizer_reads_numbers() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize(" 1 99\n100 ") == [1, 99, 100]
    assert tokenizer.detokenize([1, 99]) == "1 99"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    for text in ("101", "-1", "a", "٣"):
        with pytest.raises(ValueError, match="whole numbers below 101"):
            tokenizer.tokenize(text)


def _huggingface(folder: Path, special: list[str]) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("as_folder", [True, False])
def test_huggingface_tokenizer_of_a_file_or_folder(as_folder: bool, tmp_path: Path) -> None:
    path = _huggingface(tmp_path, ["<pad>", "<begin>", "<end>"])
    special = {"eos_token": {"content": "<end>"}, "pad_token": "<pad>", "bos_token": "<begin>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path if as_folder else path))
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.tokenize("a<end>")[-1] == tokenizer.eod == 2
    assert (tokenizer.pad, tokenizer.bos) == (0, 1)
    assert max(ids) < tokenizer.vocab_size == 300
    assert tokenizer.unique_identifiers["path"] == str(path)


def test_end_of_document_is_found_among_special_tokens(tmp_path: Path) -> None:
    _huggingface(tmp_path, ["<|endoftext|>", "<other>"])
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 0
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<other>"}')
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 1


def test_huggingface_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be given a local tokenizer\.json or its folder, got gpt2"):
        build_tokenizer("HuggingFaceTokenizer", "gpt2")
    path = _huggingface(tmp_path, ["<other>"])
    with pytest.raises(ValueError, match=r"token that ends a document must be known, got candidates \[\]; name it"):
        build_tokenizer("HuggingFaceTokenizer", str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    with pytest.raises(ValueError, match="eos_token must be in the vocabulary, got '<absent>'"):
        build_tokenizer("HuggingFaceTokenizer", str(path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must be JSON"):
        build_tokenizer("HuggingFaceTokenizer", str(path))
    for content in ("[]", "3", '{"eos_token": 3}', '{"eos_token": {"content": []}}', "[" * 100_000, "\ufeff{}"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json must"):
            build_tokenizer("HuggingFaceTokenizer", str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be a tokenizer of the tokenizers library"):
        build_tokenizer("HuggingFaceTokenizer", str(path))


def _sentencepiece(folder: Path, **options: Any) -> str:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(folder / "sp"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return str(folder / "sp.model")


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    path = _sentencepiece(tmp_path, pad_id=3)
    tokenizer = build_tokenizer("SentencePieceTokenizer", path)
    ids = tokenizer.tokenize("The quick dog")
    assert tokenizer.detokenize(ids) == "The quick dog"
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == "The quick dog"
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, 3)
    assert max(ids) < tokenizer.vocab_size


def test_sentencepiece_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"local \.model file, got nowhere"):
        build_tokenizer("SentencePieceTokenizer", "nowhere")
    with pytest.raises(ValueError, match="must have an end of sentence"):
        build_tokenizer("SentencePieceTokenizer", _sentencepiece(tmp_path, eos_id=-1))
    (tmp_path / "sp.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="must be a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "sp.model"))


@pytest.mark.parametrize(
    ("name", "library"), [("HuggingFaceTokenizer", "tokenizers"), ("SentencePieceTokenizer", "sentencepiece")]
)
def test_missing_libraries_are_named(name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_library(module: str, *arguments: Any, **options: Any) -> Any:
        if module == library:
            raise ImportError(module)
        return original(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_library)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        build_tokenizer(name, str(tmp_path))


ARGUMENT_FAULTS = [
    (("HuggingFaceTokeniser", None, None), "got 'HuggingFaceTokeniser'; the nearest is HuggingFaceTokenizer"),
    (("HuggingFaceTokenizer", None, None), "HuggingFaceTokenizer needs --tokenizer-model"),
    (("SentencePieceTokenizer", None, None), "SentencePieceTokenizer needs --tokenizer-model"),
    (("ByteLevelTokenizer", "file", None), "ByteLevelTokenizer reads no file; .* got file"),
    (("ByteLevelTokenizer", None, 300), "must be left out or be the 257 ids of the ByteLevelTokenizer, got 300"),
    (("NullTokenizer", None, None), "NullTokenizer needs --vocab-size"),
    (("NullTokenizer", None, 0), "vocab_size must be positive, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENT_FAULTS, ids=[message for _, message in ARGUMENT_FAULTS])
def test_wrong_arguments_are_refused(arguments: tuple[str, str | None, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(*arguments)


def test_all_types_are_tokenizers() -> None:
    assert issubclass(type(build_tokenizer(TOKENIZER_TYPES[0])), MegatronTokenizerBase)
    assert build_tokenizer().unique_identifiers == {"class": "ByteLevelTokenizer", "vocab_size": 257}
