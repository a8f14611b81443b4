"""Layers of transformer-engine (its stand-in) under the sharding engine and under every split train as the local layers do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.support import fake_float8_tensors, fake_transformer_engine
from tests.support.rank_checks import RankChecks
from tests.support.tiny_moe import FIELDS as MOE_FIELDS
from tests.support.tiny_moe import LENGTH, VOCAB_SIZE, tokens_of
from tests.support.whole_tensors import whole_tensors

CHECKS = RankChecks(__name__)

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "init_method_std": 0.3,
}
GPT2: dict[str, Any] = {**LLAMA, "normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": False}
LATENT: dict[str, Any] = {**LLAMA, "num_query_groups": None, "multi_latent_attention": True, "q_lora_rank": 12}
LATENT |= {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 5}
EXPERTS: dict[str, Any] = {**MOE_FIELDS, "moe_grouped_gemm": True}
FP8: dict[str, Any] = {**LLAMA, "params_dtype": torch.bfloat16, "bf16": True, "fp8": "hybrid"}
TENSORWISE = {**FP8, "fp8_recipe": "tensorwise"}
FP8 |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}


def _built(
    fields: dict[str, Any], *, te: bool, strategy: Any = "optim_grads_params", **degrees: Any
) -> tuple[FullyShardedDataParallel, FlatAdamW]:
    fake_transformer_engine.install()
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
    kind = MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig
    config = kind(**fields, **degrees, sequence_parallel=group_size(groups.tp) > 1)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
    model = GPTModel(config, block, VOCAB_SIZE, LENGTH, position_embedding_type="rope", pg_collection=groups)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=strategy != "no_shard",
        data_parallel_sharding_strategy=strategy,
        megatron_fsdp_main_params_dtype=torch.float32,
        megatron_fsdp_main_grads_dtype=torch.float32,
    )
    sharded = FullyShardedDataParallel(config, ddp, model, pg_collection=groups)
    return sharded, FlatAdamW(list(sharded.parameters()), lr=1e-2, eps=1e-3)


def _train(model: FullyShardedDataParallel, optimizer: FlatAdamW, steps: range) -> list[float]:
    """Two microbatches a step; returns the losses of this rank."""
    losses = []
    for step in steps:
        for index in range(2):
            with microbatch(model, is_first=index == 0, is_last=index == 1):
                tokens = tokens_of(10 * step + 2 * group_rank(model.pg_collection.dp) + index, 4)[:, :9]
                loss = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
                loss.backward()
            losses.append(loss.item())
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _saved(model: FullyShardedDataParallel, optimizer: FlatAdamW, name: str) -> Path:
    path = Path(_folder()) / name
    save_checkpoint(model, optimizer, path)
    return path


def _whole_on_rank_0(model: FullyShardedDataParallel, optimizer: FlatAdamW) -> dict[str, torch.Tensor]:
    """Save all ranks' tensors and read them on rank 0; others would read the same."""
    path = _saved(model, optimizer, "model")
    return dict(whole_tensors(path)) if dist.get_rank() == 0 else {}


def _folder() -> str:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    assert made[0] is not None
    return made[0]


def _full(grad: Any) -> torch.Tensor:
    full: torch.Tensor = grad.full_tensor()
    return full


def _assert_train_alike(fields: dict[str, Any], **degrees: Any) -> None:
    """Three steps of both implementations: the same checkpoints, names and values, optimizer state included."""
    whole = {}
    for te in (False, True):
        model, optimizer = _built(fields, te=te, **degrees)
        _train(model, optimizer, range(3))
        whole[te] = _whole_on_rank_0(model, optimizer)
    assert whole[True].keys() == whole[False].keys()
    for name, tensor in whole[False].items():
        torch.testing.assert_close(whole[True][name], tensor, rtol=1e-4, atol=2e-5, msg=f"{name} {degrees}")


@CHECKS.on(2)
def they_train_as_the_local_layers() -> None:
    """Under data, tensor (with sequence) and expert parallelism."""
    _assert_train_alike(LLAMA)
    _assert_train_alike(GPT2, strategy="optim_grads")
    _assert_train_alike(LLAMA, tensor_model_parallel_size=2)
    _assert_train_alike(GPT2, tensor_model_parallel_size=2)
    _assert_train_alike(LATENT, tensor_model_parallel_size=2)
    _assert_train_alike(EXPERTS, expert_model_parallel_size=2)


