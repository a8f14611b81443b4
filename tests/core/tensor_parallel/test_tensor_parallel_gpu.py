"""A tensor-parallel GPT on GPUs: the unsplit numbers in bf16 with all fused functions, and collectives that overlap GEMMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import rng_tracker_of, seed_streams
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.core.tensor_parallel.test_tensor_parallel_gpt import whole, whole_gradient
from tests.support.device_trace import num_overlapping, traced
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import build_gpt

LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 512,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "init_method_std": 0.05,
}
FUSED: dict[str, Any] = {
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "persist_layer_norm": True,
    "cross_entropy_loss_fusion": True,
}
SIZES = {"vocab_size": 512, "max_sequence_length": 128, "position_embedding_type": "rope"}


def _build(group: dist.ProcessGroup | None, **fields: Any) -> GPTModel:
    if group is not None:
        fields["tensor_model_parallel_size"] = group.size()
    with torch.device("cuda"):
        return build_gpt({**SIZES, "pg_collection": ProcessGroupCollection(tp=group)}, **{**LLAMA, **fields})


def _errors(dtype: torch.dtype, fused: bool, sequence_parallel: bool) -> dict[str, float]:
    """Relative errors (norm of the difference by norm) of losses, weights and gradients against one GPU."""
    fields: dict[str, Any] = {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, **(FUSED if fused else {})}
    tokens = torch.randint(512, (2, 129), generator=torch.Generator().manual_seed(7)).cuda()
    found: list[dict[str, torch.Tensor]] = []
    for group in (None, dist.group.WORLD):
        model = _build(group, **fields, sequence_parallel=sequence_parallel and group is not None)
        losses = model(tokens[:, :-1], None, None, labels=tokens[:, 1:])
        losses.mean().backward()
        values = {"losses": losses.detach()}
        values |= {f"weight {name}": whole(p, p, group) for name, p in model.named_parameters()}
        values |= {f"gradient {name}": whole_gradient(p, group) for name, p in model.named_parameters()}
        found.append({name: value.float() for name, value in values.items()})
    expected, split = found
    return {name: ((split[name] - one).norm() / one.norm()).item() for name, one in expected.items()}


def _all_errors() -> dict[str, dict[str, float]]:
    return {
        f"{dtype} fused={fused} sequence_parallel={sp}": _errors(dtype, fused, sp)
        for dtype, fused in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
        for sp in (False, True)
    }


@pytest.mark.gpu(2)
def test_a_split_model_is_the_whole_one_on_gpus() -> None:
    """fp32: another order of sums (and of the softmax's parts). bf16: partial sums are rounded to 8 bits before they meet."""
    for by_kind in run_ranks(2, _all_errors, backend="nccl", timeout_s=300.0):
        for kind, errors in by_kind.items():
            bound = 1e-4 if "float32" in kind else 5e-2
            for name, error in errors.items():
                assert error == 0.0 if name.startswith("weight") else error < bound, f"{kind}: {name} {error}"


def _losses_with_dropout() -> list[list[float]]:
    """Return the losses of two passes from the same seed and one from another."""
    model = _build(
        dist.group.WORLD,
        params_dtype=torch.bfloat16,
        bf16=True,
        sequence_parallel=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **FUSED,
    )
    tokens = torch.randint(512, (2, 129), generator=torch.Generator().manual_seed(7)).cuda()
    found = []
    for seed in (3, 3, 4):
        seed_streams(seed, rng_tracker_of(model))
        losses = model(tokens[:, :-1], None, None, labels=tokens[:, 1:])
        losses.mean().backward()
        found.append(losses.flatten().tolist())
    return found


@pytest.mark.gpu(2)
def test_dropout_on_gpus_is_a_function_of_the_seed() -> None:
    first, second = run_ranks(2, _losses_with_dropout, backend="nccl", timeout_s=300.0)
    assert first == second, "all tensor-parallel ranks have the same losses"
    assert first[0] == first[1] and first[0] != first[2]


def _overlaps(path: str) -> tuple[int, int]:
    """(gathers, reduce-scatters) of backward passes that ran beside a GEMM."""
    group = dist.new_group(pg_options=_high_priority())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4096,
        num_attention_heads=32,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=group.size(),
        sequence_parallel=True,
    )
    with torch.device("cuda"):
        layer = ColumnParallelLinear(
            4096, 16384, config=config, init_method=config.init_method, bias=False, tp_group=group
        )
        x = torch.randn(4096, 1, 4096, dtype=torch.bfloat16, requires_grad=True)

    def backward_passes() -> None:
        for _ in range(4):
            layer(x)[0].sum().backward()

    backward_passes()
    works = traced(backward_passes, Path(path) / f"{dist.get_rank()}.json")
    gemms = [work for work in works if work.is_gemm]
    gathers = [work for work in works if work.is_gather]
    reductions = [work for work in works if work.is_reduction]
    return num_overlapping(gathers, gemms), num_overlapping(reductions, gemms)


def _high_priority() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


@pytest.mark.gpu(2)
def test_collectives_of_backward_run_beside_gemms(tmp_path: Path) -> None:
    """See [Note: what runs beside what]; forward's gather overlaps nothing, since the product needs it."""
    for gathers, reductions in run_ranks(2, _overlaps, str(tmp_path), backend="nccl"):
        assert gathers >= 1 and reductions >= 1, (gathers, reductions)
