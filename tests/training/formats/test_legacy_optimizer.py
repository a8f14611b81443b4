"""Megatron-LM's numbered optimizer state finds its weights by their order, and what is not in that order is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.distributed.fsdp.checkpoint import TensorReader
from megatron.training.arguments import parse_settings
from megatron.training.formats.megatron_lm.legacy_buffers import _lay_out
from megatron.training.formats.recognise import find_foreign
from tests.support.megatron_lm_folders import add_numbered_state, weights_and_architecture, write_legacy

KEYS = ["exp_avg", "exp_avg_sq"]
OF_MEGATRON = Path(__file__).parents[2] / "support" / "fixtures" / "megatron_lm" / "distrib_optim"
ITS_MODEL = (
    "--num-layers 2 --hidden-size 10 --num-attention-heads 1 --group-query-attention --num-query-groups 1 --ffn-hidden-size 14 "
    "--seq-length 16 --max-position-embeddings 16 --position-embedding-type rope --swiglu --normalization RMSNorm --micro-batch-size 1 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --padded-vocab-size 24 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 23 --train-iters 4 --lr 1e-2 --bf16"
)


def _write(
    folder: Path, name: str, *, num_ranks: int, num_stages: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Write a run with numbers of its own as state of each weight; return those by key, and the weights."""
    weights, architecture = weights_and_architecture(name)
    split: dict[str, Any] = {
        "gated": architecture["gated_linear_unit"],
        "num_ranks": num_ranks,
        "num_stages": num_stages,
    }
    moments = {key: {n: torch.randn(w.shape) for n, w in weights.items()} for key in KEYS}
    write_legacy(folder, weights, **split)
    for key, tensors in moments.items():
        write_legacy(folder / key, tensors, **split)
    for path in (folder / "iter_0000007").iterdir():
        add_numbered_state(path / "model_optim_rng.pt", folder, {"iteration": 7}, KEYS, {"lr": 0.5}, dtype)
    for key in KEYS:
        shutil.rmtree(folder / key)
    return {"weights": weights, "architecture": architecture, **moments}


def _reader(folder: Path, architecture: dict[str, Any], keys: list[str]) -> TensorReader:
    found = find_foreign(folder)
    assert found is not None
    return found.views(architecture, keys)


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["gpt2_like", "llama_like", "qwen_like"])
def test_state_is_that_of_its_weight(name: str, num_ranks: int, num_stages: int, tmp_path: Path) -> None:
    """Biases and norms do not decay, so they are in a group of their own, behind all others."""
    expected = _write(tmp_path, name, num_ranks=num_ranks, num_stages=num_stages)
    reader = _reader(tmp_path, expected["architecture"], KEYS)
    for weight, value in expected["weights"].items():
        assert torch.equal(reader.tensor(weight), value), "the main weight, not that of 16 bits"
        assert reader.tensor(f"optimizer.state.{weight}.step") == 7
        for key in KEYS:
            assert torch.equal(reader.tensor(f"optimizer.state.{weight}.{key}"), expected[key][weight])


def test_a_model_in_fp32_has_no_main_weights(tmp_path: Path) -> None:
    expected = _write(tmp_path, "llama_like", num_ranks=1, num_stages=1, dtype=torch.float32)
    _edit(tmp_path, lambda saved: saved["optimizer"])
    reader = _reader(tmp_path, expected["architecture"], KEYS)
    for weight, value in expected["weights"].items():
        assert torch.equal(reader.tensor(weight), value)
        assert torch.equal(reader.tensor(f"optimizer.state.{weight}.exp_avg"), expected["exp_avg"][weight])