@CHECKS.on(2)
def checkpoints_of_one_implementation_load_under_the_other() -> None:
    """Both ways, weights and optimizer state bit for bit; a key that neither has is still an error."""
    for te in (False, True):
        for fields in (LLAMA, EXPERTS):
            model, optimizer = _built(fields, te=te)
            _train(model, optimizer, range(1))
            path = _saved(model, optimizer, "first")
            other, fresh = _built({**fields, "init_seed": 5}, te=not te)
            load_checkpoint(other, fresh, path)
            first, second = whole_tensors(path), whole_tensors(_saved(other, fresh, "second"))
            assert first.keys() == second.keys()
            for name, tensor in first.items():
                assert torch.equal(second[name], tensor), name
    assert not [name for name in first if "_extra_state" in name or "layer_norm_weight" in name]
    assert any(name.endswith("pre_mlp_layernorm.weight") for name in first)
    smaller, _ = _built({**LLAMA, "num_layers": 1}, te=True)
    with pytest.raises(ValueError, match=r"extra|1\.input_layernorm"):
        load_checkpoint(smaller, None, path)


class _Twice(torch.nn.Module):
    """A module that uses one weight twice."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = self.layer(x)[0]
        return self.layer(torch.tanh(once))[0]


@CHECKS.on(2)
def a_weight_that_is_used_twice_gets_both_gradients() -> None:
    """transformer-engine asks in forward whether to overwrite, when nobody knows which use comes first in backward."""
    fake_transformer_engine.install()
    from megatron.core.extensions.transformer_engine_layers import TELinear

    config = TransformerConfig(**LLAMA)
    settings: dict[str, Any] = {
        "parallel_mode": None,
        "config": config,
        "init_method": config.init_method,
        "bias": True,
    }
    whole, net = (_Twice(TELinear(8, 8, **settings)) for _ in range(2))
    fully_shard(net)
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(3):  # the second time as planned
        for model in (whole, net):
            model.zero_grad()
            (model(x) ** 2).sum().backward()
    torch.testing.assert_close(_full(net.layer.weight.grad), whole.layer.weight.grad, rtol=1e-4, atol=1e-5)
    assert net.layer.fuse_wgrad_accumulation and not whole.layer.fuse_wgrad_accumulation


@CHECKS.on(2)
def weights_that_travel_in_fp8_train_as_those_that_are_quantised_where_they_are_multiplied() -> None:
    """Bit for bit, where gradients go the same way; the gathered bytes are half of bf16's."""
    fields: dict[str, Any] = {**LLAMA, "params_dtype": torch.bfloat16, "bf16": True, "fp8": "hybrid"}
    fields |= {"fp8_recipe": "tensorwise", "gradient_accumulation_fusion": False}
    for strategy in ("optim", "optim_grads_params"):
        found = {}
        for fp8_param in (False, True):
            model, optimizer = _built({**fields, "fp8_param": fp8_param}, te=True, strategy=strategy)
            losses = _train(model, optimizer, range(4))
            found[fp8_param] = (losses, whole_tensors(_saved(model, optimizer, "model")))
            rest = {group.weights.rest_dtype for group in model.parameter_groups}
            assert rest == ({torch.uint8, torch.bfloat16} if fp8_param else {torch.bfloat16}), rest
        assert found[True][0] == found[False][0], (strategy, found[True][0], found[False][0])
        for name, tensor in found[False][1].items():
            assert torch.equal(found[True][1][name], tensor), (strategy, name)


