"""Training by functions that are written for Megatron-LM: its forward steps, model and data providers."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection, group_of, group_rank, group_size
from megatron.core.served_arguments import Served, check_arguments
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.training.arguments import Settings
from megatron.training.checkpointing import print_rank_0
from megatron.training.cli.configuration_report import notices_of
from megatron.training.data.datasets import Datasets
from megatron.training.launch.distributed_init import initialize_distributed, local_device
from megatron.training.launch.gpt_config import build_gpt_model
from megatron.training.launch.pretrain import pretrain as run
from megatron.training.library.checkpoints import load_checkpoint
from megatron.training.library.flags import PretrainConfigContainer, parse_and_validate_args, settings_of
from megatron.training.library.state import get_args, get_tokenizer
from megatron.training.loop.lr_schedule import build_scheduler
from megatron.training.loop.stage_forward import Batch, has_output_layer
from megatron.training.loop.train_state import TrainState

_SEED_GROUPS: Served = {
    f"seed_{name}_group": ((None,), "seeds are those of the default groups") for name in ("pp", "dp", "tp", "ep", "etp")
}


def initialize_megatron(
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    store: Any = None,
    skip_model_parallel_init: bool = False,
    *,
    skip_random_seed: bool = False,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    ignore_unknown_args: bool = False,
    **groups_of_seeds: None,
) -> None:
    """Initialise torch.distributed, the default process groups and the random generators as the arguments of the run say.

    Without arguments the command line is parsed. Rank 0 prints what is done instead of what some of its flags ask for.

    Args:
        allow_no_cuda: accepted; without CUDA ranks are on the CPU.
        skip_mpu_initialization: do nothing but parse.
        store: must be None: the ranks of torchrun meet.
        skip_model_parallel_init: build no process groups.
        groups_of_seeds: ``seed_pp_group`` and others must be None: seeds are those of the default groups.

    Raises:
        NotImplementedError: ``store``, or a group of seeds, is given.

    Ranks: all; blocks until all have joined.
    """
    check_arguments("initialize_megatron", groups_of_seeds, _SEED_GROUPS)
    if store is not None:
        raise NotImplementedError("store must be None, got one: the ranks that torchrun started meet by themselves")
    try:
        args = get_args()
    except AssertionError:
        args = parse_and_validate_args(extra_args_provider, ignore_unknown_args, args_defaults)
    if skip_mpu_initialization:
        return
    settings = settings_of(args)
    _initialize(
        settings,
        (get_embedding_ranks, get_position_embedding_ranks),
        builds_groups=not skip_model_parallel_init,
        seeds=not skip_random_seed,
    )
    if notices := notices_of(settings):
        print_rank_0("\n".join(notices))


def _initialize(
    settings: Settings,
    embedding_ranks: Sequence[Callable[..., Any] | None],
    *,
    builds_groups: bool = True,
    seeds: bool = True,
) -> None:
    initialize_distributed(settings.distributed)
    if builds_groups:
        _build_groups(settings, settings.distributed.timeout, *embedding_ranks)
    if seeds:
        model_parallel_cuda_manual_seed(settings.loop.seed)


def _build_groups(settings: Settings, timeout: timedelta, *embedding_ranks: Callable[..., Any] | None) -> None:
    grid = settings.grid
    parallel_state.initialize_model_parallel(
        grid.tensor_model_parallel_size,
        grid.pipeline_model_parallel_size,
        settings.model.transformer.virtual_pipeline_model_parallel_size,
        context_parallel_size=grid.context_parallel_size,
        expert_model_parallel_size=grid.expert_model_parallel_size,
        expert_tensor_parallel_size=grid.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=grid.num_distributed_optimizer_instances,
        use_sharp=settings.distributed.use_sharp,
        sharp_enabled_group=settings.distributed.sharp_enabled_group,
        nccl_communicator_config_path=settings.distributed.nccl_communicator_config_path,
        order=grid.order,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        get_embedding_ranks=embedding_ranks[0],
        get_position_embedding_ranks=embedding_ranks[1],
    )


def get_model(
    model_provider_func: Callable[..., torch.nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[torch.nn.Module]:
    """Build this rank's part of a model, and wrap it for data parallelism as the arguments of the run say.

    Args:
        model_provider_func: called with ``pre_process`` and ``post_process``, and with ``config``, ``pg_collection`` and
            ``vp_stage`` if it takes them.
        wrap_with_ddp: False: the model as it is, or in ``Float16Module``.
        config: the model's configuration; None: that of the arguments.

    Returns:
        [C] this rank's stages: one, or several that take turns.

    Ranks: all; blocks.
    """
    settings = settings_of(get_args())
    group, transformer = group_of(pg_collection, "pp"), config or settings.model.transformer
    given = {"config": transformer, "pg_collection": pg_collection}
    device = initialize_distributed(settings.distributed)
    num_chunks = transformer.virtual_pipeline_model_parallel_size or 1
    return [
        _wrapped(
            _provided(model_provider_func, group_rank(group), group_size(group), given, chunk, num_chunks),
            wrap_with_ddp=wrap_with_ddp,
            transformer=transformer,
            device=device,
            pg_collection=pg_collection,
        )
        for chunk in range(num_chunks)
    ]


def setup_model_and_optimizer(
    model_type: ModelType,
    model_provider_func: Callable[..., torch.nn.Module] | None = None,
    checkpointing_context: Any = None,
    *,
    cfg_container: PretrainConfigContainer | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[list[torch.nn.Module], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Build and wrap this rank's part of the model, its optimizer and schedule, and load the checkpoint in ``--load``.

    Args:
        model_provider_func: see ``get_model``; None: build the GPT model of ``cfg_container``.
        checkpointing_context: accepted and ignored.

    Returns:
        (model as from ``get_model``, optimizer, schedule); the last two are None with ``--skip-train``.

    Raises:
        ValueError: neither ``model_provider_func`` nor a model in ``cfg_container`` is given.

    Ranks: all; blocks.
    """
    args, settings = get_args(), settings_of(get_args())
    if model_provider_func is None:
        if cfg_container is None or cfg_container.model is None:
            raise ValueError("model_provider_func must be given if cfg_container has no model, got neither")
        model_provider_func = partial(_gpt_model, settings)
    trains = not args.skip_train
    model = get_model(model_provider_func, model_type, wrap_with_ddp=trains, pg_collection=pg_collection)
    optimizer = scheduler = None
    if trains:
        optimizer = get_megatron_optimizer(settings.optimizer, model)
        scheduler = build_scheduler(settings.schedule, settings.optimizer, optimizer)
    args.iteration = args.num_floating_point_operations_so_far = 0
    if args.load is not None:
        load_checkpoint(model, optimizer, scheduler, checkpointing_context=checkpointing_context)
    return model, optimizer, scheduler


