"""Pretraining from start to end: ranks, data, model, resume, training loop, last evaluation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import FullyShardedDataParallel, ModelChunks, contexts_of
from megatron.core.distributed.fsdp.checkpoint import agree
from megatron.core.full_cuda_graph import CudaStepGraph, FullCudaGraph
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import PipelineStage, hidden_shape
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import rng_tracker_of
from megatron.core.tokenizers import MegatronTokenizerBase, build_tokenizer
from megatron.core.transformer.moe.loss_record import auxiliary_loss_names
from megatron.core.transformer.pipeline_layers import wide_messages
from megatron.training.arguments import Settings
from megatron.training.checkpointing import CheckpointConfig, Checkpointer, print_rank_0
from megatron.training.cli.configuration_report import report_configuration, report_settings, report_sizes
from megatron.training.data.batches import BatchConfig
from megatron.training.data.datasets import Datasets
from megatron.training.folder_lock import FolderLock
from megatron.training.launch.distributed_init import initialize_distributed, process_groups, set_deterministic
from megatron.training.launch.failures import ending_together
from megatron.training.launch.refusals import refusing_together
from megatron.training.launch.rendezvous import meet
from megatron.training.launch.restart import EarlierStarts, after_restart
from megatron.training.launch.same_settings import compare_settings, values_to_compare
from megatron.training.launch.samples import (
    data_rank,
    num_samples,
    origin_of_samples,
    test_batches,
    train_batches,
    validation_sets,
)
from megatron.training.launch.save_folder import claimed_save
from megatron.training.launch.watching import bringing_warnings, build_watch
from megatron.training.loop.dropout_seed import seed_everything
from megatron.training.loop.evaluation import evaluate
from megatron.training.loop.garbage import GarbageCollector
from megatron.training.loop.lr_schedule import build_scheduler
from megatron.training.loop.step_agreement import StepAgreement, TerminationSignal
from megatron.training.loop.train_state import TrainState
from megatron.training.loop.train_step import ForwardStep, StepComputation, TrainStep
from megatron.training.loop.training_loop import TrainingLoop
from megatron.training.telemetry.flops import flops_per_sample
from megatron.training.telemetry.life_signs import LifeSigns
from megatron.training.telemetry.metrics import MetricLog, ScalarWriter, build_writers
from megatron.training.telemetry.profiling import StepProfiler, check_report_folder, overlap_report, start_profiler
from megatron.training.telemetry.progress_log import ProgressLog
from megatron.training.telemetry.watch.run_watch import RunWatch
from megatron.training.tuner.tuned import tuned

ModelProvider = Callable[..., torch.nn.Module]
"""(settings, size of the vocabulary, device, process groups) -> this rank's part of the model, unwrapped; on the meta
device if the settings say so. Where a rank has several pipeline stages, it is called for each, with ``vp_stage``."""

DatasetProvider = Callable[[Settings, Any, Sequence[int | None]], Datasets]
"""(settings, tokenizer, [3] numbers of samples of training, validation and test) -> datasets of dicts of tensors. None stands for
all samples, once."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The components of a run, built before its first step."""

    settings: Settings
    device: torch.device
    datasets: Datasets
    model: FullyShardedDataParallel | ModelChunks
    stage: PipelineStage
    """The pipeline stage of this rank."""
    eval_stage: PipelineStage
    """The same for evaluations, whose microbatches may have another size."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    vocab_size: int
    """The tokenizer's."""
    architecture: dict[str, Any]
    """See ``GPTConfig.architecture``."""
    flops_per_sample: int


def pretrain(
    settings: Settings,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetProvider,
    forward_step: ForwardStep,
) -> TrainState:
    """Train, evaluate and save a model as the settings say; return the counters of training at its end.

    Raises:
        RuntimeError: ranks or devices are missing, or a loss is not finite.
        StartRefusedError: the run cannot start: ranks were given different settings, data, checkpoint or devices do not
            match them, or ``save`` cannot be used; on all ranks, with one message.

    Ranks: all.
    """
    start_time = time.time()
    owns_group = not dist.is_initialized()
    rendezvous = meet(settings.distributed.timeout)
    with _logging_at(settings.logging.logging_level), ending_together(rendezvous) as signs:
        compared = values_to_compare(settings)
        compare_settings(compared, rendezvous, settings.distributed.timeout)
        settings = tuned(
            settings,
            rendezvous,
            set_up=set_up,
            make_step=training_step,
            model_provider=model_provider,
            datasets_provider=datasets_provider,
            forward_step=forward_step,
        )
        device = initialize_distributed(settings.distributed, rendezvous)
        profiler = start_profiler(settings.profiling, device)
        with ExitStack() as scopes:
            with refusing_together(rendezvous):
                starts = EarlierStarts.of(settings.checkpoint, rendezvous)
                checkpoint = after_restart(starts)
                lock = scopes.enter_context(claimed_save(checkpoint, rendezvous, starts))
                if settings.cuda_graph.enabled:
                    _begin_capturing(device)
                budget = settings.ddp.fsdp_memory_budget or 0
                if 0 < budget < 1:
                    agree(lambda: _check_memory_budget(budget, device), lambda _: None)
                if settings.loop.deterministic:
                    set_deterministic()
                seed_everything(settings.loop.seed)
                print_rank_0(report_settings(settings))
                setup = set_up(settings, device, model_provider, datasets_provider)
                report = _report(setup)
                print_rank_0(report)
                start = _begin(setup, checkpoint, lock, starts, report, origin_of_samples(settings, compared))
            scopes.enter_context(bringing_warnings(settings.watch, rendezvous, start.run_watch))
            if signs is not None and start.run_watch is not None and settings.watch.writes_files:
                signs.follow_silence(start.run_watch.tell_of_silence)
                signs.follow_failure(start.run_watch.tell_of_failure)
            state = _train(setup, start, forward_step, start_time, signs, profiler)
    if owns_group:
        setup.model.close()
        dist.destroy_process_group()
    return state