class _Quantized(torch.nn.Module):
    """A module with a weight as ``quantized_model_init`` makes it."""

    def __init__(self, values: torch.Tensor, quantizer: Any, *, keeps: bool) -> None:
        super().__init__()
        scale = torch.full((1,), 448.0).div(values.abs().max().float())
        data = (values.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        tensor = fake_float8_tensors.Float8Tensor(
            shape=values.shape,
            dtype=values.dtype,
            data=data,
            fp8_scale_inv=scale.reciprocal(),
            fp8_dtype=fake_float8_tensors.DType.kFloat8E4M3,
            requires_grad=False,
            data_transpose=None,
            quantizer=quantizer,
            device=values.device,
        )
        weight: Any = torch.nn.Parameter(tensor)
        weight.partition_stride = 1
        if keeps:
            weight.get_high_precision_init_val = lambda: values
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        assert type(weight) is fake_float8_tensors.Float8Tensor and vars(weight)["partition_stride"] == 1
        return x @ weight.dequantize().t()


@CHECKS.on(2)
def quantized_modules_are_sharded_as_they_are() -> None:
    """Main weights are the values from before, where they were kept; the codec is the quantiser's."""
    fake_transformer_engine.install()
    values = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0))).bfloat16()
    kinds: dict[str, Any] = {
        "tensorwise": fake_float8_tensors.Float8CurrentScalingQuantizer(None, values.device, force_pow_2_scales=True),
        "delayed": fake_float8_tensors.Float8Quantizer(torch.ones(1), torch.zeros(1), None),
    }
    for recipe, quantizer in kinds.items():
        for keeps in (False, True):
            made = _Quantized(values, quantizer, keeps=keeps)
            expected = values.float() if keeps else made.weight.dequantize().float()
            module: Any = fully_shard(made)
            weight: Any = module.weight
            assert torch.equal(weight.full_tensor(), expected) and weight.dtype == torch.float32
            (group,) = module.parameter_groups
            assert group.weights.codec.recipe == recipe and group.weights.rest_dtype == torch.uint8
            assert group.weights.codec.scales_by_powers_of_two is (recipe == "tensorwise")
            out = module(torch.eye(32).bfloat16())
            error = (out.t().float() - values.float()).abs()
            assert (error <= values.float().abs() * 2.0**-3 + 0.01).all()  # three bits of mantissa, rounded twice
    with pytest.raises(NotImplementedError, match="got a Unknown"):
        fully_shard(_Quantized(values, type("Unknown", (fake_float8_tensors._Quantizer,), {})(), keeps=False))


def _trained_in_fp8(fields: dict[str, Any], **degrees: Any) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Train three steps; return the losses, how often histories advanced, and histories, scales and weights."""
    model, optimizer = _built(fields, te=True, **degrees)
    losses = _train(model, optimizer, range(3))
    tensors = _whole_on_rank_0(model, optimizer)
    for name, module in model.named_modules():
        for key, state in getattr(module, "fp8_meta", {}).items():
            if hasattr(state, "amax_history"):
                tensors |= {f"{name} {key} scale": state.scale, f"{name} {key} history": state.amax_history}
    return losses, fake_transformer_engine.FP8GlobalStateManager.num_rolls, tensors


def _histories(model: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run three steps in which weights shrink; return losses, histories and scales."""
    losses: list[float] = []
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        tokens = tokens_of(step, 4)[:, :9]
        loss = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad = None
            with torch.no_grad():
                parameter.mul_(0.5)  # exact in any dtype
    for name, module in model.named_modules():
        for key, state in getattr(module, "fp8_meta", {}).items():
            if hasattr(state, "amax_history"):
                found |= {
                    f"{name} {key} scale": state.scale.clone(),
                    f"{name} {key} history": state.amax_history.clone(),
                }
    return losses, found


@CHECKS.on(2)
def weights_that_are_quantised_again_in_backward_are_the_same_bytes() -> None:
    """With the scale that forward used, though it has moved, and without noting their largest value a second time."""
    sharded, _ = _built({**FP8, "gradient_accumulation_fusion": False}, te=True)
    losses, found = _histories(sharded.module)
    config = TransformerConfig(**FP8)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    whole = GPTModel(config, block, VOCAB_SIZE, LENGTH, position_embedding_type="rope")
    fake_transformer_engine.FP8GlobalStateManager.reset()
    expected_losses, expected = _histories(whole)
    assert losses == expected_losses, (losses, expected_losses)
    assert found.keys() == expected.keys() and len(found) >= 16
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), (key, found[key], tensor)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "one chunk": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
}


@CHECKS.on(2)
def recomputation_in_fp8_multiplies_with_the_same_scales_and_leaves_no_trace() -> None:
    """Bit for bit: losses, weights, scales and histories are those without recomputation, under each recipe."""
    kinds: list[dict[str, Any]] = [
        {"fp8_param": True, "use_transformer_engine_op_fuser": True},
        {"fp8_dot_product_attention": True},
        {"fp8_recipe": "tensorwise", "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"},
    ]
    kinds[2]["fp8_dot_product_attention"] = True
    for kind in kinds:
        expected = _trained_in_fp8({**FP8, **kind})
        for name, recompute in RECOMPUTED.items():
            found = _trained_in_fp8({**FP8, **kind, **recompute})
            assert found[0] == expected[0], (kind, name, found[0], expected[0])
            assert found[1] == expected[1] or "fp8_recipe" in kind, f"histories advanced {found[1]} times"
            assert found[2].keys() == expected[2].keys()
            for key, tensor in expected[2].items():
                assert torch.equal(found[2][key], tensor), (kind, name, key)
    assert any("scaling_bwd history" in key for key in _trained_in_fp8({**FP8, **RECOMPUTED["block"]})[2])


