"""The command line: the mapping from flags to the dataclasses of the components that read them."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.full_cuda_graph import FullCudaGraphConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rank_grid import RankGrid
from megatron.core.tokenizers import TokenizerConfig
from megatron.core.transformer.pipeline_layers import embedding_ranks
from megatron.training.checkpointing import CheckpointConfig
from megatron.training.cli.checkpoint_args import with_checkpoint_args
from megatron.training.cli.flag_parser import Fate, FlagError, FlagParser
from megatron.training.cli.flags_always_so import ALWAYS_SO
from megatron.training.cli.flags_batch import batch_config, eval_batch_config
from megatron.training.cli.flags_data import fill_in_the_middle, take_data_args
from megatron.training.cli.flags_model import take_num_layers
from megatron.training.cli.flags_of_before import (
    ALWAYS_SO_BEFORE,
    REFUSED_BEFORE,
    RENAMED,
    SAID_ONCE_BEFORE,
)
from megatron.training.cli.flags_parallel import check_stages_are_busy, rank_grid
from megatron.training.cli.flags_refused import REFUSED
from megatron.training.cli.flags_said_once import SAID_ONCE
from megatron.training.cli.flags_tokenizer import tokenizer_config
from megatron.training.cli.flags_training import captures_iterations, full_cuda_graph_config
from megatron.training.cli.megatron_lm_args import MegatronLmArgs, megatron_lm_args
from megatron.training.cli.model_settings import compute_dtype, gpt_config
from megatron.training.cli.refused_combinations import SAID_BEFORE, refusals_of
from megatron.training.cli.served_flags import FLAG_GROUPS, same_named
from megatron.training.cli.substitutions import substitute
from megatron.training.cli.words_of_flags import in_plain_words, in_words_of_flags
from megatron.training.data.batches import BatchConfig
from megatron.training.data.datasets import DataConfig
from megatron.training.launch.distributed_init import DistributedConfig
from megatron.training.launch.gpt_config import GPTConfig
from megatron.training.launch.rendezvous import world_size_of_environment
from megatron.training.loop.evaluation import ValidationConfig
from megatron.training.loop.garbage import GarbageConfig
from megatron.training.loop.lr_schedule import ScheduleConfig
from megatron.training.loop.training_loop import LoopConfig
from megatron.training.telemetry.metrics import LoggingConfig
from megatron.training.telemetry.profiling import ProfilingConfig
from megatron.training.telemetry.watch.run_watch import WatchConfig
from megatron.training.tuner.config import AUTO, DEFAULT_FILE, LaunchLine, TuningConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOMENT_DTYPES = {**_DTYPES, "fp8": torch.uint8}


_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class SaidAtStart:
    """What rank 0 says once about flags whose place something else takes."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, one part for each component."""

    model: GPTConfig
    grid: RankGrid
    batch: BatchConfig
    eval_batch: BatchConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loop: LoopConfig
    validation: ValidationConfig
    garbage: GarbageConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    watch: WatchConfig
    profiling: ProfilingConfig
    distributed: DistributedConfig
    ddp: DistributedDataParallelConfig
    cuda_graph: FullCudaGraphConfig
    said_once: SaidAtStart
    tuning: TuningConfig = field(default_factory=TuningConfig)
    launch_line: LaunchLine = field(default_factory=LaunchLine)
    megatron_lm: MegatronLmArgs = field(default_factory=MegatronLmArgs)


def build_parser() -> FlagParser:
    """Build the parser of all flags."""
    parser = FlagParser(
        prog="pretrain_gpt.py",
        description="Trains a GPT model: torchrun --nproc-per-node N pretrain_gpt.py <flags of Megatron-LM>",
        always_so=ALWAYS_SO | ALWAYS_SO_BEFORE,
        said_once=SAID_ONCE | SAID_ONCE_BEFORE,
        refused=REFUSED | REFUSED_BEFORE,
        renamed=RENAMED,
    )
    for group in FLAG_GROUPS:
        group.add_to(parser)
    return parser


@dataclass(frozen=True)
class CheckedLine:
    """A command line after all checks that need neither ranks nor data."""

    fates: list[Fate]
    """What became of each flag, in the line's order."""

    faults: list[str]
    """All that keeps the run from starting, one line each."""

    said_once: tuple[str, ...]
    """What rank 0 says about flags whose place something else takes."""

    args: Namespace
    """The settings by the names of flags, without those that cannot be read."""

    settings: Settings | None
    """None if there are faults."""