def _gpt_model(
    settings: Settings,
    pre_process: bool,
    post_process: bool,
    pg_collection: ProcessGroupCollection | None = None,
    vp_stage: int | None = None,
) -> torch.nn.Module:
    """Build the GPT model of the command line; its process groups determine its pipeline stage."""
    # If the model's vocabulary size is set, do not build the tokenizer.
    vocab_size = 1 if settings.model.model_vocab_size is not None else get_tokenizer().vocab_size
    return build_gpt_model(
        settings.model,
        vocab_size=vocab_size,
        device=local_device(settings.distributed),
        pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )


def _wrapped(
    model: torch.nn.Module,
    *,
    wrap_with_ddp: bool,
    transformer: Any,
    device: torch.device,
    pg_collection: ProcessGroupCollection | None,
) -> torch.nn.Module:
    """Put one stage into the wrappers that the arguments of the run ask for."""
    settings = settings_of(get_args())
    if not settings.model.init_on_meta_device:
        model = model.to(device)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    half = torch.bfloat16 if transformer.bf16 else torch.float16
    if (transformer.bf16 or transformer.fp16) and torch.float32 in dtypes and half not in dtypes:
        model = Float16Module(transformer, model)
    if not wrap_with_ddp:
        return model
    if settings.ddp.use_megatron_fsdp:
        return FullyShardedDataParallel(transformer, settings.ddp, model, device=device, pg_collection=pg_collection)
    return DistributedDataParallel(transformer, settings.ddp, model, pg_collection=pg_collection)


def _provided(
    provider: Callable[..., torch.nn.Module],
    rank: int,
    num_ranks: int,
    given: dict[str, Any],
    chunk: int = 0,
    num_chunks: int = 1,
) -> torch.nn.Module:
    """Call a model provider with what it takes, for one of the stages of a pipeline rank."""
    taken = inspect.signature(provider).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    further = {name: value for name, value in given.items() if value is not None and (takes_all or name in taken)}
    if num_chunks > 1:
        further["vp_stage"] = chunk  # who does not take it cannot build the stages
    is_first, is_last = (rank, chunk) == (0, 0), (rank, chunk) == (num_ranks - 1, num_chunks - 1)
    return provider(pre_process=is_first, post_process=is_last, **further)