ACTIVATION: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}


@CHECKS.on(2)
def the_mlp_in_fp8_trains_under_the_engine() -> None:
    """Weights in FP8 under ZeRO-3 and split over ranks: close to the modules, and recomputed bit for bit the same."""
    for degrees in ({}, {"tensor_model_parallel_size": 2}):
        for kind in (FP8, TENSORWISE):
            fields = {**kind, "fp8_param": True}
            theirs = _trained_in_fp8(fields, **degrees)
            fields["use_transformer_engine_op_fuser"] = True
            ours = _trained_in_fp8(fields, **degrees)
            torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), rtol=0.05, atol=0.05)
            assert ours[2].keys() == theirs[2].keys()
            for recompute in (ACTIVATION, RECOMPUTED["uniform"]):
                again = _trained_in_fp8({**fields, **recompute}, **degrees)
                assert again[0] == ours[0] and (again[1] == ours[1] or kind is TENSORWISE), (degrees, recompute)
                assert all(torch.equal(again[2][key], tensor) for key, tensor in ours[2].items()), (degrees, recompute)


@CHECKS.on(2)
def activations_are_recomputed_with_biases_that_were_released_in_between() -> None:
    """In the dtype of the parameters; the bias that is a part of the activation is of a unit that was resharded."""
    for te in (False, True):
        found = []
        for fields in ({}, ACTIVATION):
            model, optimizer = _built({**GPT2, "bias_activation_fusion": True, **fields}, te=te)
            found.append((_train(model, optimizer, range(3)), whole_tensors(_saved(model, optimizer, "model"))))
        assert found[0][0] == found[1][0]
        assert all(torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


@CHECKS.on(2)
def training_in_fp8_resumes_bitwise() -> None:
    """Histories and scales are in the checkpoint; a run in bf16 and one with another recipe load it without them."""
    for fuses in (True, False):
        fields = {**FP8, "use_transformer_engine_op_fuser": fuses}
        model, optimizer = _built(fields, te=True)
        _train(model, optimizer, range(2))
        path = _saved(model, optimizer, "fp8")
        expected = _train(model, optimizer, range(2, 4))
        resumed, fresh = _built({**fields, "init_seed": 5}, te=True)
        load_checkpoint(resumed, fresh, path)
        assert _train(resumed, fresh, range(2, 4)) == expected
    without, other = _built({**FP8, "init_seed": 5}, te=True)
    load_checkpoint(without, other, path)
    module: Any
    for module in without.modules():
        if "scaling_fwd" in getattr(module, "fp8_meta", {}):
            del module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
            module.fp8_meta_tensors_initialized = False
    assert _train(without, other, range(2, 4)) != expected, "without the histories the losses are others"
    for fields in (FP8 | {"fp8": None, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"},):
        for te in (False, True):
            bf16, third = _built(fields, te=te)
            load_checkpoint(bf16, third, path)
            losses = _train(bf16, third, range(2, 4))
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.1, atol=0.1)
            back, fourth = _built({**FP8, "init_seed": 5}, te=True)
            load_checkpoint(back, fourth, _saved(bf16, third, "bf16"))
            _train(back, fourth, range(4, 5))


@CHECKS.on(2)
def weights_in_fp8_resume_bitwise() -> None:
    """Tensor-parallel ranks hold parts of a weight under one name, so their histories are one."""
    for degrees in ({}, {"tensor_model_parallel_size": 2}):
        fields = {**FP8, "fp8_param": True}
        model, optimizer = _built(fields, te=True, **degrees)
        _train(model, optimizer, range(3))
        path = _saved(model, optimizer, "first")
        expected = _train(model, optimizer, range(3, 5))
        resumed, fresh = _built({**fields, "init_seed": 5}, te=True, **degrees)
        _train(resumed, fresh, range(6, 7))
        load_checkpoint(resumed, fresh, path)
        losses = _train(resumed, fresh, range(3, 5))
        assert losses == expected, (degrees, losses, expected)
        for own, other in zip(resumed.parameter_groups, model.parameter_groups, strict=True):
            assert torch.equal(own.weights.model.local, other.weights.model.local)
            if isinstance(own.weights, ScaledWeights) and isinstance(other.weights, ScaledWeights):
                for kind in ("scale", "history"):
                    assert torch.equal(getattr(own.weights.scales, kind), getattr(other.weights.scales, kind))
        assert any(isinstance(group.weights, ScaledWeights) for group in model.parameter_groups)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
