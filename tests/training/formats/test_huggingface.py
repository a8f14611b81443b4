"""Models of Hugging Face are read as they lie on disk, compute the same logits here, and are written back bit for bit."""

from __future__ import annotations

import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron.core.distributed.fsdp.checkpoint import CheckpointReader
from megatron.core.distributed.fsdp.huggingface import write_checksums
from megatron.training.arguments import parse_settings
from megatron.training.formats import copying
from megatron.training.formats.architecture import build_model, comparable
from megatron.training.formats.copying import memory_nbytes, write_huggingface
from megatron.training.formats.flags import flags_of
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.huggingface import family_for
from megatron.training.formats.recognise import find_foreign
from tests.support.huggingface_models import (
    FOLDER,
    NAMES,
    VOCAB_SIZE,
    WITH_GRADIENTS,
    expected,
    expected_gradients,
    logits_of,
    stored_tensors,
)
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, Run, train_one
from tools.checkpoint import convert

_TRAINING = (
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 0 --weight-decay 0 --mock-data --num-workers 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE - 1} --log-interval 1 --eval-iters 0 "
    "--distributed-backend gloo"
)


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}


def _opened(name: str) -> ForeignCheckpoint:
    found = find_foreign(FOLDER / name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """fp32, so the two differ by the order of sums alone; the vocabulary is padded from 40 ids to 64."""
    found = _opened(name)
    architecture = found.settings(padded_vocab_size=64)
    tokens, logits = expected(name)
    torch.testing.assert_close(
        logits_of(found.reader(architecture), architecture, tokens), logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A folder whose weights are the gradients is read in our layout, as the weights are."""
    found, (tokens, _) = _opened(name), expected(name)
    model = build_model(found.architecture).eval()
    reader = found.reader(found.architecture)
    model.load_state_dict({key: reader.tensor(key) for key in model.state_dict()}, strict=True)
    positions = torch.arange(15).expand(2, -1)
    model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
    shutil.copytree(FOLDER / name, tmp_path / "gradients")
    biases = {key: torch.zeros(8) for key in stored_tensors(FOLDER / name) if key.endswith("e_score_correction_bias")}
    save_file(expected_gradients(name) | biases, tmp_path / "gradients" / "model.safetensors")
    gradients = find_foreign(tmp_path / "gradients")
    assert gradients is not None
    theirs = gradients.reader(gradients.architecture)
    for key, parameter in model.named_parameters():
        true = theirs.tensor(key)  # small elements are sums of large ones
        if key.endswith("out_norm.weight"):
            true = true + 1.0  # weights, not gradients, are one more there
        torch.testing.assert_close(
            parameter.grad, true, atol=max(1e-6, 5e-6 * float(true.abs().max())), rtol=1e-4, msg=key
        )


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same_bit_for_bit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through a checkpoint of ours with a padded vocabulary; the settings come back, too."""
    own, back = tmp_path / "own", tmp_path / "back"
    assert convert.main([str(FOLDER / name), str(own), "--padded-vocab-size", "64"]) == 0
    assert "bytes of tensors are in memory at once" in capsys.readouterr().out
    arguments = [str(own), str(back), "--to", "huggingface", "--vocab-size", str(VOCAB_SIZE)]
    assert convert.main([*arguments, "--max-shard-gb", "1e-5"]) == 0
    before, after = stored_tensors(FOLDER / name), stored_tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert find_foreign(back).architecture == _opened(name).architecture
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("shard_gb", ["5", "1e-5"], ids=["one file", "an index"])
def test_a_flipped_bit_of_a_folder_that_was_written_here_is_refused(shard_gb: str, tmp_path: Path) -> None:
    """The safetensors format has no checksums; the side file is not looked at by others, and without it nothing is compared."""
    convert.main([str(FOLDER / "llama"), str(tmp_path / "own")])
    folder = tmp_path / "back"
    assert convert.main([str(tmp_path / "own"), str(folder), "--to", "huggingface", "--max-shard-gb", shard_gb]) == 0

    def read(*, verify: bool = True) -> dict[str, torch.Tensor]:
        found = find_foreign(folder, verify=verify)
        assert found is not None
        reader = found.reader(found.architecture)
        return {name: reader.tensor(name) for name in reader.entries}

    wanted, draw = read(), random.Random(0)
    files = sorted(folder.iterdir())
    assert (
        {"checksums.json", "config.json"} <= {file.name for file in files} and len(files) == 3
    ) or shard_gb == "1e-5"
    for file in files:
        whole = file.read_bytes()
        for number in range(20):
            changed = bytearray(whole)
            bit = draw.randrange(8 * len(whole)) if number else 8 * len(whole) - 8
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises((ValueError, FileNotFoundError, NotImplementedError), match=str(folder)):
                read()
        file.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0, "rope_parameters": None}))
    with pytest.raises(ValueError, match=r"config\.json must have the checksum .* remove checksums\.json"):
        read()
    assert read(verify=False).keys() == wanted.keys()
    (folder / "checksums.json").unlink()
    assert read().keys() == wanted.keys()


