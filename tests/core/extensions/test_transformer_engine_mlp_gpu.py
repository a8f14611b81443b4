"""transformer-engine's own kernels: the MLP in FP8 is as exact as its modules, keeps no more, and trains under the engine."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, microbatch
from megatron.core.extensions import why_missing
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

WIDTH, HIDDEN, LENGTH, BATCH, VOCAB_SIZE = 256, 512, 192, 2, 512
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": WIDTH,
    "ffn_hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "init_method_std": 0.06,
}
SWIGLU: dict[str, Any] = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": SWIGLU,
    "swiglu by transformer-engine": SWIGLU | {"disable_jit_fuser": True},
    "swiglu with bias": SWIGLU | {"add_bias_linear": True, "bias_activation_fusion": True},
    "geglu": {"gated_linear_unit": True, "add_bias_linear": False, "bias_activation_fusion": True},
    "gelu with bias": {"bias_activation_fusion": True},
    "squared relu": {"activation_func": "squared_relu", "add_bias_linear": False},
}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
}
FUSED: dict[str, Any] = {"use_transformer_engine_op_fuser": True}
RECOMPUTED: dict[str, Any] = FUSED | {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}


@pytest.fixture(autouse=True)
def needs_the_package() -> Iterator[None]:
    reason = why_missing("transformer_engine_layers")
    if reason is not None:
        pytest.skip(f"transformer-engine cannot be used: {reason}")
    yield


def _mlp(**fields: Any) -> Any:
    config = TransformerConfig(**(BASE | fields))
    (spec, *_) = get_gpt_decoder_block_spec(config, use_transformer_engine=True).layer_specs or []
    with torch.device("cuda"):
        mlp = build_module(spec.submodules.mlp, config=config)
        with torch.no_grad():
            for parameter in mlp.parameters():
                generator = torch.Generator("cuda").manual_seed(parameter.numel())
                noise = torch.randn(parameter.shape, generator=generator, device="cuda") * 0.06
                parameter.copy_(noise + (parameter.dim() == 1))
    return mlp


def _steps(mlp: Any, num_steps: int = 3) -> tuple[dict[str, torch.Tensor], int]:
    """The last step's output and gradients, and the bytes that it kept from forward to backward."""
    found: dict[str, torch.Tensor] = {}
    kept = 0
    for step in range(num_steps):
        mlp.zero_grad()
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(LENGTH, BATCH, WIDTH, generator=generator, device="cuda").bfloat16().requires_grad_()
        before = torch.cuda.memory_allocated()
        with get_fp8_context(mlp.config):
            output, _ = mlp(x)
        kept = torch.cuda.memory_allocated() - before
        grad = torch.randn(output.shape, generator=generator, device="cuda").bfloat16()
        output.backward(grad)
        assert x.grad is not None
        found = {"output": output.detach(), "input": x.grad}
        found |= {name: p.grad.clone() for name, p in mlp.named_parameters() if p.grad is not None}
    return found, kept


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_as_exact_as_the_modules_and_keeps_no_more(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed, it has the same bits, and keeps neither the activation nor its transposed bytes."""
    from megatron.core.extensions.transformer_engine_layers import te

    fields = ACTIVATIONS[name]
    exact, _ = _steps(_mlp(**fields))
    expected, kept_by_modules = _steps(_mlp(**fields, **RECIPES[recipe]))
    made: list[int] = []
    transpose = te.Float8Tensor._create_transpose
    monkeypatch.setattr(
        te.Float8Tensor, "_create_transpose", lambda own: (made.append(own.numel()), transpose(own))[1], raising=True
    )
    found, kept = _steps(_mlp(**fields, **RECIPES[recipe], **FUSED))
    assert not made, "transposed bytes were made apart from the activation"
    monkeypatch.undo()
    again, kept_again = _steps(_mlp(**fields, **RECIPES[recipe], **RECOMPUTED))
    assert found.keys() == expected.keys() == exact.keys() == again.keys()
    for key, tensor in exact.items():
        theirs, ours = _difference(expected[key], tensor), _difference(found[key], tensor)
        assert ours < 1.25 * theirs + 0.01, (key, ours, theirs)
        assert torch.equal(again[key], found[key]), key
    kept_in_fp8, kept_less = _steps(_mlp(**fields, **RECIPES[recipe], **FUSED, activation_func_fp8_input_store=True))
    for key, tensor in exact.items():
        theirs, ours = _difference(expected[key], tensor), _difference(kept_in_fp8[key], tensor)
        assert ours < 1.25 * theirs + 0.03, (key, ours, theirs)
    activation = LENGTH * BATCH * HIDDEN
    of_input = activation * (4 if fields.get("gated_linear_unit") else 2)
    assert kept_less <= kept - 0.45 * of_input + 4096, (kept_less, kept)
    assert kept <= kept_by_modules + 4096, (kept, kept_by_modules)
    assert kept_again <= kept - activation + 4096, (kept_again, kept)


def _loss(model: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(VOCAB_SIZE, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).cuda()
    loss: torch.Tensor = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
    return loss


def _gradients(groups: ProcessGroupCollection, **fields: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of three steps of two microbatches; the last step's gradients, of this rank's parts."""
    from megatron.core.distributed.fsdp.checkpoint.state import model_tensors

    importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager.reset()
    config = TransformerConfig(**(BASE | SWIGLU | fields))
    with torch.device("cuda"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        model = GPTModel(config, spec, VOCAB_SIZE, LENGTH, position_embedding_type="rope", pg_collection=groups)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        megatron_fsdp_main_grads_dtype=torch.float32,
        fsdp_transport="nccl",  # "auto" might measure another for each model, which rounds sums otherwise
    )
    sharded = FullyShardedDataParallel(config, ddp, model, device=torch.device("cuda"), pg_collection=groups)
    losses = []
    for _ in range(3):
        sharded.zero_grad_buffer()
        for index in range(2):
            with microbatch(sharded, is_first=index == 0, is_last=index == 1):
                loss = _loss(sharded, index + 2 * group_rank(groups.dp))
                loss.backward()
            losses.append(loss.item())
        sharded.finish_grad_sync()
    return losses, {entry.name: entry.tensor.grad.full_tensor() for entry in model_tensors(model)}


def _engine() -> dict[str, str]:
    warnings.simplefilter("ignore")
    failures = {}
    splits: dict[str, dict[str, Any]] = {"zero-3": {}, "tensor": {"tensor_model_parallel_size": 2}}
    for split, degrees in splits.items():
        groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
        own = degrees | ({"sequence_parallel": True} if degrees else {})
        _, exact = _gradients(groups, **own)
        for name, recipe in RECIPES.items():
            fields = recipe | own | {"fp8_param": True}
            (_, expected), (losses, found), (again, same) = (
                _gradients(groups, **fields, **settings) for settings in ({}, FUSED, RECOMPUTED)
            )
            for key, tensor in exact.items():
                theirs, ours = _difference(expected[key], tensor), _difference(found[key], tensor)
                if not ours < 1.25 * theirs + 0.02:
                    failures[f"{split} {name} {key}"] = f"{ours}, the modules {theirs}"
                if not torch.equal(found[key], same[key]):
                    failures[f"{split} {name} {key} recomputed"] = str(_difference(same[key], found[key]))
            if losses != again:
                failures[f"{split} {name} losses"] = f"{losses}, recomputed {again}"
    return failures


@pytest.mark.gpu(2)
def test_it_trains_under_the_engine_with_weights_in_fp8() -> None:
    """ZeRO-3, and tensor with sequence parallelism: as exact as the modules, and recomputed the same."""
    for failures in run_ranks(2, _engine, backend="nccl"):
        assert not failures, "\n".join(f"{key}: {value}" for key, value in failures.items())
