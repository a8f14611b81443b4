"""``--use-checkpoint-args`` takes Megatron-LM's list of arguments from the checkpoint of ``--load``, and says what it took."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.checkpoint import write_alone
from megatron.training.arguments import CheckedLine, check_command_line, parse_settings
from megatron.training.formats import flags
from megatron.training.formats.recognise import find_foreign
from megatron.training.formats.value_kinds import ARCHITECTURE
from megatron.training.launch import gpt_config
from tests.support.huggingface_models import FOLDER, NAMES
from tests.support.megatron_lm_folders import Backend, save_alone
from tools.checkpoint import convert

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --swiglu "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --rotary-base 500000 --padded-vocab-size 128"
)
REST = "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --mock-data"
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 99"


def _save(folder: Path, args: dict[str, Any], *, kind: str, architecture: dict[str, Any] | None = None) -> str:
    """A checkpoint of a run with these arguments, of Megatron-LM or of ours, in which nothing else matters."""
    weights = {"embedding.word_embeddings.weight": torch.zeros(128, 4)}
    path = folder / "iter_0000003"
    if kind == "own":
        write_alone(path, [], {"extra_state.args": args, "extra_state.architecture": architecture or {}})
    elif kind == "torch_dist":
        common = {"iteration": 3, "args": argparse.Namespace(**{**args, "attention_backend": Backend.auto})}
        save_alone({**weights, "common_state/shard_0_1": [common]}, path, flattens=False)
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    else:
        model = {f"module.{name}": tensor for name, tensor in weights.items()}
        save_alone({"model": model, "args": argparse.Namespace(**args), "iteration": 3}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return str(folder)


def _args(line: str) -> dict[str, Any]:
    """The arguments that a run with this command line saves."""
    return dict(parse_settings(line.split()).megatron_lm.values)


def _check(line: str) -> CheckedLine:
    return check_command_line(line.split(), world_size=8)


@pytest.mark.parametrize("kind", ["own", "torch_dist", "fsdp_dtensor"])
def test_the_models_settings_come_from_the_checkpoint(kind: str, tmp_path: Path) -> None:
    folder = _save(tmp_path, _args(f"{MODEL} {REST} {TOKENIZER}"), kind=kind)
    whole = parse_settings(f"{MODEL} {REST} {TOKENIZER} --load {folder}".split())
    short = parse_settings(f"{REST} --vocab-size 99 --load {folder} --use-checkpoint-args".split())
    assert short.model.architecture(99) == whole.model.architecture(99)
    assert short.data == whole.data and short.tokenizer == whole.tokenizer
    assert "num_layers is 4, from the checkpoint" in short.said_once.lines
    assert "rotary_base is 500000, from the checkpoint" in short.said_once.lines
    assert not any("normalization is LayerNorm" in line or "num_experts" in line for line in short.said_once.lines)


@pytest.mark.parametrize(
    "own",
    [
        "--window-size 8,0 --window-attn-skip-freq 2 --window-rotary-base 100 --embedding-scale 8 --sandwich-layernorm",
        "--hybrid-layer-pattern M-*- --mamba-head-dim 8 --mamba-num-groups 1",
    ],
    ids=["windows", "hybrid"],
)
def test_flags_of_ours_come_from_a_run_of_ours(own: str, tmp_path: Path) -> None:
    line = f"{MODEL} {REST} {TOKENIZER} {own}"
    saved = parse_settings(line.split())
    folder = _save(tmp_path, _args(line), kind="own", architecture=saved.model.architecture(99))
    # Megatron-LM's list of arguments has neither windows nor sizes of Mamba, which must be typed.
    typed = " ".join(own.split(" --window-rotary")[0].split())
    short = parse_settings(f"{REST} --vocab-size 99 {typed} --load {folder} --use-checkpoint-args".split())
    assert short.model.architecture(99) == saved.model.architecture(99)


def test_what_the_command_line_gives_stays_or_is_replaced_as_in_megatron_lm_and_that_is_said(tmp_path: Path) -> None:
    folder = _save(tmp_path, _args(f"{MODEL} {REST} {TOKENIZER}"), kind="own")
    typed = "--num-layers 2 --add-qkv-bias --rotary-base 7 --lr 1e-3"
    line = _check(f"{REST} {TOKENIZER} {typed} --load {folder} --use-checkpoint-args")
    assert not line.faults and line.settings is not None
    transformer = line.settings.model.transformer
    assert transformer.num_layers == 2 and not transformer.add_qkv_bias and line.settings.model.rotary_base == 500000
    assert "--num-layers 2 stays; the checkpoint has num_layers 4" in line.said_once
    assert "add_qkv_bias is False, from the checkpoint in place of --add-qkv-bias" in line.said_once
    assert "rotary_base is 500000, from the checkpoint in place of --rotary-base 7" in line.said_once


def test_the_tokenizer_and_the_split_have_flags_of_their_own(tmp_path: Path) -> None:
    saved = _args(f"{MODEL} {REST} {TOKENIZER}") | {"tensor_model_parallel_size": 2, "tokenizer_model": "of/the/run"}
    load = f"{REST} --vocab-size 99 --load {_save(tmp_path, saved, kind='torch_dist')} --use-checkpoint-args"
    line = _check(load)
    assert line.settings is not None and line.settings.grid.size("tp") == 1
    assert "tokenizer_model is of/the/run, from the checkpoint" in line.said_once
    line = _check(f"{load} --use-mp-args-from-checkpoint-args")
    assert line.settings is not None and line.settings.grid.size("tp") == 2
    line = _check(f"{load} --no-use-tokenizer-model-from-checkpoint-args --tokenizer-type NullTokenizer")
    assert not line.faults and not any("tokenizer" in said for said in line.said_once)


def test_a_setting_that_is_not_served_is_refused_with_its_reason(tmp_path: Path) -> None:
    saved = _args(f"{MODEL} {REST} {TOKENIZER}") | {"heterogeneous_layers_config_path": "layers.json"}
    line = _check(f"{REST} {TOKENIZER} --load {_save(tmp_path, saved, kind='own')} --use-checkpoint-args")
    assert any(fault.startswith("--heterogeneous-layers-config-path is refused: ") for fault in line.faults)


def test_without_a_checkpoint_the_command_lines_settings_are_used_and_that_is_said(tmp_path: Path) -> None:
    line = _check(f"{MODEL} {REST} {TOKENIZER} --load {tmp_path}/none --use-checkpoint-args")
    assert not line.faults and f"--use-checkpoint-args: no checkpoint in {tmp_path}/none" in "\n".join(line.said_once)
    line = _check(f"{MODEL} {REST} {TOKENIZER} --use-checkpoint-args")
    assert line.faults == ["--use-checkpoint-args needs --load, got none"]
    line = _check(f"{MODEL} {REST} {TOKENIZER} --load {_save(tmp_path, {}, kind='own')} --use-checkpoint-args")
    assert not line.faults and "a checkpoint without arguments" in "\n".join(line.said_once)


@pytest.mark.parametrize("name", NAMES)
def test_a_hugging_face_model_says_its_settings(name: str) -> None:
    line = _check(f"{REST} {TOKENIZER} --vocab-size 30 --seq-length 16 --load {FOLDER}/{name} --use-checkpoint-args")
    assert not line.faults and line.settings is not None
    found = find_foreign(FOLDER / name)
    assert found is not None and found.differences(line.settings.model.architecture(30)).refused == []


def test_what_saved_arguments_name_is_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    saved = _args(f"{MODEL} {REST} {TOKENIZER}") | {"rank": Attack()}
    for kind in ("torch_dist", "fsdp_dtensor"):
        folder = _save(tmp_path / kind, saved, kind=kind)
        line = _check(f"{REST} --vocab-size 99 --load {folder} --use-checkpoint-args")
        assert not line.faults and line.settings is not None and line.settings.model.transformer.num_layers == 4
    assert not (tmp_path / "ran").exists()


def _hostile(path: str) -> dict[str, Any]:
    """Values that are none of a model's, or that would be something else on a command line."""
    return {
        "a flag": f"--overlap-report={path}",
        "two words": f"4 --save {path}",
        "an en dash": f"\u2013save={path}",
        "a number as a text": "4",
        "true": True,
        "a fraction": 4.5,
        "minus": -1,
        "huge": 10**40,
        "nan": float("nan"),
        "inf": float("inf"),
        "a nest": [[f"--save={path}"]],
        "a list": ["--save", path],
        "an object": {"--save": path},
    }