def test_ids_of_special_tokens_come_back(tmp_path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
    model = _copy("llama", tmp_path / "model", lambda config: config.update(ids))
    for source, target, kind in ((model, "own", "own"), (tmp_path / "own", "core", "torch_dist")):
        assert convert.main([str(source), str(tmp_path / target), "--to", kind]) == 0
    for kind in ("model", "own", "core"):
        assert convert.main([str(tmp_path / kind), str(tmp_path / f"{kind} back"), "--to", "huggingface"]) == 0
        assert ids.items() <= json.loads((tmp_path / f"{kind} back" / "config.json").read_text()).items()


def test_the_flags_of_a_model_have_its_multi_token_prediction() -> None:
    flags = f"{_TRAINING} --train-iters 1 {' '.join(flags_of(_opened('llama').architecture))}".split()
    model = parse_settings([*flags, "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]).model
    printed = flags_of(model.architecture(VOCAB_SIZE))
    assert printed[printed.index("--mtp-num-layers") + 1] == "2" and "--mtp-use-repeated-layer" in printed


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_flags_are_those_of_the_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _opened(name)
    assert convert.main([str(FOLDER / name), "--print-flags"]) == 0
    assert capsys.readouterr().out.split() == [
        word.replace("[", "'[").replace("]", "]'") for word in flags_of(found.architecture)
    ]
    settings = parse_settings([*_TRAINING.split(), "--train-iters", "1", *flags_of(found.architecture)])
    model = settings.model.architecture(VOCAB_SIZE)
    assert comparable(model) == comparable(found.architecture)
    assert model["padded_vocab_size"] == VOCAB_SIZE


def _train_from_each(root: str) -> dict[str, Run]:
    runs = {}
    for name, split in (
        ("qwen3_moe", "--expert-model-parallel-size 2"),
        ("llama", "--tensor-model-parallel-size 2"),
        ("gpt2", ""),
        ("deepseek_v3", "--tensor-model-parallel-size 2 --sequence-parallel --moe-router-bias-update-rate 0"),
    ):
        flags = flags_of(_opened(name).settings(padded_vocab_size=64))
        saved = f"{SHARDED} --train-iters 1 --load {FOLDER / name} --save {root}/{name} {split}"
        runs[name] = train_one([*_TRAINING.split(), *flags, *saved.split()])
    again = f"{SHARDED} --train-iters 2 --override-opt-param-scheduler --load {root}/llama --save {root}/again"
    runs["again"] = train_one(
        [*_TRAINING.split(), *flags_of(_opened("llama").settings(padded_vocab_size=64)), *again.split()]
    )
    flags = flags_of(_opened("qwen2").settings(padded_vocab_size=64))
    runs["another model"] = train_one(
        [*_TRAINING.split(), *flags, *f"{SHARDED} --train-iters 1 --load {FOLDER}/llama".split()]
    )
    shutil.copytree(FOLDER / "llama", f"{root}/model", dirs_exist_ok=True)
    runs["into itself"] = train_one(
        [*_TRAINING.split(), *flags, *f"{SHARDED} --train-iters 1 --load {root}/model --save {root}/model".split()]
    )
    converted = f"{SHARDED} --train-iters 1 --load {root}/converted"
    if dist.get_rank() == 0:
        assert convert.main([str(FOLDER / "qwen2"), f"{root}/converted", "--padded-vocab-size", "64"]) == 0
    dist.barrier()
    runs["converted"] = train_one([*_TRAINING.split(), *flags, *converted.split()])
    yarn = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32 --mscale-all-dim 0"
    for kind, further in {"tuned": "--finetune", "not tuned": ""}.items():
        for source, others in {
            "converted": "--rotary-base 500000 --max-position-embeddings 256 ",
            "model": "--rotary-base 500000 ",
        }.items():
            from_llama = flags_of(_opened("llama").settings(padded_vocab_size=64)) if source == "model" else flags
            words = f"{SHARDED} --train-iters 1 --load {root}/{source} {others} {yarn} {further}"
            runs[f"{kind} {source}"] = train_one([*_TRAINING.split(), *from_llama, *words.split()])
    deeper = f"{SHARDED} --train-iters 1 --load {root}/converted --rotary-base 500000 --finetune --norm-epsilon 1e-3"
    runs["tuned otherwise"] = train_one([*_TRAINING.split(), *flags, *deeper.split()])
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Run]]:
    root = tmp_path_factory.mktemp("trained")
    return root, run_ranks(2, _train_from_each, str(root))[0]


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "gpt2", "deepseek_v3"])
def test_a_run_loads_the_folder_directly(trained: tuple[Path, dict[str, Run]], name: str) -> None:
    """Sharded, with experts or matrices split between two ranks; its learning rate is 0, so it saves what it loaded."""
    root, runs = trained
    assert runs[name].error is None, runs[name].error
    said = f" loaded the weights of {FOLDER / name} (Hugging Face, {name}); the optimizer starts afresh"
    assert said in runs[name].output
    saved = CheckpointReader(root / name / "iter_0000001")
    found = _opened(name)
    there = found.reader(found.settings(padded_vocab_size=64))
    assert all(torch.equal(saved.tensor(key), there.tensor(key)) for key in there.entries)