def _edit(folder: Path, change: Callable[[Any], Any]) -> None:
    for path in folder.glob("iter_0000007/*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["optimizer"] = change(content["optimizer"])
        torch.save(content, path)


def _swapped(saved: Any) -> Any:
    """The second layer's number where the first one's should be, as if modules had another order."""
    (first, *rest), _ = saved["fp32_from_fp16_params"]
    same = next(i for i, tensor in enumerate(rest) if tensor.shape == rest[0].shape and i > 0)
    rest[0], rest[same] = rest[same], rest[0]
    return {**saved, "fp32_from_fp16_params": [[first, *rest], saved["fp32_from_fp16_params"][1]]}


def _in_three_groups(saved: Any) -> Any:
    group, *others = saved["optimizer"]["param_groups"]
    parts = [{**group, "params": group["params"][:1]}, {**group, "params": group["params"][1:]}]
    return {"optimizer": {**saved["optimizer"], "param_groups": [*parts, *others]}}


def _short(saved: Any) -> Any:
    group, other = saved["optimizer"]["param_groups"]
    return {"optimizer": {**saved["optimizer"], "param_groups": [{**group, "params": group["params"][1:]}, other]}}


def _turned(saved: Any) -> Any:
    group, other = saved["optimizer"]["param_groups"]
    return {"optimizer": {**saved["optimizer"], "param_groups": [{**group, "params": group["params"][::-1]}, other]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda saved: None,
            "one optimizer per rank, numbered by weights, got nothing .with --use-distributed-optimizer",
        ),
        (lambda saved: [saved, saved], "one optimizer per rank, numbered by weights, got a list"),
        (lambda saved: {"optimizer": {"param_groups": []}}, "got a dict of optimizer"),
        (_swapped, r"in the order of its modules, got other main weights where those of decoder\.layers\.0\."),
        (_in_three_groups, "two groups of weights, with and without weight decay, got 3"),
        (_short, r"got [0-9]+ weights in a group where the model has [0-9]+"),
        (_turned, r"got \[.*\] as exp_avg of stage 0, rank 0: .*, which has \["),
    ],
    ids=["distributed", "several", "no state", "other order", "three groups", "fewer", "reversed"],
)
def test_what_is_not_in_order_is_refused(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    expected = _write(tmp_path, "llama_like", num_ranks=1, num_stages=1)
    _edit(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        _reader(tmp_path, expected["architecture"], KEYS)
    assert "--no-load-optim, or --finetune" in str(error.value)


def test_another_optimizer_is_refused_by_its_keys(tmp_path: Path) -> None:
    expected = _write(tmp_path, "llama_like", num_ranks=1, num_stages=1)
    with pytest.raises(
        ValueError, match="must hold optimizer state momentum_buffer, got other: exp_avg, exp_avg_sq, momentum"
    ):
        _reader(tmp_path, expected["architecture"], ["momentum_buffer"])


def _of_megatron(folder: Path) -> TensorReader:
    return _reader(folder, parse_settings(ITS_MODEL.split()).model.architecture(1), KEYS)


def test_buffers_that_megatron_wrote_hold_the_state_of_each_weight() -> None:
    """Weights lie in reverse, each at a multiple of 64 in its bucket, and buckets of 300 elements follow each other."""
    reader, expected = _of_megatron(OF_MEGATRON), load_file(OF_MEGATRON / "expected.safetensors")
    for full, value in expected.items():
        name, _, key = full.rpartition(".")
        assert torch.equal(reader.tensor(name if key == "param" else f"optimizer.state.{name}.{key}"), value), full
        assert reader.tensor(f"optimizer.state.{name}.step") == 2
    assert len(expected) == 45 == 3 * sum(name.endswith(".step") for name in reader.entries)


def _other_args(folder: Path) -> None:
    path = folder / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["args"].overlap_grad_reduce = False
    torch.save(content, path)


def _other_buffers(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = torch.load(folder / "distrib_optim.pt", weights_only=False)
        torch.save(change(content), folder / "distrib_optim.pt")

    return apply


def _shifted(saved: Any) -> Any:
    ((dtypes, buffer),) = saved[0].items()
    return {**saved, 0: {dtypes: {**buffer, "param": buffer["param"].roll(1)}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_args, "must have 2170 or 2736 elements in the buffer of 15 weights, as its arguments say, got 2484"),
        (lambda folder: (folder / "distrib_optim.pt").unlink(), "distrib_optim.pt beside .* not there.: restore that"),
        (_other_buffers(_shifted), "in the order of its modules, got other main weights"),
        (
            _other_buffers(lambda saved: [saved, saved]),
            "buffers of one distributed optimizer, got state of 2 optimizers",
        ),
        (_other_buffers(lambda saved: {0: saved[0]}), "got no buckets_coalesced, which Megatron-LM writes since"),
        (_other_buffers(lambda saved: {**saved, 1: saved[0]}), "for each stage of its rank and dtype of its weights"),
        (lambda folder: (folder / "distrib_optim.pt").write_bytes(b"PK"), "must be an archive of torch.save"),
    ],
    ids=["arguments", "no file", "shifted", "two optimizers", "old", "two buffers", "damaged"],
)
def test_buffers_that_are_not_of_the_model_are_refused(
    change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    shutil.copytree(OF_MEGATRON, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "iter_0000002" / "mp_rank_00")
    with pytest.raises(ValueError, match=message):
        _of_megatron(tmp_path)


def test_a_weight_that_stages_share_has_a_bucket_of_its_own() -> None:
    """A bucket ends behind it, without padding; so it does where it is full."""
    assert _lay_out([(10, False), (5, True), (7, False), (3, False)], None, 64) == ([0, 64, 69, 133], 136)
    assert _lay_out([(10, False), (60, False), (7, False)], 100, 64) == ([0, 64, 124], 131)