@contextmanager
def _logging_at(level: int | None) -> Iterator[None]:
    """Log from this level on within the scope; None: as it is."""
    root = logging.getLogger()
    before = root.level
    if level is not None:
        logging.basicConfig()  # without a handler, Python prints nothing below warnings, whatever the level
        root.setLevel(level)
    try:
        yield
    finally:
        root.setLevel(before)


def set_up(
    settings: Settings,
    device: torch.device,
    model_provider: ModelProvider,
    datasets_provider: DatasetProvider,
    *,
    groups: ProcessGroupCollection | None = None,
) -> TrainingSetup:
    """Build all components; data come first, so that faults in them are found before a model is allocated.

    Args:
        groups: process groups that were built before; None: they are built.
    """
    tokenizers: list[MegatronTokenizerBase] = []

    def read_tokenizer() -> None:
        tokenizers.append(build_tokenizer(settings.tokenizer))
        settings.model.padded_vocab_size(tokenizers[0].vocab_size)  # refuses what cannot be split
        if settings.data.fim is not None:
            settings.data.fim.check_tokens(tokenizers[0])

    agree(read_tokenizer, lambda _: None)
    (tokenizer,) = tokenizers
    if settings.tokenizer.vocab_size not in (None, tokenizer.vocab_size):
        print_rank_0(
            f" --vocab-size {settings.tokenizer.vocab_size} has no effect: {settings.tokenizer.kind} has "
            f"{tokenizer.vocab_size} ids"
        )
    sizes = num_samples(settings)
    print_rank_0(report_sizes(sizes))  # an index of many samples takes minutes
    datasets = datasets_provider(settings, tokenizer, sizes)
    groups = groups or process_groups(settings.distributed, settings.grid)
    model = sharded_model(
        settings, groups, device, partial(model_provider, settings, tokenizer.vocab_size, device, groups)
    )
    optimizer = get_megatron_optimizer(settings.optimizer, getattr(model, "model_chunks", [model]))
    architecture = settings.model.architecture(tokenizer.vocab_size)
    return TrainingSetup(
        settings=settings,
        device=device,
        datasets=datasets,
        model=model,
        stage=pipeline_stage(settings, groups, device, settings.batch.micro_batch_size),
        eval_stage=pipeline_stage(settings, groups, device, settings.eval_batch.micro_batch_size),
        optimizer=optimizer,
        scheduler=build_scheduler(settings.schedule, settings.optimizer, optimizer),
        vocab_size=tokenizer.vocab_size,
        architecture=architecture,
        flops_per_sample=flops_per_sample(
            settings.model.transformer,
            seq_length=settings.data.seq_length,
            vocab_size=architecture["padded_vocab_size"],
        ),
    )


def sharded_model(
    settings: Settings, groups: ProcessGroupCollection, device: torch.device, build: Callable[..., torch.nn.Module]
) -> FullyShardedDataParallel | ModelChunks:
    """Build and shard this rank's part of the model: one stage, or several that take turns."""
    transformer = settings.model.transformer
    shard = partial(FullyShardedDataParallel, transformer, settings.ddp, device=device, pg_collection=groups)
    num_chunks = transformer.virtual_pipeline_model_parallel_size or 1
    if num_chunks == 1:
        return shard(module=build())
    return ModelChunks([shard(module=build(vp_stage=vp_stage)) for vp_stage in range(num_chunks)])