def test_ids_of_special_tokens_come_back_after_training(trained: tuple[Path, dict[str, Run]], tmp_path: Path) -> None:
    """The run that began with the model, and the one that went on from it, hand them on."""
    root, runs = trained
    assert runs["again"].error is None, runs["again"].error
    for name in ("llama", "again"):
        assert convert.main([str(root / name), str(tmp_path / name), "--to", "huggingface"]) == 0
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_what_was_converted_is_loaded_as_weights_alone(trained: tuple[Path, dict[str, Run]]) -> None:
    root, runs = trained
    assert runs["converted"].error is None, runs["converted"].error
    assert (
        f" loaded the weights of {root}/converted/iter_0000000; training starts at iteration 0"
        in runs["converted"].output
    )


@pytest.mark.parametrize("source", ["converted", "model"])
def test_positions_may_rotate_otherwise_with_finetune(trained: tuple[Path, dict[str, Run]], source: str) -> None:
    """As for longer contexts: such settings have no weights."""
    tuned, other = trained[1][f"tuned {source}"], trained[1][f"not tuned {source}"]
    assert tuned.error is None and list(tuned.losses) == [1], tuned.error
    said = " --finetune: settings without weights are the command line's ("
    line = next(line for line in tuned.output.splitlines() if line.startswith(said))
    assert "rotary_base: now 500000, saved 1000" in line and "position_embedding_type: now yarn, saved rope" in line
    assert ("max_position_embeddings: now 256, saved" in line) == (source == "converted")
    assert "rotary_base: now 500000" in (other.error or "") and "or --finetune, which takes" in (other.error or "")
    otherwise = trained[1]["tuned otherwise"].error or ""
    assert "layernorm_epsilon: now 0.001" in otherwise and "rotary_base" not in otherwise


def test_another_model_is_refused_by_its_settings(trained: tuple[Path, dict[str, Run]]) -> None:
    error = trained[1]["another model"].error or ""
    assert "StartRefusedError" in error or "ValueError" in error
    assert "add_qkv_bias: now True, saved False" in error
    assert "share_embeddings_and_output_weights: now True, saved False" in error