def parse_settings(argv: Sequence[str], *, world_size: int | None = None) -> Settings:
    """Parse and check a command line; nothing is allocated.

    Args:
        world_size: number of ranks of the run; None: those that torchrun started.

    Raises:
        FlagError: flags are unknown, refused, malformed or contradict each other; the message names all faults found.
    """
    line = check_command_line(argv, world_size=world_size)
    if line.settings is None:
        raise FlagError("\n".join(line.faults))
    return line.settings


def check_command_line(argv: Sequence[str], *, world_size: int | None = None, paths_exist: bool = True) -> CheckedLine:
    """Check a command line as far as that needs neither ranks nor data, and collect all its faults.

    Args:
        paths_exist: files with arguments that are not there are faults.
    """
    parser = build_parser()
    completed = with_checkpoint_args(argv, parser)
    line = parser.read(completed.argv)
    args = line.args
    args.world_size = world_size or world_size_of_environment()
    take_num_layers(args)
    untuned = _take_autos(args, parser)
    of_files = take_data_args(args, paths_exist=paths_exist)
    as_megatron_lm = megatron_lm_args(parser, vars(args), line.fates)
    taken = (in_words_of_flags(text, parser) for text in substitute(args, malformed=line.malformed))
    said_once = (*completed.said, *line.said_once, *taken)
    rows, unreadable = refusals_of(args, malformed=line.malformed)
    rows += [*untuned, *_two_overlaps(line.fates, args)]
    faults, settings = [*completed.faults, *line.faults, *of_files, *rows], None
    for dest in unreadable:
        delattr(args, dest)
    try:
        settings = settings_from_args(
            args,
            world_size=args.world_size,
            said_once=said_once,
            unreadable=line.malformed | unreadable,
        )
    except FlagError as error:
        words = in_words_of_flags(str(error), parser)
        faults += [fault for fault in words.splitlines() if not _is_said(fault, faults)]
    if faults or settings is None:
        return CheckedLine(line.fates, list(dict.fromkeys(map(in_plain_words, faults))), said_once, args, None)
    whole = replace(settings, megatron_lm=as_megatron_lm, launch_line=LaunchLine(words=tuple(argv)))
    return CheckedLine(line.fates, [], said_once, args, whole)


def _is_said(fault: str, before: list[str]) -> bool:
    """Whether a component's fault was said before in the words of the command line, or follows from what was said."""
    return any(fault.startswith(start) and any(text.startswith(said) for text in before) for said, start in SAID_BEFORE)


class _Parts:
    """Builds the parts of the settings and collects what they refuse.

    Args:
        unreadable: names of settings that are known to be wrong; a part that reads one is left out.
    """

    def __init__(self, unreadable: frozenset[str]) -> None:
        self.unreadable, self.faults = unreadable, list[str]()

    def build(self, part: Callable[[], _Part]) -> _Part | None:
        try:
            return part()
        except (ValueError, NotImplementedError) as error:
            self.faults += str(error).splitlines()
        except AttributeError as error:
            if error.name not in self.unreadable:
                raise
        return None


