"""A training script as Megatron-LM's users write it: its imports, its functions, its calls; it trains as ``pretrain_gpt.py``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import mpu, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args, get_model, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import (
    add_megatron_arguments,
    core_transformer_config_from_args,
    parse_and_validate_args,
    parse_settings,
    validate_args,
)
from megatron.training.cli.flag_parser import FlagError
from megatron.training.global_vars import unset_global_variables
from megatron.training.initialize import initialize_megatron
from megatron.training.library.checkpoints import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    get_load_checkpoint_path_by_args,
    load_checkpoint,
    maybe_finalize_async_save,
    read_metadata,
    save_checkpoint,
)
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    num_floating_point_operations,
    setup_model_and_optimizer,
)
from megatron.training.utils import get_ltor_masks_and_position_ids
from tests.support.rank_checks import RankChecks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

CHECKS = RankChecks(__name__)
NOTICE = "--sgd-momentum has no effect"


def _model_provider(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    args = get_args()
    print_rank_0("building GPT model ...")
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def _loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    return loss, mask.sum().to(torch.int), {"lm loss": loss.detach()}


def _forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    timers("batch-generator").stop()
    assert batch["tokens"].shape == (args.micro_batch_size, args.seq_length)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss_func, batch["loss_mask"])


def _datasets_provider(sizes: Sequence[int]) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    assert mpu.get_data_parallel_world_size() == args.data_parallel_size
    return BlendedMegatronDatasetBuilder(MockGPTDataset, list(sizes), lambda: True, config).build()


@contextlib.contextmanager
def _command_line(flags: str) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["train.py", *flags.split()]
    try:
        yield
    finally:
        sys.argv = before
        unset_global_variables()
        parallel_state.destroy_model_parallel()


def _add_own(parser: Any) -> Any:
    parser.add_argument_group("own").add_argument("--own-flag", type=int, default=3)
    return parser


@CHECKS.on(2)
def a_script_for_megatron_lm_trains_as_the_own_script() -> None:
    MockGPTLowLevelDataset.size = 100
    for added in (
        f"{SHARDED} --untie-embeddings-and-output-weights",
        "--tensor-model-parallel-size 2 --sgd-momentum 0.5",
    ):
        expected = train_one(f"{TINY} {added}".split())
        assert not expected.error and len(expected.losses) == (4 if dist.get_rank() == 0 else 0)
        printed = io.StringIO()
        with _command_line(f"{TINY} {added} --own-flag 5"), contextlib.redirect_stdout(printed):
            args = parse_and_validate_args(extra_args_provider=_add_own)
            assert (args.own_flag, args.sft, args.global_batch_size, args.rank < 2) == (5, False, 8, True)
            assert get_num_microbatches() == 8 // (2 * args.data_parallel_size)
            container = pretrain_cfg_container_from_args(args)
            state = pretrain(
                container,
                _datasets_provider,
                ModelType.encoder_or_decoder,
                _forward_step,
                model_provider=_model_provider,
            )
        assert state.iteration == 4
        run = Run(printed.getvalue())
        assert (run.losses, run.grad_norms) == (expected.losses, expected.grad_norms)
        assert (
            run.output.count(NOTICE)
            == expected.output.count(NOTICE)
            == int(dist.get_rank() == 0 and "--sgd-momentum" in added)
        )


@CHECKS.on(2)
def notices_are_printed_where_a_loop_of_its_own_starts() -> None:
    printed = io.StringIO()
    with _command_line(f"{TINY} --sgd-momentum 0.5"), contextlib.redirect_stdout(printed):
        initialize_megatron()
    assert printed.getvalue().count(NOTICE) == (1 if dist.get_rank() == 0 else 0)


@CHECKS.on(2)
def models_are_wrapped_as_the_arguments_say() -> None:
    for added, kind in ((SHARDED, FullyShardedDataParallel), ("", DistributedDataParallel)):
        with _command_line(f"{TINY} {added}"):
            initialize_megatron(args_defaults={"padded_vocab_size": 128})
            get_args().padded_vocab_size = 128
            (model,) = get_model(_model_provider)
            assert type(model) is kind
            (plain,) = get_model(_model_provider, wrap_with_ddp=False)
            assert type(plain) is GPTModel


@CHECKS.on(2)
def model_and_optimizer_are_set_up_as_the_arguments_say() -> None:
    """With a provider or the command line's model; a second run continues from the first one's checkpoint."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        folder = folders[0]
        line = f"{TINY} {SHARDED} --padded-vocab-size 128 --save {folder} --load {folder}"
        expected: list[float] = []
        for provider in (_model_provider, None):
            with _command_line(line):
                initialize_megatron()
                container = pretrain_cfg_container_from_args(get_args(), gpt_config_from_args(get_args()))
                model, optimizer, scheduler = setup_model_and_optimizer(
                    ModelType.encoder_or_decoder, provider, cfg_container=container
                )
                assert scheduler is not None and type(model[0]) is FullyShardedDataParallel
                optimizer_config, overrides = get_megatron_optimizer_config(get_args())
                assert optimizer_config.lr == get_args().lr and overrides == get_standard_config_overrides(
                    optimizer_config
                )
                assert (
                    num_floating_point_operations(get_args(), 6) == 2 * num_floating_point_operations(get_args(), 3) > 0
                )
                assert get_args().iteration == (0 if provider else 1)
                losses = [_step(model, optimizer, scheduler) for _ in range(2)]
                assert not expected or losses == expected
                if provider:
                    save_checkpoint(1, model, optimizer, scheduler)
                    expected = [_step(model, optimizer, scheduler) for _ in range(2)]
        with _command_line(f"{line} --skip-train --eval-iters 1"):
            initialize_megatron()
            (plain,), *others = setup_model_and_optimizer(ModelType.encoder_or_decoder, _model_provider)
            assert type(plain) is GPTModel and others == [None, None]
            with pytest.raises(ValueError, match="model_provider_func must be given if cfg_container has no model"):
                setup_model_and_optimizer(ModelType.encoder_or_decoder)
        dist.barrier()