def test_a_run_does_not_save_into_the_folder_of_another_program(trained: tuple[Path, dict[str, Run]]) -> None:
    """``--load`` of that folder would read the other program's weights again, in place of what the run saved."""
    root, runs = trained
    assert "got one with a checkpoint of another program" in (runs["into itself"].error or "")
    assert not list((root / "model").glob("iter_*"))


def _copy(name: str, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(FOLDER / name, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _linear(theta: float, factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


@pytest.mark.parametrize(
    ("name", "rope", "base", "factor"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 12345.67}, "12345.67", None),
        ("llama", _linear(1e4, 4.0), "10000", "4"),
        ("llama", _linear(1e4, 2.5), "10000", "2.5"),
        (
            "gemma3_text",
            {"full_attention": _linear(1e6, 2.5), "sliding_attention": {"rope_theta": 1e4}},
            "1000000",
            "2.5",
        ),
    ],
)
def test_fractions_in_rotary_settings_are_kept_and_whole_numbers_print_as_integers(
    name: str, rope: dict[str, Any], base: str, factor: str | None, tmp_path: Path
) -> None:
    folder = _copy(name, tmp_path / "model", lambda config: config.update(rope_parameters=rope))
    found = find_foreign(folder)
    assert found is not None
    flags = flags_of(found.architecture)
    assert flags[flags.index("--rotary-base") + 1] == base
    stretched = "--rotary-seq-len-interpolation-factor"
    assert (flags[flags.index(stretched) + 1] if stretched in flags else None) == factor
    own = f"--load {folder} --use-checkpoint-args"
    for words in ([*flags], own.split()):
        settings = parse_settings([*_TRAINING.split(), "--train-iters", "1", *words])
        assert comparable(settings.model.architecture(VOCAB_SIZE)) == comparable(found.architecture)
    theirs = family_for(found.architecture)[1]["rope_parameters"]
    theirs = theirs.get("full_attention", theirs)
    assert (theirs["rope_theta"], theirs.get("factor")) == (float(base), None if factor is None else float(factor))


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"model_type": "deepseek_v2"}, "multi-latent attention, but scores"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06, got 1e-05"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave must be True, got False"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must be 4, got 2"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be null, got"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob must be True, got False"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok must be 2 times topk_group, got 4 and 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be sigmoid, got 'softmax'"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "must be default or yarn, got 'lin",
        ),
        ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate must be True, got False"),
        (
            "deepseek_v3",
            {"rope_parameters": YARN | {"attention_factor": 2.0}},
            "attention_factor must be that of mscale",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
            "mscale must go with mscale_all_dim, got none",
        ),
        (
            "llama",
            {"model_type": "bert"},
            "model_type must be one of llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3, gpt_oss, qwen3_next, gemma3_text, gpt2, got 'bert'",
        ),
        ("llama", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "got 'longrope'"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "got weights in mxfp4; save the model dequantised",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, got 50.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702, got 1.0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, got True"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    name: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotImplementedError, match=message.replace("(", r"\(")):
        find_foreign(_copy(name, tmp_path / "model", lambda config: config.update(changed)))


def test_a_folder_that_lost_its_configuration_is_refused(tmp_path: Path) -> None:
    """Such a folder must not count as empty, or training would start from scratch."""
    folder = _copy("llama", tmp_path / "model", lambda config: None)
    (folder / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model must have a config\.json next to its safetensors files, got none"
    ):
        find_foreign(folder)


def test_versions_before_5_of_transformers_say_rope_elsewhere(tmp_path: Path) -> None:
    def as_before(config: dict[str, Any]) -> None:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters

    found = find_foreign(_copy("llama3", tmp_path / "model", as_before))
    assert found is not None and found.architecture == _opened("llama3").architecture


def test_defaults_of_yarn_are_those_of_transformers(tmp_path: Path) -> None:
    """Without the two factors cosines and sines grow by that of mscale 1; without a factor it follows from the lengths."""
    given = {**YARN, "factor": None}
    changed = {"rope_parameters": given, "max_position_embeddings": 256}
    found = find_foreign(_copy("deepseek_v3", tmp_path / "model", lambda config: config.update(changed)))
    assert found is not None
    names = ("rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "rotary_base")
    assert [found.architecture[name] for name in names] == [4.0, 1.0, 0.0, 32.0, 1.0, 100]


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """As transformers does: they lie behind the last layer. Of other layers nothing may be left over."""
    folder = _copy("deepseek_v3", tmp_path / "model", lambda config: None)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    found = find_foreign(folder)
    assert found is not None
    found.reader(found.architecture)
    tensors["model.layers.1.eh_proj.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"not of this model: model.layers.1.eh_proj.weight"):
        found = find_foreign(folder)
        assert found is not None
        found.reader(found.architecture)


def test_a_model_with_multi_token_prediction_reads_its_layers(tmp_path: Path) -> None:
    """They lie behind the last layer, with copies of embedding and output layer, which are not read."""
    folder = _copy("deepseek_v3", tmp_path / "model", lambda config: None)
    tensors = load_file(folder / "model.safetensors")
    further = {name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if "layers.1." in name}
    width = tensors["model.norm.weight"].shape[0]
    for name, shape in {
        "enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,), "eh_proj": (width, 2 * width),
        "embed_tokens": tensors["lm_head.weight"].shape, "shared_head.head": tensors["lm_head.weight"].shape,
    }.items():  # fmt: skip
        further[f"model.layers.2.{name}.weight"] = torch.rand(shape)
    save_file(tensors | further, folder / "model.safetensors")
    found = find_foreign(folder)
    assert found is not None
    architecture = {**found.architecture, "mtp_num_layers": 1, "mtp_use_repeated_layer": False}
    reader, model = found.reader(architecture), build_model(architecture)
    weights = {key: reader.tensor(key) for key in model.state_dict()}
    model.load_state_dict(weights, strict=True)
    assert torch.equal(weights["mtp.layers.0.eh_proj.weight"], further["model.layers.2.eh_proj.weight"])
    assert torch.equal(
        weights["mtp.layers.0.final_layernorm.weight"], further["model.layers.2.shared_head.norm.weight"]
    )
    of_last = {key: weight for key, weight in weights.items() if key.startswith("decoder.layers.1.")}
    assert of_last
    for key, weight in of_last.items():
        assert torch.equal(weights[key.replace("decoder.layers.1.", "mtp.layers.0.mtp_model_layer.")], weight)
    family, config = family_for(architecture)
    assert family.model_type == "deepseek_v3" and config["num_nextn_predict_layers"] == 1
    del further["model.layers.2.hnorm.weight"]
    save_file(tensors | further, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.hnorm\.weight"):
        found = find_foreign(folder)
        assert found is not None
        found.reader(architecture)


def test_gemma3_of_before_says_its_layers_otherwise(tmp_path: Path) -> None:
    def as_before(config: dict[str, Any]) -> None:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters["full_attention"]["rope_theta"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        del config["layer_types"], config["tie_word_embeddings"]
        config["sliding_window_pattern"] = 2

    found = find_foreign(_copy("gemma3_text", tmp_path / "model", as_before))
    assert found is not None and found.architecture == _opened("gemma3_text").architecture


def test_missing_and_other_tensors_are_named(tmp_path: Path) -> None:
    folder = _copy("gpt2", tmp_path / "model", lambda config: None)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.ln_1.bias"]
    tensors["transformer.extra"] = torch.zeros(2)
    tensors["transformer.ln_f.weight"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    found = find_foreign(folder)
    assert found is not None
    with pytest.raises(ValueError, match=r"missing: transformer\.h\.1\.ln_1\.bias") as raised:
        found.reader(found.architecture)
    assert "not of this model: transformer.extra" in str(raised.value)
    assert "transformer.ln_f.weight (there [8], for this model [16])" in str(raised.value)


@pytest.mark.parametrize("damage", ["cut", "length", "text", "index"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    folder = _copy("llama", tmp_path / "model", lambda config: None)
    path = folder / "model-00002-of-00003.safetensors"
    content = path.read_bytes()
    if damage == "index":
        path.unlink()
    else:
        changed = {"cut": content[:-4], "length": b"\xff" * 8 + content[8:], "text": content[:8] + b"?" + content[9:]}
        path.write_bytes(changed[damage])
    with pytest.raises((ValueError, FileNotFoundError), match=path.name):
        find_foreign(folder)


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    found = _opened("qwen2")
    with pytest.raises(ValueError, match=r"padded_vocab_size: now 32, saved 40 .give --padded-vocab-size 40 or more"):
        found.reader(found.settings(padded_vocab_size=32))


def test_a_model_of_no_family_is_refused_with_what_differs() -> None:
    settings = {**_opened("llama").architecture, "rotary_percent": 0.5}
    with pytest.raises(NotImplementedError, match=r"llama: rotary_percent 0\.5"):
        family_for(settings)


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER / "gpt2", folder)
    found = find_foreign(folder)
    assert found is not None
    reader = found.reader(found.architecture)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20_000])
    with pytest.raises(FileNotFoundError):
        write_huggingface(reader, tmp_path / "target", found.architecture, buffer_nbytes=1 << 20, shard_nbytes=1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_conversion_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover is as large as the model, and nothing else removes it. Active conversions and other files remain."""
    found = find_foreign(FOLDER / "gpt2")
    assert found is not None
    write = functools.partial(
        write_huggingface,
        found.reader(found.architecture),
        architecture=found.architecture,
        buffer_nbytes=1 << 20,
        shard_nbytes=1 << 30,
    )
    left, users = (tmp_path / f"target.tmp-{letter * 12}" for letter in "ab")
    for folder in (left, users):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    (users / "notes.txt").touch()
    running: list[list[str]] = []

    def start_another(*args: Any) -> None:
        if not running:
            running.append(sorted(path.name for path in tmp_path.iterdir()))
            write(tmp_path / "target")
            running.append(sorted(path.name for path in tmp_path.iterdir()))
            (tmp_path / "target").rename(tmp_path / "first")
        write_checksums(*args)

    monkeypatch.setattr(copying, "write_checksums", start_another)
    write(tmp_path / "target")
    assert left.name not in running[0] and {*running[0], "target"} == {*running[1]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "target", users.name]
    assert sorted(path.name for path in users.iterdir()) == ["model.safetensors", "notes.txt"]


def test_a_conversion_holds_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """The process grows by little more than the bound that is printed, a fiftieth of the model."""
    config = json.loads((FOLDER / "llama3" / "config.json").read_text())
    config |= {"vocab_size": 60_000, "hidden_size": 512, "num_hidden_layers": 1}
    sizes = {
        "model.embed_tokens.weight": (60_000, 512),
        "model.norm.weight": (512,),
        "model.layers.0.input_layernorm.weight": (512,),
        "model.layers.0.post_attention_layernorm.weight": (512,),
        "model.layers.0.self_attn.q_proj.weight": (16, 512),
        "model.layers.0.self_attn.k_proj.weight": (8, 512),
        "model.layers.0.self_attn.v_proj.weight": (8, 512),
        "model.layers.0.self_attn.o_proj.weight": (512, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 512),
        "model.layers.0.mlp.up_proj.weight": (24, 512),
        "model.layers.0.mlp.down_proj.weight": (512, 24),
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(size) for name, size in sizes.items()}, folder / "model.safetensors")
    found = find_foreign(folder)
    assert found is not None
    reader = found.reader(found.architecture)
    bound = memory_nbytes(reader, list(reader.entries), buffer_nbytes=1 << 20)
    assert bound <= 2 << 20
    command = [str(folder), str(tmp_path / "own"), "--buffer-mib", "1", "--padded-vocab-size", "60032"]
    script = (
        "import resource, sys\nfrom tools.checkpoint import convert\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"assert convert.main({command!r}) == 0\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)\n"
    )
    grown = int(_python(script).split()[-1])
    assert grown < 50 << 20, f"{grown:,} bytes for a model of 123 MB"


def _python(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout
