"""Small functions under Megatron-Core's names."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.core import _rank_utils, config, jit, num_microbatches_calculator, typed_torch, utils
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed.finalize_model_grads import (
    _get_main_grad_attr,
    _reshard_if_dtensor,
    _unshard_if_dtensor,
)
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl, quick_gelu
from megatron.core.fusions.fused_bias_gelu import bias_gelu, bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu, bias_swiglu_impl, swiglu
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb, get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, apply_rotary
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_layer_with_transformer_engine_submodules,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    Symbols,
    get_hybrid_layer_counts,
    get_hybrid_total_layer_count,
    parse_hybrid_pattern,
)
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.straggler_detector import StragglerDetector
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules, import_module
from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from megatron.training.utils import log_utils
from megatron.training.utils.common_utils import get_local_rank_preinit
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import build_gpt


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, **fields})


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_rotated_as_the_model_rotates_them(interleaved: bool) -> None:
    embedding = RotaryEmbedding(8, 0.5, rotary_interleaved=interleaved)
    heads = _random(6, 2, 3, 8)
    angles = embedding(6)
    config = _config(rotary_interleaved=interleaved)
    rotated = apply_rotary_pos_emb(heads, angles, config)
    cos, sin = embedding.get_cos_sin(6, torch.device("cpu"))
    torch.testing.assert_close(rotated, apply_rotary(heads, cos, sin, interleaved=interleaved))
    torch.testing.assert_close(apply_rotary_pos_emb(rotated, angles, config, inverse=True), heads)


def test_packed_heads_are_rotated_from_the_beginning_of_each_sample() -> None:
    angles, config, heads = RotaryEmbedding(8, 1.0)(6), _config(), _random(6, 3, 8)
    packed = apply_rotary_pos_emb(heads, angles, config, cu_seqlens=torch.tensor([0, 2, 6]))
    alone = [apply_rotary_pos_emb(part[:, None], angles[: len(part)], config)[:, 0] for part in (heads[:2], heads[2:])]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_positions_of_a_context_parallel_rank_need_its_group() -> None:
    with pytest.raises(ValueError, match="group"):
        get_pos_emb_on_this_cp_rank(torch.zeros(8, 1, 1, 4), 0, None)


def test_activations_with_a_bias() -> None:
    x, bias = _random(3, 8), _random(8)
    gate, up = (x + bias).chunk(2, dim=-1)
    torch.testing.assert_close(bias_swiglu_impl(x, bias), F.silu(gate) * up)
    torch.testing.assert_close(bias_swiglu(x, bias), swiglu(x + bias))
    torch.testing.assert_close(bias_geglu_impl(x, bias), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(bias_gelu_impl(x, bias), F.gelu(x + bias, approximate="tanh"))
    torch.testing.assert_close(bias_gelu(bias, x), bias_gelu_impl(x, bias))
    torch.testing.assert_close(quick_gelu(x), x * torch.sigmoid(1.702 * x))
    with pytest.raises(NotImplementedError, match="clamp_value"):
        bias_swiglu_impl(x, bias, clamp_value=7.0)


@pytest.mark.parametrize("centered", [False, True])
def test_a_fused_layer_norm_is_torchs(centered: bool) -> None:
    config, x = _config(normalization="LayerNorm", layernorm_zero_centered_gamma=centered), _random(3, 16)
    norm = FusedLayerNorm(config, 16, 1e-5)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,)))
    torch.testing.assert_close(WrappedTorchLayerNorm(config, 16)(x), norm(x))
    with pytest.raises(ValueError, match="RMSNorm"):
        FusedLayerNorm(_config(normalization="RMSNorm"), 16)


def test_layers_of_pipeline_stages() -> None:
    config = _config(num_layers=8)
    assert (get_num_layers_to_build(config), get_transformer_layer_offset(config)) == (8, 0)
    config.pipeline_model_parallel_size, config.pipeline_dtype = 4, torch.float32
    assert [get_transformer_layer_offset(config, pp_rank=stage) for stage in range(4)] == [0, 2, 4, 6]
    assert get_num_layers_to_build(config, None, 3) == 2
    with pytest.raises(ValueError, match="vp_stage must be from 0 to 0"):
        get_transformer_layer_offset(config, 1, 0)
    config.virtual_pipeline_model_parallel_size = 2
    assert [get_transformer_layer_offset(config, chunk, 1) for chunk in range(2)] == [1, 5]
    with pytest.raises(ValueError, match="vp_stage must be from 0 to 1"):
        get_num_layers_to_build(config, None, 0)


def test_specs_of_layers() -> None:
    config = _config()
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    assert len(specs) == 4 and all(spec.module is TransformerLayer for spec in specs)
    assert get_gpt_mtp_block_spec(config, specs[0], False) is None
    assert get_submodules(specs[0]) is specs[0].submodules
    assert get_submodules(functools.partial(dict, submodules="theirs")) == "theirs"
    with pytest.raises(ValueError, match="submodules"):
        get_submodules(TransformerLayer.forward)
    assert import_module(("megatron.core.transformer.spec_utils", "ModuleSpec")) is ModuleSpec
    with pytest.raises(ImportError, match="Nothing"):
        import_module(("megatron.core.transformer.spec_utils", "Nothing"))


def test_a_callers_language_model_has_the_loss_of_ours() -> None:
    gpt = build_gpt({"share_embeddings_and_output_weights": False})
    assert isinstance(gpt, GPTModel) and isinstance(gpt, LanguageModule)

    class Bigram(LanguageModule):
        pre_process = post_process = True

        def __init__(self) -> None:
            super().__init__(gpt.config)
            self.embedding, self.output_layer = gpt.embedding, gpt.output_layer
            self.setup_embeddings_and_output_layer()

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits, _ = self.output_layer(self.embedding(tokens, None))
            return self.compute_language_model_loss(labels, logits)

    model, tokens = Bigram(), torch.tensor([[3, 1, 2], [0, 5, 4]])
    logits = model.output_layer(model.embedding(tokens, None))[0].transpose(0, 1)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert model.output_layer.weight.is_embedding_or_output_parameter
    assert model.shared_embedding_or_output_weight() is gpt.embedding.word_embeddings.weight


def test_functions_are_compiled_until_that_is_disabled() -> None:
    assert jit.jit_fuser is torch.compile
    jit.disable_jit_fuser()
    try:
        assert jit.jit_fuser(len) is len
    finally:
        jit.enable_jit_fuser()
    assert jit.jit_fuser is torch.compile


def test_ranks_before_process_groups_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert (_rank_utils.safe_get_rank(), _rank_utils.safe_get_world_size()) == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert (_rank_utils.safe_get_rank(), _rank_utils.safe_get_world_size()) == (3, 8)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (_rank_utils.safe_get_rank(), _rank_utils.safe_get_world_size()) == (2, 4)


def test_the_rank_on_a_host_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert get_local_rank_preinit() == 5
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert get_local_rank_preinit() == 2
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("SLURM_LOCALID")
    with pytest.warns(UserWarning, match="LOCAL_RANK or SLURM_LOCALID"):
        assert get_local_rank_preinit() == 0


def test_types_and_signatures() -> None:
    layer = torch.nn.Linear(1, 1)
    assert typed_torch.apply_module(layer) is layer and typed_torch.not_none(0) == 0
    with pytest.raises(TypeError, match="int"):
        typed_torch.apply_module(3)
    with pytest.raises(ValueError, match="None"):
        typed_torch.not_none(None)

    def source(self: object, size: int, *, name: str = "x") -> int:
        return size

    @typed_torch.copy_signature(source, handle_first_src_param="skip", handle_first_dst_param="preserve")
    def wrapped(first: object, *args: Any, **kwargs: Any) -> str:
        return str(source(first, *args, **kwargs))

    assert list(inspect.signature(wrapped).parameters) == ["first", "size", "name"] and wrapped(None, 3) == "3"


def test_a_module_that_returns_a_function() -> None:
    assert IdentityFuncOp(1, a=2)(training=True, fused=False)("first", "second") == "first"


def test_another_storage_of_files_is_refused() -> None:
    assert not MultiStorageClientFeature.is_enabled()
    MultiStorageClientFeature.disable()
    with pytest.raises(NotImplementedError, match="MultiStorageClientFeature"):
        MultiStorageClientFeature.enable()


def test_what_is_experimental_is_refused_until_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    @utils.experimental_cls(introduced_with_version="0.1.0")
    class Thing:
        size = 3
        is_experimental: bool

        @classmethod
        def make(cls) -> str:
            return "made"

        def show(self) -> str:
            return "shown"

    thing_fn = utils.experimental_fn("0.1.0")(lambda x: x + 1)
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", False)
    assert not Thing.is_experimental
    for use in (lambda: Thing(), lambda: Thing.make(), lambda: thing_fn(1)):
        with pytest.raises(utils.ExperimentalNotEnabledError, match="set_experimental_flag"):
            use()
    config.set_experimental_flag(True)
    thing = Thing()
    assert (thing.show(), thing.size, Thing.make(), thing_fn(1), thing.is_experimental) == ("shown", 3, "made", 2, True)
    assert type(thing).__qualname__ == Thing.__qualname__ and isinstance(thing, Thing)
    config.set_experimental_flag(False)
    with pytest.raises(utils.ExperimentalNotEnabledError):
        thing.show()


def test_marks_of_callers_functions() -> None:
    @utils.deprecated("1.0", removal_version="2.0", alternative="new", reason="faster")
    def old(x: int) -> int:
        return x

    with pytest.warns(DeprecationWarning, match="old is deprecated since version 1.0. Use new.* 2.0.*faster"):
        assert old(3) == 3
    strict = utils.deprecate_args("y")(lambda x, y=0: x)
    assert strict(1) == 1
    with pytest.raises(TypeError, match="y must be left out"):
        strict(1, y=2)
    utils.configure_nvtx_profiling(True)  # without CUDA there are no ranges to mark
    try:
        assert utils.nvtx_decorator()(abs)(-1) == 1
    finally:
        utils.configure_nvtx_profiling(False)
    assert utils.internal_api(old) is utils.experimental_api(old) is old and vars(old)["_internal_api"]
    assert utils.null_decorator(old) is utils.null_decorator(1, a=2)(old) is old


def test_small_functions_of_tensors_and_modules() -> None:
    x = _random(4, 3)
    assert utils.assert_viewless_tensor([x, 1]) == [x, 1]
    with pytest.raises(AssertionError, match="no view"):
        utils.assert_viewless_tensor(x[0])
    rows = x.clone().requires_grad_(True)
    utils.MakeViewlessTensor.apply(rows[:2], True).sum().backward()
    assert rows.grad.sum() == 6
    grad, inputs = utils.prepare_input_tensors_for_wgrad_compute(_random(2, 3, 4).transpose(0, 1), _random(3, 2, 5))
    assert grad.shape == (6, 4) and inputs.shape == (6, 5) and grad.is_contiguous()
    norm, each = utils.local_multi_tensor_applier(utils.local_multi_tensor_l2_norm, None, [[x, 2 * x]], True)
    torch.testing.assert_close(norm, x.norm().view(1) * 5**0.5)
    torch.testing.assert_close(each, torch.stack([x.norm(), 2 * x.norm()]))
    scaled = [torch.zeros_like(x)]
    utils.local_multi_tensor_applier(utils.local_multi_tensor_scale, None, [[x], scaled], 3.0)
    torch.testing.assert_close(scaled[0], 3 * x)
    calls: list[int] = []
    for index in range(2):
        setattr(rows, utils.PARAM_READY_CALLBACK_ATTR, functools.partial(calls.append, index))
        utils.ensure_params_ready([rows, x, rows])
    assert calls == [0, 1]
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert utils.is_submodule(layer[0], layer) and not utils.is_submodule(layer, layer)
    assert utils.is_submodule(layer, layer, strict=False)
    assert utils.round_up_to_nearest_multiple(9, 8) == 16
    assert utils.accepts_parameter(lambda a, **k: a, "b") and not utils.accepts_parameter(lambda a: a, "b")
    assert utils.is_using_quantization_scales(_config()) is False
    filled = utils.mup_scaled_init_method_normal(1.0, 2, 4.0)(torch.empty(10_000))
    assert filled.std().item() == pytest.approx(0.25, rel=0.05)
    assert utils.get_flashinfer_version() is None and not utils.is_flashinfer_min_version("0.1")
    assert not utils.is_mamba_min_version("0.1") and not utils.is_causal_conv1d_min_version("0.1")


def test_logs_of_one_rank(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("of_a_caller")
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO):
        utils.log_single_rank(logger, logging.INFO, "first %s", 1)
        utils.log_single_rank(logger=logger, level=logging.INFO, msg="second", rank=1)
    assert caplog.messages == ["second"]
    with pytest.raises(AssertionError, match="init_process_group"):
        utils.log_on_each_pipeline_stage(logger, logging.INFO, "third")


@pytest.fixture
def straggler_detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[StragglerDetector]:
    monkeypatch.setattr(StragglerDetector, "_of_process", None)
    yield utils.StragglerDetector()


def test_parts_of_a_step_are_timed(straggler_detector: StragglerDetector, caplog: pytest.LogCaptureFixture) -> None:
    detector = straggler_detector
    assert StragglerDetector() is detector and not detector.configured
    with detector:
        pass
    assert detector.elapsed()[0] == 0, "not enabled"
    with pytest.raises(NotImplementedError, match="port"):
        detector.configure(1, 0, port=5000)
    detector.configure(1, 0, enabled=True)
    for _ in range(2):
        with detector(bdata=True):
            time.sleep(0.02)
        with detector:
            time.sleep(0.03)
    with caplog.at_level(logging.INFO):
        assert detector.report(1e12, 2)
    (line,) = caplog.messages
    times = [float(part.split(": ")[1].split("ms")[0]) for part in line.split(" | ")[:3]]
    assert times[0] == times[1] >= 30 and times[2] >= 20
    assert detector.elapsed() == (0, 0, 0, 0, 0, 0)
    from megatron.core.straggler_detector import _lines

    lines = _lines([(2.0, 1.0, 5.0), (1.0, 2.0, 9.0), (3.0, 0.0, 4.0)], 2)
    assert "MnRtt/Rnk: 1.00ms/1 | MxRtt/Rnk: 3.00ms/2" in lines[0] and "MxEtpt/Rnk: 9.00TF/1" in lines[0]
    assert lines[1].endswith("4.00TF/2, 5.00TF/0")


def test_batch_sizes_that_are_behind_may_fit_fewer_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator(
        1, 512, False, 0, "0:256 200K:512 600K:1024"
    )
    assert (calculator.current_global_batch_size, calculator.num_micro_batches) == (256, 0)
    calculator.update(600_000, consistency_check=True)
    assert calculator.get() == 2
    with pytest.raises(AssertionError, match="256"):
        calculator.update(0, consistency_check=True)


def test_the_calculator_is_a_variable_that_callers_look_at_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    for _ in range(2):
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 32, 8, 2)
        found = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        assert isinstance(found, num_microbatches_calculator.ConstantNumMicroBatchesCalculator) and found.get() == 2
        num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


def _gradients() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)
    parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    resharded = _reshard_if_dtensor(whole * 2, parameter)
    assert isinstance(resharded, DTensor) and resharded.placements == (Shard(0),)
    return [resharded.to_local().tolist(), _unshard_if_dtensor(parameter).tolist()]


def test_gradients_of_dtensors_are_gathered_and_split_as_they_were() -> None:
    first, second = run_ranks(2, _gradients)
    assert first[1] == second[1] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert first[0] == [[0.0, 2.0], [4.0, 6.0]] and second[0] == [[8.0, 10.0]]
    plain = torch.nn.Parameter(torch.ones(2))
    assert _unshard_if_dtensor(plain) is plain and _reshard_if_dtensor(plain, plain) is plain
    assert _get_main_grad_attr(plain) == "grad"
    plain.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    assert _get_main_grad_attr(plain) == "main_grad"


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_a_softmax_of_callers_scales_and_masks(fuses: bool, window: tuple[int, int] | None) -> None:
    def hidden(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(mask, -10000.0)

    scores = _random(2, 3, 4, 5).bfloat16()
    softmax = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, fuses, hidden, True, 0.5, window)
    positions = torch.arange(5) - torch.arange(4).unsqueeze(1) - 1
    seen = (positions <= 0) & (positions >= -2 if window else torch.ones(4, 5, dtype=torch.bool))
    expected = (scores.float() * 0.5).masked_fill(~seen, -10000.0).softmax(-1).bfloat16()
    torch.testing.assert_close(softmax(scores, None), expected)
    mask = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(2)) < 0.3
    masked = (scores.float() * 0.5).masked_fill(mask, -10000.0)
    torch.testing.assert_close(softmax(scores, mask), masked.softmax(-1).bfloat16())
    sinks = torch.tensor([0.0, 1.0, -1.0])
    total = masked.exp().sum(-1, keepdim=True) + sinks.exp().view(1, 3, 1, 1)
    torch.testing.assert_close(softmax(scores, mask, sinks), (masked.exp() / total).bfloat16(), atol=1e-2, rtol=1e-2)
    if window is None:
        assert float(softmax(scores[:, :, :1], None).sum()) == pytest.approx(6, rel=1e-2)
        padding = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, fuses, hidden, False, None)
        torch.testing.assert_close(padding(scores.float(), None), scores.float().softmax(-1))
        with pytest.raises(ValueError, match="softmax_in_fp32 must be True with a scale"):
            FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, fuses, hidden, False, 0.5)


def test_fused_bias_dropout_add_keeps_a_share_and_scales_it() -> None:
    x, residual = torch.ones(200, 10, 4), torch.zeros(200, 10, 4)
    total = bias_dropout_add_fused_train((x, torch.ones(4)), residual, 0.25)
    assert {round(float(value), 4) for value in total.unique()} == {0.0, round(2 / 0.75, 4)}
    assert float((total > 0).float().mean()) == pytest.approx(0.75, abs=0.03)


def test_gate_and_up_projection_are_two_boxes_of_the_whole_tensor() -> None:
    data = torch.arange(16.0).view(8, 2)
    box = ShardedTensor.from_rank_offsets("fc1", data, (0, 1, 4), (1, 2, 3), replica_id=(0, 0, 1), prepend_axis_num=1)
    parts = apply_swiglu_sharded_factory(box, [(0, 1, 4)]).build()
    assert [part.key for part in parts] == ["fc1", "fc1"]
    assert [(part.global_shape, part.global_offset) for part in parts] == [
        ((4, 24, 2), (1, 8, 0)),
        ((4, 24, 2), (1, 20, 0)),
    ]
    assert torch.equal(torch.cat([part.data for part in parts]), data)
    assert parts[0].replica_id == (0, 0, 1)
    with pytest.raises(NotImplementedError, match="singleton_local_shards must be False"):
        apply_swiglu_sharded_factory(box, [(0, 1, 4)], singleton_local_shards=True)


def test_ranks_of_multi_token_prediction_are_those_of_its_stage() -> None:
    assert get_mtp_ranks([0, 4], _config()) == []
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "mtp_num_layers": 1}
    assert get_mtp_ranks([3, 7], _config(**stages)) == [7]
    layout = [["embedding", "decoder"], ["decoder", "decoder"], ["decoder", "mtp"], ["loss"]]
    fields = stages | {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": layout}
    assert get_mtp_ranks([3, 7, 11, 15], _config(**fields)) == [11]


def test_patterns_of_hybrid_models_are_taken_apart() -> None:
    parsed = parse_hybrid_pattern("M-M*|EM/MM/MM")
    assert (parsed.main_pattern, parsed.mtp_pattern, parsed.mtp_num_depths) == ("M-M*|EM", "MM", 2)
    assert get_hybrid_total_layer_count("M-M*|EM/MM/MM") == 6
    counts = get_hybrid_layer_counts("M-M*|EM/MM/MM")
    assert {letter: count for letter, count in counts.items() if count} == {"M": 7, "-": 1, "*": 1, "E": 1}
    assert set(counts) == Symbols.VALID_LAYERS
    assert parse_hybrid_pattern(None) == parse_hybrid_pattern("/") and parse_hybrid_pattern("M").mtp_num_depths == 0
    for pattern, fault in (("Mx", "must be of"), ("M/M/*", "must be equal"), ("*+", "one kind of attention")):
        with pytest.raises(ValueError, match=fault):
            parse_hybrid_pattern(pattern)


def test_a_progress_log_gets_a_line_with_time_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_utils.append_to_progress_log(None, "nowhere")
    log_utils.append_to_progress_log(str(tmp_path / "run"), "Saved checkpoint")
    assert re.fullmatch(
        r"\d+-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: .*\t# GPUs: 1\tSaved checkpoint\n",
        (tmp_path / "run" / "progress.txt").read_text(),
    )
    log_utils.barrier_and_log("after training")
    assert capsys.readouterr().out.startswith("[after training] datetime: ")


def test_logging_is_set_up_with_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in (None, "megatron.bridge.test", "noisy.part")]
    before = [(one, one.level) for one in map(logging.getLogger, (None, *logging.root.manager.loggerDict))]
    monkeypatch.setenv("MEGATRON_LOGGING_LEVEL", str(logging.ERROR))
    try:
        log_utils.setup_logging(modules_to_filter=["noisy"])
        assert [one.level for one in loggers] == [logging.ERROR, logging.ERROR, logging.NOTSET]
        log_utils.setup_logging(logging.DEBUG, filter_warning=False, set_level_for_all_loggers=True)
        assert [one.level for one in loggers] == [logging.DEBUG] * 3

        def passes(logger: logging.Logger, level: int) -> bool:
            return bool(logger.filter(logging.LogRecord(logger.name, level, "", 0, "", None, None)))

        assert [passes(one, logging.INFO) for one in loggers] == [True, True, False]
        assert not any(passes(one, logging.WARNING) for one in loggers)
    finally:
        for one, level in before:
            one.setLevel(level)
            for added in [a for a in one.filters if a is log_utils.warning_filter or isinstance(a, functools.partial)]:
                one.removeFilter(added)


def _messages() -> list[Any]:
    """Each rank is a stage of two: outputs go on, gradients back, alone and both at once."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    stages = P2PCommunicator(group, ModelParallelConfig(pipeline_dtype=torch.float32))
    first, last = stages.is_pp_first_stage, stages.is_pp_last_stage
    assert (stages.total_stages, stages.current_stage, first, last) == (2, rank, rank == 0, rank == 1)
    found = [stages.recv_forward([(2, 3)], first), stages.recv_backward((3,), last)] if last else []
    if first:
        stages.send_forward([torch.full((2, 3), 5.0)], last)
        found.append(stages.send_forward_recv_backward(torch.full((4,), 7.0), (4,), last))
        stages.send_backward(torch.zeros(3), first)
        found.append(stages.recv_backward((2,), last))
    else:
        received = stages.recv_forward((4,), first)
        assert isinstance(received, torch.Tensor) and received.requires_grad
        found.append(received)
        stages.send_backward(received * 2, first)
        found.append(stages.send_backward_recv_forward(torch.full((2,), 9.0), (1,), True))
        stages.send_backward(torch.full((2,), 9.0), first)
    return [
        x
        if x is None or (isinstance(x, list) and x[0] is None)
        else [y.tolist() for y in x]
        if isinstance(x, list)
        else x.tolist()
        for x in found
    ]


def test_messages_between_stages_arrive_in_the_given_shapes() -> None:
    first, last = run_ranks(2, _messages)
    assert first == [[14.0] * 4, [9.0] * 2]
    assert last == [[[[5.0] * 3] * 2], None, [7.0] * 4, None]


def test_submodules_of_layers_are_those_of_their_specs() -> None:
    assert get_gpt_layer_local_submodules(4, moe_grouped_gemm=False) == get_gpt_layer_local_spec(4).submodules
    layer = TransformerLayer(_config(), get_gpt_layer_local_submodules())
    assert isinstance(layer, BaseTransformerLayer) and layer.has_mlp
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(ImportError, match="transformer_engine"):
            get_gpt_layer_with_transformer_engine_submodules()
    else:
        found = get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=True)
        assert found == get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True).submodules
