"""Text to ids and back, and which files and settings are refused."""

from __future__ import annotations

import base64
import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import MegatronTokenizerBase, TokenizerConfig
from megatron.core.tokenizers import build_tokenizer as build_from_config

TEXT = "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor.\n" * 3


def build_tokenizer(
    tokenizer_type: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    **others: Any,
) -> MegatronTokenizerBase:
    config = TokenizerConfig(
        tokenizer_type=tokenizer_type, tokenizer_model=tokenizer_model, vocab_size=vocab_size, **others
    )
    return build_from_config(config)


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
    assert tokenizer.tokenize(" 1 98\n99 ") == [1, 98, 99]
    assert tokenizer.detokenize([1, 99]) == "1 99"
    for text in ("100", "-1", "a", "٣"):
        with pytest.raises(ValueError, match="whole numbers below 100"):
            tokenizer.tokenize(text)


def test_null_tokenizer_has_the_ids_that_are_asked_for() -> None:
    """As in Megatron-LM since 2026-04: the end of document is one of the ids, so a power of two stays one."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    other = build_tokenizer("NullTokenizer", vocab_size=100, null_tokenizer_eod_id=7, null_tokenizer_pad_id=0)
    assert (other.eod, other.pad) == (7, 0)
    assert other.unique_identifiers != tokenizer.unique_identifiers
    with pytest.raises(ValueError, match=r"--null-tokenizer-eod-id .* must be below --vocab-size 100, got 100 and -1"):
        build_tokenizer("NullTokenizer", vocab_size=100, null_tokenizer_eod_id=100)


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
    assert build_tokenizer("HuggingFaceTokenizer", str(path), vocab_size=512).vocab_size == 300, "as in Megatron-LM"
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


def test_a_huggingface_tokenizer_puts_its_tokens_at_the_ends_unless_told(tmp_path: Path) -> None:
    """As Megatron-LM's does: corpora of Llama 3 have its begin of a sequence at the start of each document."""
    from tokenizers import Tokenizer, processors

    path = _huggingface(tmp_path, ["<|end_of_text|>", "<begin>"])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer.save(str(path))
    with_ends = build_tokenizer("HuggingFaceTokenizer", str(path))
    without = build_tokenizer("HuggingFaceTokenizer", str(path), tokenizer_hf_no_include_special_tokens=True)
    assert with_ends.tokenize("fox") == [1, *without.tokenize("fox")]
    assert with_ends.unique_identifiers != without.unique_identifiers
    more = build_tokenizer("HuggingFaceTokenizer", str(path), special_tokens=("<new>", "<begin>"))
    assert more.vocab_size == without.vocab_size + 1
    assert more.tokenize("a<new>")[-1] == without.vocab_size


def test_a_name_on_the_hub_is_read_where_it_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub/models--some--model/snapshots/0123"
    for folder in (snapshot, tmp_path / "hub/models--some--model/refs"):
        folder.mkdir(parents=True)
    (tmp_path / "hub/models--some--model/refs/main").write_text("0123")
    _huggingface(snapshot, ["<|endoftext|>"])
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert build_tokenizer("HuggingFaceTokenizer", "some/model").eod == 0
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="some/model")
    assert config.files() == {"tokenizer_model": str(snapshot)}
    with pytest.raises(FileNotFoundError, match=r"got some/other; nothing is downloaded"):
        build_tokenizer("HuggingFaceTokenizer", "some/other")