def pretrain(
    cfg_container: PretrainConfigContainer,
    train_valid_test_dataset_provider: Callable[..., Sequence[Any]],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    model_provider: Callable[..., torch.nn.Module] | None = None,
    process_non_loss_data_func: None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: None = None,
    store: None = None,
    inprocess_call_wrapper: None = None,
    p2p_communicator: None = None,
    pg_collection: None = None,
    skip_model_parallel_init: bool = False,
) -> TrainState:
    """Train, evaluate and save a model as the command line says, by functions that are written for Megatron-LM.

    Args:
        cfg_container: of ``pretrain_cfg_container_from_args``.
        train_valid_test_dataset_provider: [3] numbers of samples -> (training, validation, test) datasets of dicts of tensors.
        model_type: accepted; there is one.
        forward_step_func: (data iterator, model) -> (output, loss function); the loss function returns (loss, report), or
            (sum of losses, tokens, report). The log has the loss alone.
        model_provider: (pre_process, post_process) -> the model; None: the GPT model of the command line.
        get_embedding_ranks, get_position_embedding_ranks: functions that return what the defaults return.

    Returns:
        The counters of training at its end.

    Raises:
        NotImplementedError: one of the other arguments is given.

    Ranks: all.
    """
    others = {
        "process_non_loss_data_func": process_non_loss_data_func,
        "non_loss_data_func": non_loss_data_func,
        "store": store,
        "inprocess_call_wrapper": inprocess_call_wrapper,
        "p2p_communicator": p2p_communicator,
        "pg_collection": pg_collection,
        "skip_model_parallel_init": skip_model_parallel_init or None,
    }
    if given := [name for name, value in others.items() if value is not None]:
        raise NotImplementedError(
            f"pretrain: {', '.join(given)} must be left out: the training loop is this framework's own"
        )
    _initialize(cfg_container.settings, (get_embedding_ranks, get_position_embedding_ranks))
    return run(
        cfg_container.settings,
        model_provider=partial(_model, cfg_container.args, model_provider),
        datasets_provider=lambda settings, tokenizer, sizes: Datasets(*train_valid_test_dataset_provider(list(sizes))),
        forward_step=partial(_forward, forward_step_func),
    )


def _model(
    args: Namespace,
    provider: Callable[..., torch.nn.Module] | None,
    settings: Settings,
    vocab_size: int,
    device: torch.device,
    groups: ProcessGroupCollection,
    vp_stage: int | None = None,
) -> torch.nn.Module:
    args.padded_vocab_size = settings.model.padded_vocab_size(vocab_size)
    if provider is None:
        return build_gpt_model(
            settings.model, vocab_size=vocab_size, device=device, pg_collection=groups, vp_stage=vp_stage
        )
    given = {"config": settings.model.transformer, "pg_collection": groups}
    with torch.device(device):
        num_chunks = settings.model.transformer.virtual_pipeline_model_parallel_size or 1
        return _provided(provider, group_rank(groups.pp), group_size(groups.pp), given, vp_stage or 0, num_chunks)


def _forward(
    forward_step_func: Callable[..., Any], batch: Batch, model: torch.nn.Module
) -> tuple[Tensor, Tensor] | Tensor:
    """Call a forward step of Megatron-LM; return (sum of losses, tokens), or the output of a stage without output layer."""
    data: Iterator[Batch] = iter([batch])
    output, loss_function = forward_step_func(data, model)
    if not has_output_layer(model):
        tensor: Tensor = output
        return tensor
    found = loss_function(output)
    loss: Tensor = found[0]
    # A loss that is a mean counts as one token, so that microbatches and ranks weigh alike.
    tokens = found[1] if len(found) == 3 else torch.ones((), device=loss.device)
    return loss, tokens.float()


def get_train_valid_test_num_samples() -> tuple[int, int | None, int]:
    """Return the numbers of samples of training, validation and test that the run of the arguments draws."""
    from megatron.training.launch.samples import num_samples

    return num_samples(settings_of(get_args()))


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None) -> None:
    """Do nothing: the log's first line says when training started."""


__all__ = ["get_model", "initialize_megatron", "pretrain", "print_rank_0"]
