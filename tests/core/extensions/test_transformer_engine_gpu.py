"""transformer-engine's own layers: as the local ones within the noise of bf16, and in FP8 close to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, microbatch
from megatron.core.extensions import why_missing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.context_parallel import get_batch_on_this_cp_rank
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.support.launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCAB_SIZE, LENGTH = 512, 256
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "init_method_std": 0.06,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
}
LATENT: dict[str, Any] = LLAMA | {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_layernorm": True,
    "apply_rope_fusion": True,
}
UP_PROJECTIONS: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA | {"layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    "fp32 residual": LLAMA | {"fp32_residual_connection": True},
    "bias fused": {"bias_activation_fusion": True},
    "experts": LLAMA | EXPERTS | {"moe_shared_expert_intermediate_size": 256},
    "experts with bias": EXPERTS,
    "latent attention": LATENT | UP_PROJECTIONS,
}
# Heads as wide as cuDNN's FP8 attention takes them.
ATTENTION: dict[str, Any] = {"fp8_recipe": "delayed", "fp8_dot_product_attention": True, "kv_channels": 128}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_recipe": "blockwise"},
    "attention": ATTENTION,
    "attention kept": ATTENTION | {"fp8_multi_head_attention": True},
    "latent attention": LATENT | {"fp8_recipe": "delayed"},
}


@pytest.fixture(autouse=True)
def needs_the_package() -> Iterator[None]:
    reason = why_missing("transformer_engine_layers")
    if reason is not None:
        pytest.skip(f"transformer-engine cannot be used: {reason}")
    yield


def _gpt(*, te: bool, groups: ProcessGroupCollection | None = None, **fields: Any) -> GPTModel:
    fields = BASE | fields
    config = (MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig)(**fields)
    with torch.device("cuda"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
        return GPTModel(config, spec, VOCAB_SIZE, LENGTH, position_embedding_type="rope", pg_collection=groups)


def _tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).cuda()


def _loss(model: Any, seed: int = 0) -> torch.Tensor:
    tokens = _tokens(seed)
    loss: torch.Tensor = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
    return loss


def _stored(model: torch.nn.Module) -> dict[str, Any]:
    from megatron.core.distributed.fsdp.checkpoint.state import model_tensors

    return {entry.name: entry.tensor for entry in model_tensors(model)}


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of the difference, by the norm of theirs."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_the_local_ones_within_the_noise_of_bf16(name: str) -> None:
    """The noise is what the local layers in bf16 differ by from themselves in fp32."""
    fp32 = _gpt(te=False, **CONFIGS[name], params_dtype=torch.float32, bf16=False)
    with torch.no_grad():
        for ours, theirs in zip(fp32.parameters(), _gpt(te=False, **CONFIGS[name]).parameters(), strict=True):
            ours.copy_(theirs)
    models = {"fp32": fp32, "local": _gpt(te=False, **CONFIGS[name]), "te": _gpt(te=True, **CONFIGS[name])}
    losses = {key: _loss(model) for key, model in models.items()}
    for loss in losses.values():
        loss.backward()
    weights = {key: _stored(model) for key, model in models.items()}
    assert weights["te"].keys() == weights["local"].keys()
    assert abs(losses["te"].item() - losses["fp32"].item()) < 3e-3, losses
    for key, exact in weights["fp32"].items():
        assert torch.equal(weights["te"][key], weights["local"][key]), key
        noise = _difference(weights["local"][key].grad, exact.grad)
        # Rounding may send a token to another expert.
        least = 0.03 if "experts" in name else 0.01
        assert _difference(weights["te"][key].grad, exact.grad) < 2 * noise + least, (key, noise)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_multiplies_in_fp8_and_stays_close(name: str) -> None:
    fields = LLAMA | RECIPES[name]
    shape = {key: value for key, value in fields.items() if not key.startswith("fp8")}
    bf16, fp8 = _gpt(te=True, **shape), _gpt(te=True, fp8="hybrid", **fields)
    for model in (bf16, fp8):
        for step in range(3):
            model.zero_grad()
            loss = _loss(model, step)
            loss.backward()
    found = _stored(fp8)
    for key, tensor in _stored(bf16).items():
        assert torch.isfinite(found[key].grad).all(), key
        difference = _difference(found[key].grad, tensor.grad)
        # Latent vectors pass one more product.
        assert difference < (0.35 if name == "latent attention" else 0.25), (key, difference)
        if key.endswith("linear_fc2.weight"):
            assert difference > 0.005, f"{key} was not multiplied in FP8"


FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed": ("delayed", FULL),
    "attention": ("attention", FULL),
    "attention alone": ("attention", {"recompute_granularity": "selective"}),
    "attention kept": ("attention kept", FULL),
    "latent attention": ("latent attention", UP_PROJECTIONS),
}


def _recomputed(
    recipe: str, recompute: dict[str, Any], *, sharded: bool, in_bytes: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses of three steps, in which weights shrink, and histories, scales and gradients after them."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    fields = {**LLAMA, "fp8": "hybrid", **RECIPES[recipe], **recompute, "fp8_param": in_bytes}
    model: Any = _gpt(te=True, **fields)
    if sharded:
        ddp = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        groups = ProcessGroupCollection.data_parallel()
        model = FullyShardedDataParallel(model.config, ddp, model, device=torch.device("cuda"), pg_collection=groups)
    losses: list[float] = []
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
            with torch.no_grad():
                parameter.mul_(0.5 if step else 1.0)
        loss = _loss(model, step)
        loss.backward()
        losses.append(loss.item())
    for name, module in model.named_modules():
        state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
        if hasattr(state, "amax_history"):
            found |= {f"{name} scale": state.scale.clone(), f"{name} history": state.amax_history.clone()}
    assert found
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[f"{name} gradient"] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return losses, found


def _recompute_and_compare() -> None:
    warnings.simplefilter("ignore")
    for name, (recipe, recompute) in RECOMPUTED.items():
        for sharded in (False, True):
            losses, found = _recomputed(recipe, recompute, sharded=sharded, in_bytes=sharded)
            expected_losses, expected = _recomputed(recipe, {}, sharded=sharded, in_bytes=sharded)
            assert losses == expected_losses, (name, sharded, losses, expected_losses)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                if key.endswith("gradient"):  # attention's backward adds in any order
                    assert _difference(found[key], tensor) < 0.02, (name, sharded, key)
                else:
                    assert torch.equal(found[key], tensor), (name, sharded, key)


def _quantise_again_and_compare() -> None:
    warnings.simplefilter("ignore")
    losses, found = _recomputed("delayed", {}, sharded=True)
    expected_losses, expected = _recomputed("delayed", {}, sharded=False)
    assert losses == expected_losses, (losses, expected_losses)
    for name, tensor in expected.items():
        if not name.endswith("gradient"):
            assert torch.equal(found[f"module.{name}"], tensor), name


def test_weights_that_are_quantised_again_in_backward_are_the_same_bytes() -> None:
    """As without sharding, where they are kept: with the scale that forward used, and their largest value noted once."""
    run_ranks(1, _quantise_again_and_compare, backend="nccl")


def test_recomputation_multiplies_with_the_same_scales_and_leaves_no_trace() -> None:
    """Losses, scales and histories of forward are those without it to the last bit, since scales have moved meanwhile."""
    run_ranks(1, _recompute_and_compare, backend="nccl")


def test_experts_multiply_in_fp8() -> None:
    """Rows of experts are padded to what the GEMM needs."""
    fields = LLAMA | EXPERTS
    bf16, fp8 = _gpt(te=True, **fields), _gpt(te=True, **fields, fp8="hybrid", fp8_recipe="tensorwise")
    losses = [_loss(model) for model in (bf16, fp8)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=0.05)
    key = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert 0.005 < _difference(_stored(fp8)[key].grad, _stored(bf16)[key].grad) < 0.6


def _sharded_gradients(fields: dict[str, Any], *, fused: bool) -> dict[str, torch.Tensor]:
    """Gradients of two microbatches, the second time as planned."""
    groups = ProcessGroupCollection.data_parallel()
    model = _gpt(te=True, **fields, gradient_accumulation_fusion=fused)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        megatron_fsdp_main_grads_dtype=torch.float32,
    )
    sharded = FullyShardedDataParallel(model.config, ddp, model, device=torch.device("cuda"), pg_collection=groups)
    for _ in range(2):
        sharded.zero_grad_buffer()
        for index in range(2):
            with microbatch(sharded, is_first=index == 0, is_last=index == 1):
                _loss(sharded, 2 * dist.get_rank() + index).backward()
        sharded.finish_grad_sync()
    return {key: tensor.grad.full_tensor().cpu() for key, tensor in _stored(model).items()}


def _engine(num_ranks: int) -> dict[str, float]:
    """The largest differences between gradients of the engine and those of one model, and between the two ways."""
    warnings.simplefilter("ignore")
    found = {}
    tensorwise = LLAMA | {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    kinds = {"bf16": LLAMA, "tensorwise": tensorwise, "weights in FP8": tensorwise | {"fp8_param": True}}
    for name, fields in kinds.items():
        fused, apart = (_sharded_gradients(fields, fused=fused) for fused in (True, False))
        whole = _gpt(te=True, **fields)
        for seed in range(2 * num_ranks):
            (_loss(whole, seed) / (num_ranks)).backward()
        exact = {key: tensor.grad.cpu() for key, tensor in _stored(whole).items()}
        found[f"{name} fused"] = max(_difference(fused[key], exact[key]) for key in exact)
        found[f"{name} apart"] = max(_difference(apart[key], exact[key]) for key in exact)
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_gradients_lie_where_the_engine_reduces_them(num_ranks: int) -> None:
    """Written there by the GEMM, or left to autograd: the same up to bf16's rounding of what the whole model adds up."""
    found = run_ranks(num_ranks, _engine, num_ranks, backend="nccl")[0]
    assert all(difference < 0.02 for difference in found.values()), found