@CHECKS.on(2)
def a_loop_of_its_own_saves_and_goes_on() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        for added in ("", "--ckpt-format torch_dist"):
            folder = f"{folders[0]}/{len(added)}"
            line = f"{TINY} {SHARDED} --padded-vocab-size 128 --save {folder} --load {folder} {added}"
            with _command_line(line):
                run = _run()
                assert load_checkpoint(*run) == (0, 0)
                _step(*run)
                get_args().consumed_train_samples = 8
                save_checkpoint(1, *run, 0, train_data_iterator=None, non_persistent_ckpt=False)
                expected = [_step(*run) for _ in range(2)]
            with _command_line(line):
                run = _run()
                assert load_checkpoint(*run, strict=True) == (1, 0) and get_args().consumed_train_samples == 8
                assert [_step(*run) for _ in range(2)] == expected
                weights = get_model(_model_provider)
                assert load_checkpoint(weights, None, None) == (1, 0)
                with pytest.raises(NotImplementedError, match="release must be False, got True"):
                    save_checkpoint(1, *run, 0, release=True)
        dist.barrier()


@CHECKS.on(2)
def a_checkpoint_beside_training_is_complete_once_it_is_finalized() -> None:
    """By the functions that callers use; names and folders are those that the tracker says."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        folder = folders[0]
        line = f"{TINY} {SHARDED} --padded-vocab-size 128 --save {folder} --load {folder} --async-save"
        tracker = Path(get_checkpoint_tracker_filename(folder))
        with _command_line(line):
            run = _run()
            _step(*run)
            assert get_load_checkpoint_path_by_args(get_args()).endswith("iter_-000001")
            save_checkpoint(1, *run)
            maybe_finalize_async_save(blocking=True)
            assert read_metadata(tracker) == (1, False)
            saved = get_load_checkpoint_path_by_args(get_args())
            assert saved == get_checkpoint_name(folder, 1, return_base_dir=True) == f"{folder}/iter_0000001"
            save_checkpoint(2, *run)
            assert load_checkpoint(*run) == (2, 0) and read_metadata(tracker) == (2, False)
            maybe_finalize_async_save()
            get_args().ckpt_step = 1
            assert get_load_checkpoint_path_by_args(get_args()) == saved
        dist.barrier()
        if dist.get_rank() == 0:
            tracker.write_text("release\n")
        dist.barrier()
        assert read_metadata(tracker) == (0, True)
        assert get_checkpoint_name(folder, 0, True, return_base_dir=True) == f"{folder}/release"
        assert get_checkpoint_name(folder, 3, False, False, 1, 0, False, 0) == (
            f"{folder}/iter_0000003/mp_rank_01/model_optim_rng.pt"
        )
        assert get_checkpoint_name(folder, 3, False, True, 1, 2, True, 4, basename="distrib_optim.pt") == (
            f"{folder}/iter_0000003/mp_rank_01_002_004/distrib_optim.pt"
        )
        dist.barrier()
        tracker.write_text("latest")
        dist.barrier()
        with pytest.raises(ValueError, match="must hold the number of an iteration or 'release', got 'latest'"):
            read_metadata(tracker)
        dist.barrier()


def _run() -> tuple[list[torch.nn.Module], Any, OptimizerParamScheduler]:
    initialize_megatron()
    model = get_model(_model_provider)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01), model)
    return (
        model,
        optimizer,
        OptimizerParamScheduler(optimizer, 0.0, 1e-2, 0.0, 0, 32, "linear", 0.01, 0.01, 32, "constant", False),
    )


def _step(model: list[Any], optimizer: Any, scheduler: OptimizerParamScheduler) -> float:
    tokens = torch.randint(0, 100, (2, 17), generator=torch.Generator().manual_seed(scheduler.num_steps))
    optimizer.zero_grad()
    loss = model[0](tokens[:, :-1], torch.arange(16).expand(2, -1), None, labels=tokens[:, 1:]).mean()
    loss.backward()
    model[0].finish_grad_sync()
    optimizer.step()
    scheduler.step(8)
    found: float = loss.item()
    return found


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_arguments_must_be_there_and_are_set_once() -> None:
    with pytest.raises(AssertionError, match=r"call parse_and_validate_args\(\)"):
        get_args()
    with _command_line(TINY):
        parse_and_validate_args()
        with pytest.raises(AssertionError, match=r"call unset_global_variables\(\)"):
            parse_and_validate_args()


def test_all_faults_of_a_command_line_are_told() -> None:
    with _command_line(f"{TINY} --log-energy --no-such-flag 3"):
        with pytest.raises(FlagError) as caught:
            parse_and_validate_args()
        assert "--log-energy" in str(caught.value) and "--no-such-flag" in str(caught.value)
    with _command_line(f"{TINY} --no-such-flag 3"):
        assert parse_and_validate_args(ignore_unknown_args=True).num_layers == 2


def _args(line: str, **defaults: Any) -> argparse.Namespace:
    """Parse flags as a script with its own parser does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    assert add_megatron_arguments(parser) is parser
    parser.set_defaults(rank=0, world_size=1, **defaults)
    return parser.parse_args(line.split())