def settings_from_args(
    args: Namespace, *, world_size: int, said_once: tuple[str, ...] = (), unreadable: frozenset[str] = frozenset()
) -> Settings:
    """Map every flag to the settings of its component.

    Args:
        said_once: what rank 0 says once.
        unreadable: names of settings that ``args`` lacks, since they are wrong.

    Raises:
        FlagError: components refuse their settings; the message has a line for each fault. Or settings are unreadable.
    """
    parts = _Parts(unreadable)
    grid = parts.build(lambda: rank_grid(args, world_size=world_size))
    batch = None if grid is None else parts.build(lambda: batch_config(args, grid.size("dp")))
    made: dict[str, Any] = {"grid": grid, "batch": batch, "said_once": SaidAtStart(lines=said_once)}
    components: dict[str, Callable[[Namespace], Any]] = {
        "model": gpt_config,
        "data": _data,
        "tokenizer": tokenizer_config,
        "optimizer": _optimizer,
        "garbage": _garbage,
        "validation": _validation,
        "checkpoint": _checkpoint,
        "logging": _logging,
        "watch": _watch,
        "profiling": partial(_profiling, world_size=world_size),
        "distributed": _distributed,
        "ddp": ddp_config,
        "cuda_graph": full_cuda_graph_config,
        "tuning": _tuning,
    }
    for name, build in components.items():
        made[name] = parts.build(partial(build, args))
    if batch is not None:
        made["eval_batch"] = parts.build(lambda: eval_batch_config(args, batch))
        if made["model"] is not None:
            parts.build(partial(check_stages_are_busy, made["model"].transformer, batch))
        made["schedule"] = parts.build(lambda: _schedule(args, batch))
        made["loop"] = parts.build(lambda: _loop(args, batch))
    if grid is not None and made["model"] is not None:
        model: GPTConfig = made["model"]
        ranks = embedding_ranks(model.transformer, ties=model.share_embeddings_and_output_weights)
        made["grid"] = replace(grid, embedding_stages=ranks)
    if made["model"] is not None and made["tokenizer"] is not None and made["tokenizer"].vocab_size is not None:
        parts.build(partial(made["model"].padded_vocab_size, made["tokenizer"].vocab_size))
    if parts.faults or None in made.values():
        raise FlagError("\n".join(parts.faults))
    return Settings(**made)


def _garbage(args: Namespace) -> GarbageConfig:
    return GarbageConfig(manual=args.manual_gc, interval=args.manual_gc_interval, at_evaluation=args.manual_gc_eval)


def _take_autos(args: Namespace, parser: ArgumentParser) -> list[str]:
    """Set what the tuner is to choose to its default, and return a fault for each such flag if the tuner is not asked to."""
    dests = {flag: flag.removeprefix("--").replace("-", "_") for flag in AUTO}
    autos = {flag: dest for flag, dest in dests.items() if getattr(args, dest, None) == "auto"}
    vars(args).update({dest: parser.get_default(dest) for dest in autos.values()})
    if getattr(args, "fsdp_tune", "") is not None:
        return []
    return [f"{flag} auto needs --fsdp-tune, which chooses a value; give it too, or a number" for flag in autos]


def _two_overlaps(fates: Sequence[Fate], args: Namespace) -> list[str]:
    """Return a fault if exchanges of tokens are to overlap with shared experts and with another microbatch, as in Megatron-LM."""
    flag = "--moe-shared-expert-overlap"
    asks = any(fate.flag == flag and fate.kind == "said once" for fate in fates)
    if not (getattr(args, "overlap_moe_expert_parallel_comm", False) and asks):
        return []
    return [
        f"--overlap-moe-expert-parallel-comm must go without {flag}, got both; leave out {flag}, which has no effect"
    ]


def _tuning(args: Namespace) -> TuningConfig:
    asked: str | None = args.fsdp_tune
    file = str(Path(args.save or "") / DEFAULT_FILE) if asked == "" else asked
    seconds = {} if args.fsdp_tune_seconds is None else {"seconds": args.fsdp_tune_seconds}
    return TuningConfig(file=file, also=tuple(dict.fromkeys(args.fsdp_tune_also or ())), **seconds)


def _distributed(args: Namespace) -> DistributedConfig:
    return DistributedConfig(
        **same_named(DistributedConfig, args),
        backend=args.distributed_backend,
        timeout_minutes=args.distributed_timeout_minutes,
    )


def _loop(args: Namespace, batch: BatchConfig) -> LoopConfig:
    first = batch.at(0).global_batch_size
    if args.train_samples is not None and args.train_samples < first:
        raise ValueError(
            f"--train-samples must be at least --global-batch-size ({first}), got {args.train_samples}: "
            "training is in whole global batches"
        )
    return LoopConfig(
        **same_named(LoopConfig, args, but=("train_iters", "exit_interval")),
        train_iters=args.train_iters if args.train_samples is None else batch.iterations_until(args.train_samples),
        exit_interval=args.exit_interval or None,
        check_weight_hash_interval=args.check_weight_hash_across_dp_replicas_interval or None,
        exit_duration_mins=args.exit_duration_in_mins or None,
        check_finite=args.check_for_nan_in_loss_and_grad,
        deterministic=args.deterministic_mode,
    )