_OTHERS = ("checkpoint", "logging", "watch", "profiling", "tuning", "ddp", "loop", "distributed")


def _of_others(line: CheckedLine) -> list[Any]:
    """What a checkpoint must not decide."""
    return [getattr(line.settings, name) for name in _OTHERS]


def _hugging_face(folder: Path, name: str, **changed: Any) -> Path:
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text", "gpt2"])
def test_no_entry_of_a_config_json_becomes_a_flag(name: str, tmp_path: Path) -> None:
    """Each is an error that names the file and the key, or leaves all that is not the model's as it was."""
    keys = json.loads((FOLDER / name / "config.json").read_text())
    rest = f"{REST} {TOKENIZER.replace('99', '30')} --seq-length 16 --load {tmp_path} --use-checkpoint-args"
    _hugging_face(tmp_path, name)
    wanted = _of_others(_check(rest))
    refused = set()
    for key in keys:
        for value in _hostile(str(tmp_path / "out")).values():
            _hugging_face(tmp_path, name, **{key: value})
            line = _check(rest)
            if line.faults:
                named = [fault for fault in line.faults if str(tmp_path / "config.json") in fault or "--" in fault]
                assert named, (key, value, line.faults)
                refused |= {key} if any(key in fault for fault in line.faults) else set()
            else:
                assert _of_others(line) == wanted, (key, value)
    assert refused >= keys.keys() & {"num_hidden_layers", "hidden_size", "num_key_value_heads", "rope_theta", "n_layer"}


