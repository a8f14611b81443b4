"""A training loop as Megatron-Core's example has it, its names and its calls, on two ranks: split or not, it trains alike."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Adam
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, mpu, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
)
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.timers import Timers
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.utils import (
    calc_params_l2_norm,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
SEQUENCE_LENGTH, STEPS = 16, 3
LossFunction = Callable[[torch.Tensor], Any]


def _initialize(tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual)
    model_parallel_cuda_manual_seed(123)


def _model(vp_stage: int | None = None, *, tied: bool = False, **fields: Any) -> GPTModel:
    """The configuration says nothing of the split; as in Megatron-Core the groups do."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **fields,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=SEQUENCE_LENGTH,
        share_embeddings_and_output_weights=tied,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )


def _batches(rank: int = 0, ranks: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of four samples; with several data-parallel ranks each has its part of them."""
    MockGPTLowLevelDataset.size = 1000  # the index of its 100,000 documents would take most of the time
    if dist.get_rank() == 0:
        compile_helpers()
    dist.barrier()
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=SEQUENCE_LENGTH)
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=0.005,
    )
    built = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, None, None], lambda: True, config).build()
    samples: Any = built[0]
    loader = DataLoader(samples, batch_size=4, shuffle=False)
    return iter(
        [
            {name: value[rank::ranks].contiguous() for name, value in batch.items()}
            for batch in islice(loader, 2 * STEPS)
        ]
    )


def _forward_step(
    data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module, *, sums: bool = False
) -> tuple[torch.Tensor, LossFunction]:
    batch = next(data)

    def loss_func(mask: torch.Tensor, output: torch.Tensor) -> Any:
        mask = mask.view(-1).float()
        total = torch.sum(output.float().view(-1) * mask)
        report = {"lm loss": (total / mask.sum()).detach()}
        return (total, mask.sum().to(torch.int), report) if sums else (total / mask.sum(), report)

    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def _train(model: Any, batches: Iterator[Any], *, microbatches: int = 1, sums: bool = False) -> list[float]:
    """Train some steps; return the losses that the last stage reported."""
    chunks = model if isinstance(model, list) else [model]
    optimizer, losses = Adam([weight for chunk in chunks for weight in chunk.parameters()], lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, sums=sums),
            data_iterator=batches,
            model=chunks,
            num_microbatches=microbatches,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=4,
            decoder_seq_length=SEQUENCE_LENGTH,
            forward_only=False,
        )
        if get_model_config(chunks[0]).finalize_model_grads_func is None:
            finalize_model_grads(chunks)
        optimizer.step()
        losses += [report["lm loss"].item() for report in reports]
    return losses


def _ddp(model: torch.nn.Module, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(get_model_config(model), DistributedDataParallelConfig(**settings), model)


def _expected(**options: Any) -> list[float]:
    _initialize()
    return _train(_ddp(_model()), _batches(), **options)


@CHECKS.on(2)
def tensor_and_pipeline_parallel_models_train_as_the_whole_one() -> None:
    whole, whole_of_two = _expected(), _expected(microbatches=2)
    assert whole[0] > whole[-1], "it learns"
    _initialize(tensor=2)
    split = _ddp(_model())
    assert unwrap_model(split).config.tensor_model_parallel_size == 2
    assert unwrap_model(split).decoder.layers[0].mlp.linear_fc1.output_size_per_partition == 24
    torch.testing.assert_close(_train(split, _batches()), whole, rtol=1e-5, atol=1e-6)
    _initialize(pipeline=2)
    losses = _train(_ddp(_model()), _batches(), microbatches=2)
    assert len(losses) == (2 * STEPS if mpu.is_pipeline_last_stage() else 0)
    if losses:
        torch.testing.assert_close(losses, whole_of_two, rtol=1e-5, atol=1e-6)


@CHECKS.on(2)
def stages_of_a_rank_that_take_turns_train_as_the_whole_model() -> None:
    whole = _expected(microbatches=2)
    _initialize(pipeline=2, virtual=2)
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    chunks = [_ddp(_model(chunk, **counted)) for chunk in range(2)]
    assert [len(chunk.module.decoder.layers) for chunk in chunks] == ([0, 1] if dist.get_rank() == 0 else [1, 0])
    for chunk in chunks:
        chunk.config.no_sync_func = [one.no_sync for one in chunks]
    losses = _train(chunks, [_batches() for _ in chunks], microbatches=2)  # type: ignore[arg-type]
    assert len(losses) == (2 * STEPS if mpu.is_pipeline_last_stage() else 0)
    if losses:
        torch.testing.assert_close(losses, whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="data_iterator must be one for each of the 2 chunks"):
        _train(chunks, _batches(), microbatches=2)
    with pytest.raises(ValueError, match="got 1 microbatches in groups of 2"):
        _train(chunks, [_batches() for _ in chunks], microbatches=1)  # type: ignore[arg-type]


@CHECKS.on(2)
def any_module_is_wrapped_with_a_configuration_that_says_nothing_of_it() -> None:
    _initialize()
    torch.manual_seed(0)
    config, inputs = TransformerConfig(num_layers=1, num_attention_heads=1), torch.randn(2, 3)
    plain = torch.nn.Linear(3, 4)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), copy.deepcopy(plain))
    plain(inputs).square().sum().backward()
    wrapped(inputs[dist.get_rank()]).square().sum().mul(2).backward()
    wrapped.finish_grad_sync()
    for param, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@CHECKS.on(2)
def what_loops_do_between_steps() -> None:
    """Hooks off and on for evaluation, gradients freed, random states of the first tensor-parallel rank."""
    _initialize(tensor=2)
    model = _ddp(_model(), use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])
    batch, losses = next(_batches()), []
    for _ in range(2):
        model.disable_forward_pre_hook(param_sync=True)
        with torch.no_grad():
            evaluated = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
        model.enable_forward_pre_hook()
        model.reset_param_sync_dispatch_state()
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
        assert torch.equal(loss, evaluated), "evaluation sees what the step has written"
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        assert all(param.grad is not None for param in model.parameters())
        model.offload_grad_buffers()
        assert not any(group.grads.has_main for group in model.parameter_groups)
        model.restore_grad_buffers()
        model.free_overlap_buffers()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert calc_params_l2_norm(model) == pytest.approx(optimizer.params_norm().item())
    rank = dist.get_rank()
    assert reduce_max_stat_across_model_parallel_group(None) is None
    assert reduce_max_stat_across_model_parallel_group(torch.tensor(2.5) if rank else None) == 2.5
    assert reduce_max_stat_across_model_parallel_group(3.5 - rank, group=mpu.get_data_parallel_group()) == 3.5 - rank
    assert logical_and_across_model_parallel_group(True) and not logical_and_across_model_parallel_group(rank == 0)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    before = get_cuda_rng_tracker().get_states()
    model.sync_rng_states_across_tp_group()
    drawn = torch.tensor([torch.rand(()).item(), random.random(), random.random()])
    of_both = [torch.empty(3), torch.empty(3)]
    dist.all_gather(of_both, drawn)
    assert torch.equal(*of_both)
    assert all(torch.equal(state, before[name]) for name, state in get_cuda_rng_tracker().get_states().items())


@CHECKS.on(2)
def data_parallel_models_average_and_sums_of_losses_are_divided_once() -> None:
    whole = _expected()
    for settings in ({}, {"use_distributed_optimizer": True}):
        _initialize()
        own = _train(_ddp(_model(), **settings), _batches(mpu.get_data_parallel_rank(), 2))
        mean = torch.tensor(own)
        dist.all_reduce(mean)
        torch.testing.assert_close((mean / 2).tolist(), whole, rtol=1e-5, atol=1e-6)
    _initialize()
    model = _model(calculate_per_token_loss=True)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.timers = Timers(2, "minmax")
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    sharded = FullyShardedDataParallel(model.config, ddp_config, model)
    mean = torch.tensor(_train(sharded, _batches(mpu.get_data_parallel_rank(), 2), sums=True))
    dist.all_reduce(mean)
    torch.testing.assert_close((mean / 2).tolist(), whole, rtol=1e-5, atol=1e-6)
    assert "forward-backward" in (model.config.timers.get_all_timers_string() or "")
    assert model.config.timers("all-grads-sync").active_time() > 0


@CHECKS.on(2)
def the_configuration_scales_losses_and_says_when_gradients_are_left_unreduced() -> None:
    _initialize()
    model, calls = _ddp(_model()), []
    model.config.grad_scale_func = lambda loss: loss * 0
    model.config.no_sync_func = lambda: calls.append("no_sync") or model.no_sync()
    model.config.finalize_model_grads_func = lambda models, tokens, **_: (
        calls.append(tokens),
        finalize_model_grads(models, tokens),
    )
    _train(model, _batches(), microbatches=2)
    # Forward and backward of the first of two microbatches.
    assert calls == ["no_sync", "no_sync", None] * STEPS
    assert all(parameter.grad.to_local().abs().max() == 0 for parameter in model.parameters())
    reports = get_forward_backward_func()(
        forward_step_func=lambda data, module: (
            next(data)["tokens"].float(),
            lambda output, non_loss_data: output.sum(),
        ),
        data_iterator=_batches(),
        model=model,
        num_microbatches=2,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=4,
        forward_only=True,
        collect_non_loss_data=True,
    )
    assert len(reports) == 2 and all(report > 0 for report in reports)


@CHECKS.on(2)
def a_checkpoint_of_one_split_is_loaded_by_another() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        path = Path(folders[0]) / "checkpoint"
        for gated in (False, True):
            _checkpoints_of_splits(path, gated_linear_unit=gated)
        dist.barrier()


def _checkpoints_of_splits(path: Path, **fields: Any) -> None:
    _initialize(tensor=2)
    model: Any = _ddp(_model(**fields))
    _train(model, _batches())
    described = model.module.sharded_state_dict(prefix="")
    dist_checkpointing.save({**described, "iteration": 7}, path, content_metadata={"of": "a test"})
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert dist_checkpointing.load_content_metadata(path) == {"of": "a test"}
    whole = dist_checkpointing.load_plain_tensors(path)
    expected = {name: value.full_tensor() for name, value in model.module.state_dict().items()}
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    for degrees in ({}, {"pipeline": 2}, {"tensor": 2}):
        _initialize(**degrees)
        plain = _model(init_seed=5, **fields)
        loaded = dist_checkpointing.load({**plain.sharded_state_dict(), "iteration": 0}, path)
        assert loaded.pop("iteration") == 7 and loaded.pop("content_metadata")
        plain.load_state_dict(loaded)
        saved = plain.sharded_state_dict()
        dist_checkpointing.save(saved, path.with_name("again"))
        again = dist_checkpointing.load_plain_tensors(path.with_name("again"))
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], value) for name, value in whole.items())


@CHECKS.on(2)
def an_optimizer_is_saved_with_the_model_and_goes_on_under_another_split() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        path = Path(folders[0]) / "checkpoint"
        _initialize(tensor=2)
        before = _with_optimizer(init_seed=1)
        _update(*before)
        described = before[0].module.sharded_state_dict(prefix="")
        state = {"model": described, "optimizer": before[1].sharded_state_dict(described)}
        dist_checkpointing.save(state, path)
        assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in dist_checkpointing.load_plain_tensors(path)
        expected = [_update(*before) for _ in range(2)]
        for degrees in ({"tensor": 2}, {}):
            _initialize(**degrees)
            after = _with_optimizer(init_seed=2)
            described = after[0].module.sharded_state_dict(prefix="")
            state = {"model": described, "optimizer": after[1].sharded_state_dict(described, is_loading=True)}
            loaded = dist_checkpointing.load(state, path)
            after[0].module.load_state_dict(loaded["model"])
            after[1].load_state_dict(loaded["optimizer"])
            torch.testing.assert_close([_update(*after) for _ in range(2)], expected, rtol=1e-5, atol=1e-6)
        dist.barrier()


@CHECKS.on(2)
def a_stage_that_has_a_copy_of_the_embedding_leaves_it_to_the_first_one_to_save_it() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        path = Path(folders[0]) / "checkpoint"
        _initialize(pipeline=2)
        model, optimizer = _with_optimizer(tied=True, init_seed=1)
        described = model.module.sharded_state_dict(prefix="")
        state = {"model": described, "optimizer": optimizer.sharded_state_dict(described, is_loading=True)}
        dist_checkpointing.save(state, path)
        expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
        model, _ = _with_optimizer(tied=True, init_seed=2)
        described = model.module.sharded_state_dict(prefix="")
        model.module.load_state_dict(dist_checkpointing.load({"model": described}, path)["model"])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), expected[name], rtol=0, atol=0)
        moments = dist_checkpointing.load_plain_tensors(path)
        assert moments["optimizer.state.exp_avg.embedding.word_embeddings.weight"].shape == (100, 12)
        dist.barrier()


def _with_optimizer(**fields: Any) -> tuple[Any, Any]:
    model = _ddp(_model(**fields))
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1), [model])


def _update(model: Any, optimizer: Any) -> Any:
    batch = next(_batches())
    optimizer.zero_grad()
    loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    return loss.item()


@CHECKS.on(2)
def a_half_precision_model_computes_in_bf16_and_returns_fp32() -> None:
    _initialize()
    half: Any = Float16Module(_model(bf16=True).config, _model(bf16=True))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    batch = next(_batches())
    losses = half(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    assert losses.dtype is torch.float32 and unwrap_model(half) is half.module
    assert half(batch["tokens"], batch["position_ids"], None, fp32_output=False).dtype is torch.bfloat16
    assert half.state_dict().keys() == half.module.state_dict().keys() == half.sharded_state_dict().keys()
    with pytest.raises(ValueError, match="must come with TransformerConfig\\(bf16=True\\) or fp16=True, got neither"):
        Float16Module(_model().config, _model())
    narrow: Any = Float16Module(_model(fp16=True).config, _model(fp16=True))
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.float16}
    assert narrow(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).dtype is torch.float32
    wrapped = _ddp(half)
    _train(wrapped, _batches())
    assert wrapped.module.module.embedding.word_embeddings.weight.grad is not None


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
