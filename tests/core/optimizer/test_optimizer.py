"""Parameter groups, and the step of the optimizer on plain modules and on sharded ones."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import count_zeros, get_grad_norm
from tests.support.launch import run_ranks


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.output = torch.nn.Linear(4, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.embedding(tokens))).logsumexp(-1).sum()


def test_vectors_are_not_decayed_and_tied_weights_are_updated_once() -> None:
    model = _Tied()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.3), [model])
    undecayed, decayed = optimizer.param_groups
    assert (undecayed["weight_decay"], decayed["weight_decay"]) == (0.0, 0.3)
    assert [id(p) for p in decayed["params"]] == [id(model.embedding.weight)]
    assert {id(p) for p in undecayed["params"]} == {id(model.norm.weight), id(model.norm.bias), id(model.output.bias)}


def test_embedding_and_output_layer_may_have_their_own_rate() -> None:
    model = _Tied()
    model.embedding.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    config = OptimizerConfig(lr=0.1, min_lr=0.01, decoupled_lr=0.5, decoupled_min_lr=0.05)
    groups = get_megatron_optimizer(config, [model]).param_groups
    assert [(g["is_decoupled_lr"], g["max_lr"], g["min_lr"]) for g in groups] == [(False, 0.1, 0.01), (True, 0.5, 0.05)]


def test_norms_of_queries_and_keys_may_be_decayed() -> None:
    model = torch.nn.ModuleDict({"q_layernorm": torch.nn.LayerNorm(4), "input_layernorm": torch.nn.LayerNorm(4)})
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, apply_wd_to_qk_layernorm=True)
    undecayed, decayed = get_megatron_optimizer(config, [model]).param_groups
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model["q_layernorm"].parameters()}
    assert (undecayed["weight_decay"], decayed["weight_decay"]) == (0.0, 0.3)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_equals_torch(kind: str, clip: float) -> None:
    ours, theirs = _Tied(), _Tied()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer=kind, lr=0.1, weight_decay=0.0, clip_grad=clip), [ours]
    )
    params = [p for p in theirs.parameters() if p.requires_grad]
    if kind == "adam":
        reference: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    else:
        reference = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    tokens = torch.tensor([0, 1, 1, 3])
    for _ in range(3):
        ours(tokens).backward()
        theirs(tokens).backward()
        result = optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(params, clip or 1e9)
        reference.step()
        assert result.update_successful
        torch.testing.assert_close(result.grad_norm, norm)
        optimizer.zero_grad()
        reference.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)


def test_state_survives_a_round_trip() -> None:
    model = _Tied()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True), [model])
    model(torch.tensor([0])).backward()
    model.norm.bias.grad = torch.zeros(4)
    zeros = optimizer.step().num_zeros_in_grad
    assert zeros is not None and zeros.item() >= 4
    other = get_megatron_optimizer(OptimizerConfig(lr=0.1), [_Tied()])
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "lion"},
        {"optimizer": "muon", "muon_coefficient_type": "mine"},
        {"optimizer": "muon", "muon_scale_mode": "none"},
        {"lr": 0.1, "min_lr": 0.2},
        {"clip_grad": -1.0},
        {"adam_beta1": 1.0},
        {"sgd_momentum": -0.1},
        {"optimizer": "sgd", "store_param_remainders": True},
        {"optimizer": "sgd", "fp16": True, "use_precision_aware_optimizer": True},
        {"optimizer": "muon", "use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
        {"exp_avg_dtype": torch.bfloat16},
        {"main_grads_dtype": torch.bfloat16},
        {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.float16},
        {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": torch.uint8, "optimizer_cpu_offload": True},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        OptimizerConfig(**settings)


def test_remainders_need_a_sharded_model() -> None:
    with pytest.raises(ValueError, match="needs a model whose parameters are all sharded"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, store_param_remainders=True), [_Tied()])


def _sharded_with_small_moments() -> None:
    """On a model in bf16; what the model or the optimizer does not have is refused."""
    fields = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="exp_avg_dtype needs a model whose parameters are all sharded"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, fp16=True, **fields), [_Tied()])  # type: ignore[arg-type]
    for main_grads in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=main_grads)
        model = fully_shard(_Tied().bfloat16(), mixed_precision_policy=policy)
        config = OptimizerConfig(lr=0.1, main_grads_dtype=torch.bfloat16, **fields)  # type: ignore[arg-type]
        if main_grads == torch.float32:
            with pytest.raises(ValueError, match=r"main_grads_dtype torch.bfloat16 needs .* got torch.float32"):
                get_megatron_optimizer(config, [model])
            continue
        optimizer = get_megatron_optimizer(config, [model])
        model(torch.tensor([0, 1])).backward()
        optimizer.step()
        inner = optimizer.optimizer
        assert isinstance(inner, FlatAdamW)
        assert {buffer.dtype for buffer in inner.state_buffers} == {
            torch.uint8,
            torch.bfloat16,
            torch.int16,
            torch.float32,  # scales
        }


def test_moments_in_fewer_bits_need_a_sharded_model_with_gradients_as_asked_for() -> None:
    run_ranks(1, _sharded_with_small_moments)


def _step_of_a_sharded_model(dtype: torch.dtype, remainders: bool, clip: float, steps: int) -> list[list[float]]:
    model = _Tied().to(dtype)
    policy = MixedPrecisionPolicy(main_params_dtype=None) if remainders else None
    fully_shard(model, placements=strategy_placements("optim_grads_params"), mixed_precision_policy=policy)
    config = OptimizerConfig(lr=0.1, clip_grad=clip, store_param_remainders=remainders, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(config, [model])
    assert isinstance(optimizer.optimizer, FlatAdamW) and optimizer.optimizer.overlaps_forward
    seen = []
    for _ in range(steps):
        loss = model(torch.tensor([0, 1, 1, 3]))
        loss.backward()
        trainable = [p for p in model.parameters() if p.requires_grad]
        expected = get_grad_norm(trainable).item()
        result = optimizer.step()
        assert result.grad_norm.item() == pytest.approx(expected, rel=1e-6)
        assert result.num_zeros_in_grad is not None and result.num_zeros_in_grad.item() == count_zeros(trainable).item()
        optimizer.zero_grad()
        assert all(p.grad is None for p in trainable)
        seen.append([loss.item(), expected, optimizer.params_norm().item()])
    return seen


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_adam_of_a_sharded_model_is_the_flat_one_and_equals_the_plain_models(clip: float) -> None:
    model = _Tied()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=clip), [model])
    expected = []
    for _ in range(4):
        loss = model(torch.tensor([0, 1, 1, 3]))
        loss.backward()
        norm = optimizer.step().grad_norm.item()
        optimizer.zero_grad()
        expected.append([loss.item(), norm, optimizer.params_norm().item()])
    for got in run_ranks(2, _step_of_a_sharded_model, torch.float32, False, clip, 4):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_bf16_model_may_keep_remainders_instead_of_fp32_main_weights() -> None:
    whole, split = (run_ranks(2, _step_of_a_sharded_model, torch.bfloat16, kept, 0.1, 4)[0] for kept in (False, True))
    assert [step[:2] for step in split] == [step[:2] for step in whole]


def test_a_rate_and_a_trainable_parameter_are_needed() -> None:
    with pytest.raises(ValueError, match="lr must be set"):
        get_megatron_optimizer(OptimizerConfig(), [_Tied()])
    with pytest.raises(ValueError, match="trainable"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [_Tied().requires_grad_(False)])


def _undecayed_embeddings() -> dict[bool, tuple[list[str], float]]:
    """The matrices without weight decay, and the size of the embedding's elements; with tied weights, and without."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    found = {}
    for tied in (True, False):
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=4, init_method_std=0.01, embedding_init_method_std=1.0
        )
        with torch.device("meta"):
            model = GPTModel(
                config, get_gpt_decoder_block_spec(config), 64, 8, share_embeddings_and_output_weights=tied
            )
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        wrapped = FullyShardedDataParallel(config, ddp_config, model, device=torch.device("cpu"))
        names = {id(parameter): name for name, parameter in wrapped.module.named_parameters()}
        groups = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.3), [wrapped]).param_groups
        undecayed = [p for group in groups if group["weight_decay"] == 0.0 for p in group["params"] if p.dim() > 1]
        size = wrapped.module.embedding.word_embeddings.weight.full_tensor().std().item()
        found[tied] = sorted(names[id(p)] for p in undecayed), size
    return found


def test_embeddings_with_a_standard_deviation_of_their_own_are_not_decayed() -> None:
    """Also sharded, where parameters are other objects. The output layer decays, unless it is the embedding."""
    for found in run_ranks(2, _undecayed_embeddings):
        for names, size in found.values():
            assert names == ["embedding.position_embeddings.weight", "embedding.word_embeddings.weight"]
            assert 0.9 < size < 1.1