SPLITS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "context, ring": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "context, gathered": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "context, heads": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
}


def _splits() -> dict[str, float]:
    """The largest differences between gradients of this rank's parts: of transformer-engine's layers and the local ones."""
    warnings.simplefilter("ignore")
    assert why_missing("transformer_engine_layers") is None
    found = {}
    for name, fields in SPLITS.items():
        degrees = {key: value for key, value in fields.items() if key != "cp_comm_type"}
        groups = build_process_groups(RankGrid(world_size=2, **degrees))
        gradients = []
        for te in (False, True):
            sequence_parallel = group_size(groups.tp) > 1
            model = _gpt(te=te, groups=groups, **LLAMA, **fields, sequence_parallel=sequence_parallel)
            batch = {"tokens": _tokens()[:, :-1], "labels": _tokens()[:, 1:]}
            if groups.cp is not None:
                batch = get_batch_on_this_cp_rank(batch, groups.cp)
            model(batch["tokens"], None, None, labels=batch["labels"]).mean().backward()
            gradients.append({key: tensor.grad for key, tensor in _stored(model).items()})
        local, ours = gradients
        found[name] = max(_difference(ours[key], local[key]) for key in local)
    return found


@pytest.mark.gpu(2)
def test_split_layers_are_the_local_ones_within_the_noise_of_bf16() -> None:
    for found in run_ranks(2, _splits, backend="nccl"):
        assert all(difference < 0.03 for difference in found.values()), found