def pipeline_stage(
    settings: Settings, groups: ProcessGroupCollection, device: torch.device, micro_batch_size: int
) -> PipelineStage:
    transformer = settings.model.transformer
    dtype = torch.float32 if transformer.fp32_residual_connection else transformer.params_dtype
    shape = hidden_shape(
        seq_length=settings.data.seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=transformer.hidden_size,
        context_parallel_size=transformer.context_parallel_size,
        tensor_model_parallel_size=transformer.tensor_model_parallel_size,
        sequence_parallel=transformer.sequence_parallel,
    )
    return PipelineStage(
        group=groups.pp,
        hidden_shape=shape,
        dtype=transformer.pipeline_dtype or dtype,
        device=device,
        num_chunks=transformer.virtual_pipeline_model_parallel_size or 1,
        **wide_messages(transformer),
    )


def _report(setup: TrainingSetup) -> str:
    configuration = report_configuration(
        setup.settings,
        device=setup.device,
        model=setup.model,
        padded_vocab_size=setup.architecture["padded_vocab_size"],
        vocab_size=setup.vocab_size,
        flops_per_sample=setup.flops_per_sample,
    )
    return f"{configuration}\n{setup.model.describe()}"


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Where training starts, and what it writes to."""

    checkpointer: Checkpointer
    state: TrainState
    writers: list[ScalarWriter]
    run_watch: RunWatch | None


def _begin(
    setup: TrainingSetup,
    checkpoint: CheckpointConfig,
    lock: FolderLock | None,
    starts: EarlierStarts,
    report: str,
    samples: dict[str, Any],
) -> _Start:
    settings = setup.settings
    checkpointer = Checkpointer(
        checkpoint,
        setup.model,
        setup.optimizer,
        setup.scheduler,
        architecture=setup.architecture,
        seed=settings.loop.seed,
        samples=samples,
        megatron_lm_args={
            **settings.megatron_lm.values,
            "world_size": settings.grid.world_size,
            "data_parallel_size": settings.grid.size("dp"),
            "padded_vocab_size": setup.architecture["padded_vocab_size"],
        },
        lock=lock,
        before_announcing=starts.remember_save,
    )
    checkpointer.check_save()
    state = checkpointer.load()
    agree(lambda: None, lambda _: _begin_progress_log(setup, checkpointer, state))
    agree(lambda: _check_data_left(setup, state), lambda _: None)
    writers: list[ScalarWriter] = []
    if not settings.validation.skip_train:  # its losses belong to no point of a curve, as in Megatron-LM
        agree(lambda: writers.extend(build_writers(settings.logging, setup.architecture)), lambda _: None)
    if not settings.validation.skip_train:
        agree(lambda: None, lambda _: check_report_folder(settings.profiling))
    watches: list[RunWatch | None] = []
    agree(lambda: watches.append(build_watch(setup, state, report)), lambda _: None)
    (run_watch,) = watches
    if run_watch is not None:
        checkpointer.observers.append(run_watch)
    return _Start(checkpointer=checkpointer, state=state, writers=writers, run_watch=run_watch)


def _begin_progress_log(setup: TrainingSetup, checkpointer: Checkpointer, state: TrainState) -> None:
    """Begin to write ``progress.txt``, if that is asked for. Ranks: 0."""
    settings = setup.settings
    if settings.logging.log_progress and settings.checkpoint.save is not None:
        log = ProgressLog(
            Path(settings.checkpoint.save),
            num_ranks=dist.get_world_size(),
            flops_per_sample=setup.flops_per_sample,
            tokens_per_sample=settings.data.seq_length,
            consumed_samples=state.consumed_train_samples,
        )
        checkpointer.observers.append(log)


def _check_data_left(setup: TrainingSetup, state: TrainState) -> None:
    """Check that the training data, built before the load, last to the end: earlier runs may have had larger batches.

    Raises:
        ValueError: they do not.

    Ranks: each on its own.
    """
    loop, batch = setup.settings.loop, setup.settings.batch
    if setup.settings.validation.skip_train:
        return
    iterations = loop.last_iteration(state, batch) - state.iteration
    needed = batch.consumed_after(iterations, state.consumed_train_samples)
    held = 0 if setup.datasets.train is None else len(setup.datasets.train)
    if iterations > 0 and held < needed:
        raise ValueError(
            f"the training data must have {needed} samples, {state.consumed_train_samples} that earlier runs have consumed and "
            f"those of {iterations} more iterations, got {held}: data are built for --train-iters batches of this "
            f"run's size; give --train-samples {needed} instead of --train-iters"
        )


def _train(
    setup: TrainingSetup,
    start: _Start,
    forward_step: ForwardStep,
    start_time: float,
    signs: LifeSigns | None,
    profiler: StepProfiler | None,
) -> TrainState:
    settings, device = setup.settings, setup.device
    checkpointer, state = start.checkpointer, start.state
    log = MetricLog(
        settings.logging,
        settings.batch.at(state.consumed_train_samples),
        device=device,
        train_iters=settings.loop.last_iteration(state, settings.batch),
        flops_per_sample=setup.flops_per_sample,
        tokens_per_sample=settings.data.seq_length,
        writers=start.writers,
        auxiliary_losses=auxiliary_loss_names(settings.model.transformer),
        watch=start.run_watch,
    )
    termination = TerminationSignal() if settings.loop.exit_signal_handler else None
    garbage = GarbageCollector(settings.garbage)
    step = training_step(setup, forward_step, settings.batch.at(state.consumed_train_samples), checkpointer.seed)
    batches = None if settings.validation.skip_train else train_batches(setup, state.consumed_train_samples)
    held_out = validation_sets(setup, state.consumed_valid_samples)
    loop = TrainingLoop(
        settings.loop,
        settings.batch,
        step=step,
        forward_step=forward_step,
        state=state,
        train_batches=batches,
        validation_sets=held_out,
        checkpointer=checkpointer,
        agreement=StepAgreement(
            device,
            check_finite=settings.loop.check_finite,
            termination=termination,
            duration_mins=settings.loop.exit_duration_mins,
            start_time=start_time,
        ),
        log=log,
        garbage=garbage,
        device=device,
        eval_stage=setup.eval_stage,
        profiler=profiler,
        overlap=overlap_report(
            settings.profiling,
            setup.model,
            first=state.iteration + 1,
            captured_after=settings.cuda_graph.warmup_steps if settings.cuda_graph.enabled else None,
        ),
    )
    if signs is not None:
        signs.watch_progress(loop.progress)
    try:
        reason = "" if settings.validation.skip_train else loop.run()
        if settings.validation.skip_train or state.iteration >= loop.last_iteration:
            loop.evaluate(f"iteration {state.iteration} on validation set")
            _test(setup, forward_step, state, log)
        if settings.validation.skip_train:
            print_rank_0(f" nothing was trained after iteration {state.iteration}: --skip-train")
        else:
            print_rank_0(f" training ended after iteration {state.iteration}: {reason}")
        log.end(reason, iteration=state.iteration, consumed_samples=state.consumed_train_samples)
    except BaseException as error:
        log.fail(error)
        raise
    finally:
        for drawn in (batches, *(one.batches for one in held_out)):
            if drawn is not None:
                drawn.close()
        step.close()
        garbage.close()
        log.close()
    return state


def _begin_capturing(device: torch.device) -> None:
    """Check that steps can be captured on this device, and print what capturing changes."""
    if device.type != "cuda":
        raise ValueError(
            f"--cuda-graph-impl full_iteration needs CUDA devices, got {device.type}; use --cuda-graph-impl none"
        )
    print_rank_0(
        " fsdp_all_gather_in_start_param_sync is off: steps are captured in a CUDA graph, and nothing may be gathered "
        "between them"
    )


def _check_memory_budget(budget: float, device: torch.device) -> None:
    """Check that a share of the device's memory is one."""
    if device.type != "cuda":
        raise ValueError(
            f"--fsdp-memory-budget must be bytes where there is no device with memory of its own, got {budget} "
            f"on {device.type}"
        )