def test_a_parser_of_the_caller_takes_all_flags() -> None:
    line = f"{TINY} --use-megatron-fsdp --no-fsdp-all-gather-in-start-param-sync"
    args = validate_args(_args(line, overlap_param_gather=True, num_layers=3))
    config = get_megatron_ddp_config(args)
    assert config == pretrain_cfg_container_from_args(args).settings.ddp
    assert config.use_megatron_fsdp and config.overlap_param_gather and not config.fsdp_all_gather_in_start_param_sync
    assert core_transformer_config_from_args(args).num_layers == 2, "the command line overrides defaults"


def test_names_of_upstream_that_are_not_ours_are_read_or_refused() -> None:
    """``set_defaults`` and assignments bypass the parser; their values must not be dropped silently."""
    args = validate_args(_args(TINY, norm_epsilon=0.5, layernorm_epsilon=0.5))
    assert core_transformer_config_from_args(args).layernorm_epsilon == 0.5
    for name, value, message in (
        ("log_energy", True, "--log-energy is refused"),
        ("check_for_large_grads", True, "--check-for-large-grads is refused"),
        ("nccl_ub", True, "--use-nccl-ub"),
    ):
        args = _args(f"{TINY} --distributed-backend gloo")
        setattr(args, name, value)
        with pytest.raises(FlagError, match=message):
            validate_args(args)


def test_symmetric_memory_and_the_first_gather_have_flags() -> None:
    for line, field, value in (
        ("", "fsdp_all_gather_in_start_param_sync", True),
        ("--fsdp-all-gather-in-start-param-sync", "fsdp_all_gather_in_start_param_sync", True),
        ("--no-fsdp-all-gather-in-start-param-sync", "fsdp_all_gather_in_start_param_sync", False),
        ("--use-symm-mem", "transport_kind", "symm"),
        ("--use-nccl-ub", "transport_kind", "symm"),
    ):
        settings = parse_settings(
            f"{TINY} --use-megatron-fsdp {line}".replace("--distributed-backend gloo", "").split(), world_size=1
        )
        assert getattr(settings.ddp, field) == value, line


def test_a_configuration_of_the_caller_gets_its_further_fields() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Own(TransformerConfig):
        own_flag: int = 0

    with _command_line(f"{TINY} --own-flag 5"):
        config = core_transformer_config_from_args(parse_and_validate_args(_add_own), Own)
    assert (type(config), config.own_flag, config.num_layers) == (Own, 5, 2)


def test_masks_and_positions_begin_anew_after_an_end_of_document() -> None:
    data = torch.tensor([[5, 0, 6, 7, 0, 8]])
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(data, 0, 8, True, True, True, True)
    assert mask is not None and get_ltor_masks_and_position_ids(data, 0, 8, True, False, True, True, False)[0] is None
    with pytest.raises(ValueError, match="create_attention_mask"):
        get_ltor_masks_and_position_ids(data, 0, 8, True, True, True, True, create_attention_mask=False)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert loss_mask.tolist() == [[1, 0, 1, 1, 0, 0]]
    seen = (~mask[0, 0]).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