@pytest.mark.parametrize(
    "key", ["num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "rope_scaling", "layer_types", "vocab_size"]
)
@pytest.mark.parametrize("what", ["a flag", "true", "minus", "nan", "huge", "a nest"])
def test_an_entry_of_another_kind_is_an_error_that_names_file_and_key(key: str, what: str, tmp_path: Path) -> None:
    folder = _hugging_face(tmp_path, "llama", **{key: _hostile(str(tmp_path))[what]})
    line = _check(f"{REST} {TOKENIZER} --seq-length 16 --load {folder} --use-checkpoint-args")
    assert line.settings is None and any(f"{folder / 'config.json'}: {key} must be " in f for f in line.faults)
    with pytest.raises(ValueError, match=f"config.json: {key} must be "):
        find_foreign(folder)


@pytest.mark.parametrize("kind", ["own", "torch_dist", "fsdp_dtensor"])
def test_an_argument_of_another_kind_is_an_error_that_names_file_and_key(kind: str, tmp_path: Path) -> None:
    saved = _args(f"{MODEL} {REST} {TOKENIZER}")
    keys = ("num_layers", "swiglu", "rotary_base", "normalization", "moe_layer_freq", "tokenizer_type")
    for number, key in enumerate(keys):
        for what in ("a flag", "nan", "huge", "a nest", "an object"):
            folder = _save(
                tmp_path / f"{number}{what.replace(' ', '_')}", saved | {key: _hostile("x")[what]}, kind=kind
            )
            line = _check(f"{REST} --vocab-size 99 --load {folder} --use-checkpoint-args")
            assert line.settings is None and any(
                f"iter_0000003/__0_0.distcp: {key} must be " in fault for fault in line.faults
            ), (key, what, line.faults)


@pytest.mark.parametrize("kind", ["own", "torch_dist", "fsdp_dtensor"])
def test_arguments_beyond_the_list_are_left_out(kind: str, tmp_path: Path) -> None:
    """Flags of ours among them: only settings of the model come from a checkpoint."""
    more = {
        "overlap_report": "/x",
        "prometheus_file": "/x",
        "status_page": "/x",
        "fsdp_tune": "/x",
        "save": "/x",
        "wandb_project": "x",
        "--save": "/x",
        "num_layers --save": "/x",
        "profile": True,
    }
    saved = _args(f"{MODEL} {REST} {TOKENIZER}")
    usual = _check(f"{REST} --vocab-size 99 --load {_save(tmp_path, saved, kind=kind)} --use-checkpoint-args")
    architecture = parse_settings(f"{MODEL} {REST} {TOKENIZER}".split()).model.architecture(99) | more
    for number, with_model in enumerate((None, architecture)):
        shutil.rmtree(tmp_path / "iter_0000003")
        _save(tmp_path, saved | more, kind=kind, architecture=with_model)
        line = _check(f"{REST} --vocab-size 99 --load {tmp_path} --use-checkpoint-args")
        assert line.settings is not None and usual.settings is not None
        assert _of_others(line) == _of_others(usual), number
        assert line.settings.model.architecture(99) == usual.settings.model.architecture(99)


def test_settings_of_a_model_that_are_of_another_kind_are_refused_in_conversions_too(tmp_path: Path) -> None:
    line = f"{MODEL} {REST} {TOKENIZER}"
    architecture = parse_settings(line.split()).model.architecture(99) | {"num_layers": "--save=/x"}
    folder = _save(tmp_path, _args(line), kind="own", architecture=architecture)
    with pytest.raises(
        ValueError, match=r"__0_0\.distcp: num_layers must be a whole number from 1 to 16384, got '--save"
    ):
        convert.open_source(Path(folder), step=None, padded_vocab_size=None)
    assert _check(f"{REST} --vocab-size 99 --load {folder} --use-checkpoint-args").settings is None


def test_all_settings_of_a_model_have_a_kind() -> None:
    """Those that checkpoints have, and those that become flags."""
    names = {
        name for of_kind in vars(gpt_config).items() if of_kind[0].startswith("_ARCHITECTURE") for name in of_kind[1]
    }
    names |= {*gpt_config._VARIANTS}
    for of_kind in vars(flags).values():
        names |= set(of_kind) if isinstance(of_kind, dict) and "__name__" not in of_kind else set()
    assert len(names) > 60 and names - set(flags._ACTIVATIONS) - ARCHITECTURE.keys() == set()
