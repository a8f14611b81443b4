"""Models of ``transformers``: initial values, folders in and out, memory; against plain ``transformers``, on two ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

transformers = pytest.importorskip("transformers")

from megatron.core.distributed.fsdp.huggingface import (  # noqa: E402
    SafetensorsWriter,
    fully_shard_pretrained,
    load_pretrained,
    save_pretrained,
)

CHECKS = RankChecks(__name__)
TOKENS = torch.arange(24).view(2, 12)


def _llama(**fields: Any) -> nn.Module:
    config = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "vocab_size": 101, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **heads, **fields}))


def _qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        vocab_size=101,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"llama": _llama, "qwen3_moe": _qwen3_moe, "gpt2": _gpt2}


def _plain(make: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    warnings.simplefilter("default")  # transformers and what it imports warn of each other
    model = make().to(dtype).eval()
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    torch.manual_seed(5)
    model.initialize_weights()  # type: ignore[operator]
    return model


def _sharded(make: Callable[[], nn.Module], dtype: torch.dtype, *, initialize: bool = True) -> Any:
    with torch.device("meta"):
        model = make().to(dtype).eval()
    torch.manual_seed(5 if initialize else 6)
    return fully_shard_pretrained(model, initialize=initialize)


def _assert_equal(model: nn.Module, plain: nn.Module) -> None:
    """Compare parameters, buffers and logits, bit for bit."""
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(own[name].full_tensor().to(parameter.dtype), parameter), name  # type: ignore[attr-defined]
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in plain.named_buffers())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


@CHECKS.on(2)
def initial_values_are_those_of_the_unsharded_model() -> None:
    for make in FAMILIES.values():
        for dtype in (torch.float32, torch.bfloat16):
            plain = _plain(make, dtype)
            _assert_equal(_sharded(make, dtype), plain)


@CHECKS.on(2)
def folders_go_round_bit_for_bit() -> None:
    """transformers' folder into the engine, ours into transformers, and all tensors under the names of transformers' files."""
    for make in FAMILIES.values():
        for dtype in (torch.float32, torch.bfloat16):
            plain = _plain(make, dtype)
            with shared_folder() as folder:
                theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
                if dist.get_rank() == 0:
                    plain.save_pretrained(theirs, max_shard_size="40KB")
                dist.barrier()
                model = _sharded(make, dtype, initialize=False)
                report = load_pretrained(model, theirs)
                assert report.read_nbytes < 0.6 * report.stored_nbytes
                _assert_equal(model, plain)
                save_pretrained(model, ours, max_shard_nbytes=40_000)
                again = type(plain).from_pretrained(ours).eval()
                assert again.dtype == dtype
                for (name, own), parameter in zip(again.named_parameters(), plain.parameters(), strict=True):
                    assert torch.equal(own, parameter), name
                if dtype == torch.float32:  # .to() has cast the buffers of plain, which from_pretrained leaves in fp32
                    with torch.no_grad():
                        assert torch.equal(again(TOKENS).logits, plain(TOKENS).logits)
                assert again.config.architectures == [type(plain).__name__]
                index = "model.safetensors.index.json"
                names = [set(json.loads((path / index).read_text())["weight_map"]) for path in (theirs, ours)]
                assert names[0] == names[1]


@CHECKS.on(2)
def a_head_of_another_kind_is_new() -> None:
    """A classifier over a language model: its head is not in the files, and theirs is of no use."""
    plain = _plain(_llama, torch.float32)
    with shared_folder() as folder, torch.device("meta"):
        model = transformers.LlamaForSequenceClassification(plain.config)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        with torch.device("cpu"):
            fully_shard_pretrained(model, initialize=False)
            with pytest.raises(ValueError, match=r"score.weight.*lm_head.weight"):
                load_pretrained(model, folder)
            report = load_pretrained(model, folder, initialize_missing=True, ignore_unexpected=True)
    assert report.initialized == ("score.weight",) and report.unused == ("lm_head.weight",)
    assert model.score.weight.full_tensor().abs().sum() > 0
    assert torch.equal(model.model.norm.weight.full_tensor(), plain.model.norm.weight)


@CHECKS.on(2)
def the_code_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/huggingface.md"
    code = page.read_text().split("```py\n")[1].split("```")[0]
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            _plain(_llama, torch.float32).save_pretrained(folder)
        dist.barrier()
        code = code.replace("dist.init_process_group()", "").replace('"tuned"', f'"{folder}/tuned"')
        exec(code, {"folder": folder})
        tuned = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/tuned")
        expected = _plain(_llama, torch.float32).bfloat16()
        assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), expected.parameters(), strict=True))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@CHECKS.on(2)
def memory_is_the_shard_and_one_unit() -> None:
    """A model of 280M parameters on disk, of which each rank holds half."""
    warnings.simplefilter("default")
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 16, "vocab_size": 32000}
    with torch.device("meta"):
        model = _llama(**sizes, num_attention_heads=16, num_key_value_heads=8)
    tensors = {name: tensor.shape for name, tensor in model.state_dict().items()}
    shard = sum(size.numel() for size in tensors.values()) * 4 // 2
    unit = sizes["vocab_size"] * sizes["hidden_size"] * 4
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            kinds = [(name, size, torch.float32) for name, size in tensors.items()]
            with SafetensorsWriter(Path(folder) / "model.safetensors", kinds) as writer:
                for size in tensors.values():
                    writer.write(torch.randn(size))
        dist.barrier()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        fully_shard_pretrained(model, initialize=False)
        report = load_pretrained(model, folder)
        save_pretrained(model, Path(folder) / "ours")
        peak = _status("VmHWM") - before
    assert report.temporary_nbytes == 0 and abs(report.read_nbytes - shard) < 0.02 * shard
    assert peak < shard + 2.2 * unit, f"{peak} bytes, where a shard has {shard} and the largest unit {unit}"


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_pretrained(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