def training_step(setup: TrainingSetup, forward_step: ForwardStep, batch: BatchConfig, seed: int) -> TrainStep:
    """Make the step that trains, eager or captured, on batches of a constant size."""
    settings, num_microbatches = setup.settings, batch.num_microbatches
    computation = StepComputation(
        setup.model,
        setup.optimizer,
        forward_step,
        num_microbatches=num_microbatches,
        per_token_loss=settings.model.transformer.calculate_per_token_loss,
        device=setup.device,
        stage=setup.stage,
    )
    graph = None
    if settings.cuda_graph.enabled:
        tracker = rng_tracker_of(setup.model)
        graph = FullCudaGraph(
            computation,
            contexts_of(setup.model.module),
            CudaStepGraph(setup.device, num_microbatches=num_microbatches, tracker=tracker),
            warmup_steps=settings.cuda_graph.warmup_steps,
            tracker=tracker,
        )
    return TrainStep(computation, setup.scheduler, batch, seed=seed, rank=data_rank(setup), graph=graph)


def _test(setup: TrainingSetup, forward_step: ForwardStep, state: TrainState, log: MetricLog) -> None:
    """Log the loss on the test data, if there are any."""
    batches, batch = test_batches(setup), setup.settings.eval_batch
    if batches is None:
        return
    with closing(batches):
        loss = evaluate(
            setup.model,
            forward_step,
            batches,
            num_microbatches=setup.settings.loop.eval_iters * batch.num_microbatches,
            device=setup.device,
            stage=setup.eval_stage,
        )
    log.write_evaluation(
        f"iteration {state.iteration} on test set",
        "test",
        loss,
        iteration=state.iteration,
        consumed_samples=state.consumed_train_samples,
    )