def _gpt2(folder: Path) -> dict[str, Any]:
    """A vocabulary of the bytes, one merge and the end of a document, as GPT-2's files have them."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@pytest.mark.parametrize("tokenizer_type", [None, "GPT2BPETokenizer"])
def test_gpt2_tokenizer_of_two_files(tokenizer_type: str | None, tmp_path: Path) -> None:
    """Which is Megatron-LM's default, so that a launch line with these files need not name it."""
    files = _gpt2(tmp_path)
    tokenizer = build_tokenizer(tokenizer_type, **files)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (259, 258, 258, -1)
    ids = tokenizer.tokenize("the then")
    assert ids[0] == 257 and ids[-2:] == [257, tokenizer.tokenize("n")[0]] and len(ids) == 4
    for text in (TEXT, " two  spaces\n\nand lines", "ü∂😀"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize("the<|endoftext|>") == [257, 258]
    more = build_tokenizer(tokenizer_type, **files, special_tokens=("<new>",))
    assert (more.vocab_size, more.tokenize("<new>")) == (260, [259])


def test_gpt2_errors_name_the_file(tmp_path: Path) -> None:
    files = _gpt2(tmp_path)
    with pytest.raises(FileNotFoundError, match="--merge-file must be a local file, got nowhere"):
        build_tokenizer(**files | {"merge_file": "nowhere"})
    with pytest.raises(ValueError, match="GPT2BPETokenizer needs --merge-file, got none"):
        build_tokenizer(vocab_file=files["vocab_file"])
    Path(files["merge_file"]).write_text("x y z\n")
    with pytest.raises(ValueError, match="must be a BPE vocabulary, got"):
        build_tokenizer(**files)


def _tiktoken(folder: Path, merged: int = 3) -> str:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"][:merged]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    (folder / "vocab.json").write_text(json.dumps(entries))
    return str(folder / "vocab.json")


def test_tiktoken_tokenizer(tmp_path: Path) -> None:
    """The first ids are special tokens, the ranks come after them, and what is beyond the size is cut off."""
    path = _tiktoken(tmp_path)
    tokenizer = build_tokenizer("TikTokenizer", path, 10 + 259, tiktoken_num_special_tokens=10)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (269, 1, 2, 4)
    assert tokenizer.tokenize("the the") == [10 + 257, 10 + 258]
    assert tokenizer.tokenize("a</s><SPECIAL_9>") == [10 + 97, 2, 9]
    for text in (TEXT, " two  spaces\n\nand lines", "ü∂😀"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    cut = build_tokenizer("TikTokenizer", path, 10 + 257, tiktoken_num_special_tokens=10)
    assert cut.tokenize("the") == [10 + 256, 10 + 101]


def test_tiktoken_patterns_cut_words(tmp_path: Path) -> None:
    """v2 cuts where upper case begins, v1 does not: a merge over that border is made in v1 alone."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"aB"]
    entries = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(tokens)]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    for pattern, num_tokens in ((None, 2), ("v2", 2), ("v1", 1)):
        tokenizer = build_tokenizer(
            "TikTokenizer",
            str(tmp_path / "vocab.json"),
            7 + 257,
            tiktoken_num_special_tokens=7,
            tiktoken_pattern=pattern,
        )
        assert len(tokenizer.tokenize("aB")) == num_tokens


def test_tiktoken_errors_name_the_flag(tmp_path: Path) -> None:
    path = _tiktoken(tmp_path)

    def refused(message: str, **others: Any) -> None:
        given: dict[str, Any] = {"tokenizer_model": path, "vocab_size": 269, "tiktoken_num_special_tokens": 10} | others
        with pytest.raises(ValueError, match=message):
            build_tokenizer("TikTokenizer", **given)

    refused(
        "must have the ranks 0 to 130071, .* got 259; give its number of ids",
        vocab_size=None,
        tiktoken_num_special_tokens=1000,
    )
    refused(
        "--tiktoken-num-special-tokens must be at least the 7 .* below the 269 ids .* got 6",
        tiktoken_num_special_tokens=6,
    )
    refused("--tokenizer-special-tokens must have all of <unk>", special_tokens=("<s>",))
    refused("--tiktoken-pattern must be v1 or v2, got v3", tiktoken_pattern="v3")
    with pytest.raises(FileNotFoundError, match="local JSON file of ranks, got nowhere"):
        build_tokenizer("TikTokenizer", "nowhere", 269, tiktoken_num_special_tokens=10)
    Path(path).write_text('[{"rank": 0}]')
    refused("must be a JSON list of objects with rank and token_bytes, got KeyError")


def test_settings_of_other_types_are_named() -> None:
    """A launch line that is shrunk by appending NullTokenizer keeps the files of its own tokenizer; they need not exist."""
    config = TokenizerConfig(
        tokenizer_type="NullTokenizer", vocab_size=9, vocab_file="nowhere", tokenizer_model="no", tiktoken_pattern="v2"
    )
    assert build_from_config(config).vocab_size == 9
    assert config.not_read() == ["tokenizer_model", "vocab_file", "tiktoken_pattern"]
    assert config.files() == {}


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


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_tokenizer(name: str, tmp_path: Path) -> None:
    path = _sentencepiece(tmp_path, pad_id=3)
    tokenizer = build_tokenizer(name, path)
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
    ("name", "library"),
    [
        ("HuggingFaceTokenizer", "tokenizers"),
        ("GPT2BPETokenizer", "tokenizers"),
        ("SentencePieceTokenizer", "sentencepiece"),
        ("TikTokenizer", "tiktoken"),
    ],
)
def test_missing_libraries_are_named(name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_library(module: str, *arguments: Any, **options: Any) -> Any:
        if module == library:
            raise ImportError(module)
        return original(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_library)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        build_tokenizer(name, str(tmp_path), vocab_file=str(tmp_path), merge_file=str(tmp_path))


ARGUMENT_FAULTS = [
    (("HuggingFaceTokeniser", None, None), "got 'HuggingFaceTokeniser'; the nearest is HuggingFaceTokenizer"),
    (("HuggingFaceTokenizer", None, None), "HuggingFaceTokenizer needs --tokenizer-model"),
    (("SentencePieceTokenizer", None, None), "SentencePieceTokenizer needs --tokenizer-model"),
    (("ByteLevelTokenizer", None, 300), "must be left out or be the 257 ids of the ByteLevelTokenizer, got 300"),
    (("NullTokenizer", None, None), "NullTokenizer needs --vocab-size"),
    (("NullTokenizer", None, 0), "vocab_size must be positive, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENT_FAULTS, ids=[message for _, message in ARGUMENT_FAULTS])
def test_wrong_arguments_are_refused(arguments: tuple[str, str | None, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(*arguments)


def test_without_files_the_tokens_are_bytes() -> None:
    assert build_tokenizer().unique_identifiers == {"class": "ByteLevelTokenizer", "vocab_size": 257}