def _validation(args: Namespace) -> ValidationConfig:
    return ValidationConfig(
        skip_train=args.skip_train,
        full=args.full_validation,
        separate_sets=args.multiple_validation_sets,
        set_names=tuple(args.validation_set_names or ()),
    )


def _data(args: Namespace) -> DataConfig:
    path_names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    paths: dict[str, Any] = {name: tuple(getattr(args, name) or ()) or None for name in path_names}
    return DataConfig(
        **same_named(DataConfig, args, but=(*path_names, "reset_attention_mask")),
        **paths,
        cache_path=args.data_cache_path,
        order=args.dataloader_type or "single",
        allow_gaps=args.allow_gaps_in_corpora,
        reset_attention_mask=args.reset_attention_mask or args.dataloader_inter_document_masking,
        fim=fill_in_the_middle(args),
        separate_validation_sets=args.multiple_validation_sets,
    )


def _optimizer(args: Namespace) -> OptimizerConfig:
    dtypes = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return OptimizerConfig(
        **same_named(OptimizerConfig, args, but=(*dtypes, *_NOT_OF_THE_OPTIMIZER, "apply_wd_to_qk_layernorm")),
        main_grads_dtype=_DTYPES[args.main_grads_dtype],
        exp_avg_dtype=_MOMENT_DTYPES[args.exp_avg_dtype],
        exp_avg_sq_dtype=_MOMENT_DTYPES[args.exp_avg_sq_dtype],
        apply_wd_to_qk_layernorm=args.apply_wd_to_qk_layernorm or args.no_weight_decay_cond_type is not None,
    )


_NOT_OF_THE_OPTIMIZER = ("bf16", "fp8_recipe", "overlap_param_gather", "use_distributed_optimizer")
"""The settings of the model or of data parallelism have them."""


def _schedule(args: Namespace, batch: BatchConfig) -> ScheduleConfig:
    # As in Megatron-LM an iteration counts as one of the full batch, also where batches grow, and schedules run late.
    def samples(iterations: int | None, given: int | None) -> int | None:
        return given if iterations is None else iterations * batch.global_batch_size

    length = samples(args.train_iters, args.train_samples)
    assert length is not None, "one of them is given"
    decay = samples(args.lr_decay_iters, args.lr_decay_samples) or length
    warmup: float = samples(args.lr_warmup_iters or None, args.lr_warmup_samples) or 0
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    constant_decay = args.weight_decay_incr_style == "constant"
    return ScheduleConfig(
        decay_samples=decay,
        warmup_samples=warmup,
        warmup_init_lr=args.lr_warmup_init,
        decay_style=args.lr_decay_style,
        wsd_decay_samples=samples(args.lr_wsd_decay_iters, args.lr_wsd_decay_samples),
        wsd_decay_style=args.lr_wsd_decay_style,
        start_weight_decay=args.weight_decay if constant_decay else args.start_weight_decay,
        end_weight_decay=args.weight_decay if constant_decay else args.end_weight_decay,
        weight_decay_incr_samples=length,
        weight_decay_incr_style=args.weight_decay_incr_style,
        override_checkpoint=args.override_opt_param_scheduler,
        use_checkpoint=args.use_checkpoint_opt_param_scheduler,
    )


def _checkpoint(args: Namespace) -> CheckpointConfig:
    return CheckpointConfig(
        **same_named(CheckpointConfig, args),
        save_optim=not args.no_save_optim,
        save_rng=not args.no_save_rng,
        load_step=args.ckpt_step,
        exit_on_missing=args.exit_on_missing_checkpoint,
        load_optim=not args.no_load_optim,
        load_rng=not args.no_load_rng,
        verify=not args.no_verify_checkpoint,
    )


def _logging(args: Namespace) -> LoggingConfig:
    return LoggingConfig(
        **same_named(LoggingConfig, args),
        loss_scale_to_tensorboard=args.log_loss_scale_to_tensorboard,
        world_size_to_tensorboard=args.log_world_size_to_tensorboard,
        timers_to_tensorboard=args.log_timers_to_tensorboard,
        memory_to_tensorboard=args.log_memory_to_tensorboard,
        validation_ppl_to_tensorboard=args.log_validation_ppl_to_tensorboard,
    )


def _watch(args: Namespace) -> WatchConfig:
    return WatchConfig(
        **same_named(WatchConfig, args),
        time_left_interval_s=args.time_left_interval,
    )


def _profiling(args: Namespace, world_size: int) -> ProfilingConfig:
    ranks = tuple(args.profile_ranks)
    if ranks and not any(0 <= rank < world_size for rank in ranks):
        raise ValueError(f"--profile-ranks must name ranks of the run, 0 to {world_size - 1}, got {args.profile_ranks}")
    # Megatron-LM's place is beside the folder of TensorBoard.
    folder = Path(args.tensorboard_dir).parent if args.tensorboard_dir else Path(args.save or "")
    return ProfilingConfig(
        **same_named(ProfilingConfig, args),
        step_start=args.profile_step_start,
        step_end=args.profile_step_end,
        ranks=ranks,
        collect_shapes=args.pytorch_profiler_collect_shapes,
        collect_callstack=args.pytorch_profiler_collect_callstack,
        collect_chakra=args.pytorch_profiler_collect_chakra,
        trace_folder=str(folder / "torch_profile"),
        chakra_folder=str(folder / "chakra"),
    )


def ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Map the sharding flags.

    Without ``--use-megatron-fsdp`` they mean plain data parallelism, or with ``--use-distributed-optimizer`` the engine's
    ``optim`` strategy.
    """
    strategy: Any = args.data_parallel_sharding_strategy if args.use_megatron_fsdp else "no_shard"
    shards_optimizer_alone = args.use_distributed_optimizer and not args.use_megatron_fsdp
    if shards_optimizer_alone:
        strategy = "optim"
    main_grads, grad_comm = _gradient_dtypes(args)
    main_params = _DTYPES.get(args.megatron_fsdp_main_params_dtype, compute_dtype(args))
    if args.use_precision_aware_optimizer and args.bf16:
        main_params = torch.bfloat16  # the upper halves of the fp32 weights
    differing: dict[str, Any] = {
        "use_megatron_fsdp": args.use_megatron_fsdp or shards_optimizer_alone,
        "data_parallel_sharding_strategy": strategy,
        "megatron_fsdp_main_params_dtype": main_params,
        "megatron_fsdp_main_grads_dtype": main_grads,
        "megatron_fsdp_grad_comm_dtype": grad_comm,
        "fsdp_all_gather_in_start_param_sync": _gathers_in_start_param_sync(args),
        "reduce_scatter_with_fp32_accumulation": args.ddp_reduce_scatter_with_fp32_accumulation,
        "param_name_patterns_for_fp32_local_accumulation": tuple(
            args.ddp_param_name_patterns_for_fp32_local_accumulation
        ),
    }
    return DistributedDataParallelConfig(**same_named(DistributedDataParallelConfig, args, but=differing), **differing)


def _gathers_in_start_param_sync(args: Namespace) -> bool:
    """Return the flags' value. The default is False with CUDA graphs of iterations: nothing may be launched between them."""
    given: bool | None = args.fsdp_all_gather_in_start_param_sync
    return not captures_iterations(args) if given is None else given


def _gradient_dtypes(args: Namespace) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of main gradients and of gradient communication.

    As in Megatron-LM, both are fp32 in bf16 training unless ``--grad-reduce-in-bf16`` or ``--main-grads-dtype bf16`` is given, and in fp16 training gradients
    travel in fp16 unless ``--accumulate-allreduce-grads-in-fp32`` is. Unlike there, main gradients are fp32 in fp16 training
    too, and a dtype that is given by its own flag is always in effect.
    """
    in_half = args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16"
    in_fp32 = args.accumulate_allreduce_grads_in_fp32 or not in_half
    default = torch.float32 if in_fp32 else compute_dtype(args)
    main_grads = _DTYPES.get(args.megatron_fsdp_main_grads_dtype, default)
    on_wire = torch.float16 if args.fp16 and not args.accumulate_allreduce_grads_in_fp32 else main_grads
    return main_grads, _DTYPES.get(args.megatron_fsdp_grad_comm_dtype, on_wire)


_OF_MEGATRON_LM = (
    "add_megatron_arguments",
    "core_transformer_config_from_args",
    "parse_and_validate_args",
    "parse_args",
    "validate_args",
)


def __getattr__(name: str) -> Any:
    """Return functions that code written for Megatron-LM imports from here; ``library`` has them."""
    if name in _OF_MEGATRON_LM:
        return getattr(importlib.import_module("megatron.training.library.flags"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
