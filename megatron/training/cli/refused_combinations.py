"""Combinations of flags that are refused: tables of (name, condition, message), one test for each row.

Here are flags that contradict each other; lawful combinations that are not served are in ``combinations_not_served``.
"""

from __future__ import annotations

import math
from argparse import Namespace

from megatron.core.datasets.blend import get_blend_from_list
from megatron.training.cli.combinations_not_served import NOT_SERVED, Refusal
from megatron.training.cli.flags_distributed import STRATEGIES
from megatron.training.cli.flags_tokenizer import tokenizer_config
from megatron.training.cli.flags_training import captures_iterations
from megatron.training.cli.substitutions import holds


def _odd_in_fp8(args: Namespace, batch: int | None, length: int | None) -> bool:
    """Return whether FP8 GEMMs cannot multiply a rank's tokens, as they are in whole or as sequence-parallel ranks quantise them."""
    tokens = (batch or 1) * (length or 16) // args.context_parallel_size
    of_rank = tokens // args.tensor_model_parallel_size if args.sequence_parallel else tokens
    return bool(tokens % 16 or of_rank % 8)


def refusals_of(args: Namespace, malformed: frozenset[str] = frozenset()) -> tuple[list[str], frozenset[str]]:
    """Return the messages of all rows that hold for these flags, and the names of settings that must not be read on.

    Args:
        malformed: names of settings that ``args`` lacks; rows that read one are left out.
    """
    messages: list[str] = []
    unreadable: set[str] = set()
    for row in REFUSALS:
        if holds(row.when, args, malformed):
            messages.append(row.message.format(**vars(args)))
            unreadable.update(row.spoils)
    return messages, frozenset(unreadable)


def _missing(flag: str) -> Refusal:
    dest = flag.removeprefix("--").replace("-", "_")
    message = f"{flag} must be given, got none"
    return Refusal(f"no {dest}", lambda args: getattr(args, dest) is None, message, spoils=(dest,))


def _data_sources(args: Namespace) -> int:
    per_split = (args.train_data_path, args.valid_data_path, args.test_data_path)
    return bool(args.mock_data) + bool(args.data_path) + any(per_split)


def _by_samples(args: Namespace) -> bool:
    return bool(args.lr_decay_samples or args.lr_warmup_samples or args.lr_wsd_decay_samples)


def _by_iterations(args: Namespace) -> bool:
    return bool(args.lr_decay_iters or args.lr_warmup_iters or args.lr_wsd_decay_iters)


def _has_explicit_dtype(args: Namespace, dtype: str) -> bool:
    return dtype in (args.megatron_fsdp_main_grads_dtype, args.megatron_fsdp_grad_comm_dtype)


def _has_weights(paths: list[str] | None, *, beyond: int = 0) -> bool:
    """Whether paths are a blend of more than ``beyond`` corpora by weights; False if they are malformed."""
    try:
        blend = get_blend_from_list(paths or None)
    except ValueError:
        return False
    return blend is not None and blend[1] is not None and len(blend[0]) > beyond


def _fit_validation_sets(names: list[str], paths: list[str] | None) -> bool:
    try:
        blend = get_blend_from_list(paths or None)
    except ValueError:
        return True
    return len(set(names)) == len(names) == (1 if blend is None else len(blend[0]))


CONTRADICTIONS: tuple[Refusal, ...] = (
    *map(
        _missing,
        (
            "--num-layers",
            "--hidden-size",
            "--num-attention-heads",
            "--seq-length",
            "--max-position-embeddings",
            "--micro-batch-size",
            "--lr",
        ),
    ),
    Refusal(
        "hidden-size below 1",
        lambda a: a.hidden_size is not None and a.hidden_size < 1,
        "--hidden-size must be at least 1, got {hidden_size}",
    ),
    Refusal(
        "max-position-embeddings below seq-length",
        lambda a: None not in (a.seq_length, a.max_position_embeddings) and a.max_position_embeddings < a.seq_length,
        "--max-position-embeddings must be at least --seq-length, got {max_position_embeddings} and {seq_length}",
    ),
    Refusal(
        "seq-length not divisible by 2 * context-parallel-size",
        lambda a: (
            a.context_parallel_size > 1
            and a.seq_length is not None
            and a.seq_length % (2 * a.context_parallel_size) != 0
        ),
        "--seq-length must be a multiple of 2 * --context-parallel-size (each rank takes an early and a late part), got "
        "{seq_length} and {context_parallel_size}",
    ),
    Refusal(
        "seq-length not divisible for sequence parallelism",
        lambda a: (
            a.sequence_parallel
            and a.seq_length is not None
            and a.seq_length % (a.context_parallel_size * a.tensor_model_parallel_size) != 0
        ),
        "--seq-length must be a multiple of --context-parallel-size * --tensor-model-parallel-size with "
        "--sequence-parallel, got {seq_length} and {context_parallel_size} * {tensor_model_parallel_size}",
    ),
    Refusal(
        "padded-vocab-size not divisible by tensor-model-parallel-size",
        lambda a: (
            a.padded_vocab_size is not None
            and a.tensor_model_parallel_size > 0
            and a.padded_vocab_size % a.tensor_model_parallel_size != 0
        ),
        "--padded-vocab-size must be a multiple of --tensor-model-parallel-size, got {padded_vocab_size} and "
        "{tensor_model_parallel_size}",
    ),
    Refusal(
        "vocabulary padding below 1",
        lambda a: a.make_vocab_size_divisible_by < 1,
        "--make-vocab-size-divisible-by must be at least 1, got {make_vocab_size_divisible_by}",
        spoils=("make_vocab_size_divisible_by",),
    ),
    Refusal(
        "seq-length below 1",
        lambda a: a.seq_length is not None and a.seq_length < 1,
        "--seq-length must be at least 1, got {seq_length}",
    ),
    Refusal(
        "vocab-size below 1",
        lambda a: a.vocab_size is not None and a.vocab_size < 1,
        "--vocab-size must be at least 1, got {vocab_size}",
    ),
    Refusal(
        "padded-vocab-size below 1",
        lambda a: a.padded_vocab_size is not None and a.padded_vocab_size < 1,
        "--padded-vocab-size must be at least 1, got {padded_vocab_size}",
    ),
    Refusal(
        "rotary percent out of range",
        lambda a: not 0 < a.rotary_percent <= 1,
        "--rotary-percent must be above 0 and at most 1, got {rotary_percent}",
    ),
    Refusal(
        "rotary interpolation of 0 or less",
        lambda a: a.rotary_seq_len_interpolation_factor is not None and a.rotary_seq_len_interpolation_factor <= 0,
        "--rotary-seq-len-interpolation-factor must be above 0, got {rotary_seq_len_interpolation_factor}: positions are divided by it",
    ),
    Refusal(
        "rotary base below 1",
        lambda a: a.rotary_base < 1,
        "--rotary-base must be at least 1, got {rotary_base}",
    ),
    Refusal(
        "more layers of multi-token prediction than a sample has tokens for",
        lambda a: a.mtp_num_layers is not None and a.seq_length is not None and 0 < a.seq_length <= a.mtp_num_layers,
        "--mtp-num-layers must be below --seq-length, got {mtp_num_layers} and {seq_length}: the last layer predicts a token "
        "{mtp_num_layers} places behind the next one, of which a sample has none",
    ),
    Refusal(
        "two activation functions",
        lambda a: a.swiglu + a.squared_relu + a.quick_geglu + a.geglu > 1,
        "--swiglu, --geglu, --squared-relu and --quick-geglu are different activations; give one",
    ),
    Refusal(
        "full recomputation without method or layers",
        lambda a: a.recompute_granularity == "full" and (a.recompute_method is None or a.recompute_num_layers is None),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers, got {recompute_method} and "
        "{recompute_num_layers}",
    ),
    Refusal(
        "neither or both of train-iters and train-samples",
        lambda a: (a.train_iters is None) == (a.train_samples is None),
        "one of --train-iters and --train-samples must be given, got {train_iters} and {train_samples}",
        spoils=("train_iters", "train_samples"),
    ),
    Refusal(
        "two schedules of the batch size",
        lambda a: a.rampup_batch_size is not None and a.step_batch_size_schedule is not None,
        "--rampup-batch-size and --step-batch-size-schedule are two schedules; give one",
    ),
    Refusal(
        "schedule in samples with train-iters",
        lambda a: a.train_iters is not None and a.train_samples is None and _by_samples(a),
        "with --train-iters, give --lr-decay-iters, --lr-warmup-iters and --lr-wsd-decay-iters instead of samples",
    ),
    Refusal(
        "schedule in iterations with train-samples",
        lambda a: a.train_samples is not None and a.train_iters is None and _by_iterations(a),
        "with --train-samples, give --lr-decay-samples, --lr-warmup-samples and --lr-wsd-decay-samples instead of "
        "iterations",
    ),
    Refusal(
        "two warm-up lengths",
        lambda a: a.lr_warmup_fraction is not None and bool(a.lr_warmup_iters or a.lr_warmup_samples),
        "--lr-warmup-fraction and --lr-warmup-iters or --lr-warmup-samples are two warm-ups; give one",
    ),
    Refusal(
        "warm-up fraction out of range",
        lambda a: a.lr_warmup_fraction is not None and not 0 <= a.lr_warmup_fraction < 1,
        "--lr-warmup-fraction must be at least 0 and below 1, got {lr_warmup_fraction}",
    ),
    Refusal(
        "warm-up as long as the decay",
        lambda a: bool(a.lr_warmup_iters) and a.lr_warmup_iters >= (a.lr_decay_iters or a.train_iters or math.inf),
        "--lr-warmup-iters must be below --lr-decay-iters, or --train-iters where that is left out, got {lr_warmup_iters}, "
        "--lr-decay-iters {lr_decay_iters} and --train-iters {train_iters}",
    ),
    Refusal(
        "warm-up as long as the decay, in samples",
        lambda a: (
            bool(a.lr_warmup_samples) and a.lr_warmup_samples >= (a.lr_decay_samples or a.train_samples or math.inf)
        ),
        "--lr-warmup-samples must be below --lr-decay-samples, which is --train-samples where it is left out, got "
        "{lr_warmup_samples}, {lr_decay_samples} and {train_samples}",
    ),
    Refusal(
        "WSD without a decay length",
        lambda a: a.lr_decay_style == "WSD" and a.lr_wsd_decay_iters is None and a.lr_wsd_decay_samples is None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, got none",
    ),
    Refusal(
        "decoupled-min-lr without decoupled-lr",
        lambda a: a.decoupled_min_lr is not None and a.decoupled_lr is None,
        "--decoupled-min-lr needs --decoupled-lr, got none",
    ),
    Refusal(
        "growing weight decay without start or end",
        lambda a: (
            a.weight_decay_incr_style != "constant" and (a.start_weight_decay is None or a.end_weight_decay is None)
        ),
        "--weight-decay-incr-style {weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay",
    ),
    Refusal(
        "constant weight decay with start or end",
        lambda a: (
            a.weight_decay_incr_style == "constant"
            and (a.start_weight_decay is not None or a.end_weight_decay is not None)
        ),
        "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine, got constant",
    ),
    Refusal(
        "two sources of the schedule",
        lambda a: a.override_opt_param_scheduler and a.use_checkpoint_opt_param_scheduler,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; give one",
    ),
    Refusal(
        "sharding strategy without use-megatron-fsdp",
        lambda a: not a.use_megatron_fsdp and a.data_parallel_sharding_strategy not in ("no_shard", STRATEGIES[-1]),
        "--data-parallel-sharding-strategy {data_parallel_sharding_strategy} needs --use-megatron-fsdp",
    ),
    Refusal(
        "use-nccl-ub with another transport",
        lambda a: a.nccl_ub and a.fsdp_transport not in ("auto", "symm"),
        "--use-nccl-ub means --fsdp-transport symm, got {fsdp_transport}",
    ),
    Refusal(
        "use-symm-mem with another transport",
        lambda a: a.use_symm_mem and a.fsdp_transport not in ("auto", "symm"),
        "--use-symm-mem means --fsdp-transport symm, got {fsdp_transport}",
    ),
    Refusal(
        "symmetric memory with gloo",
        lambda a: (a.nccl_ub or a.use_symm_mem or a.fsdp_transport == "symm") and a.distributed_backend == "gloo",
        "--use-nccl-ub, --use-symm-mem and --fsdp-transport symm need NCCL, got --distributed-backend {distributed_backend}",
    ),
    Refusal(
        "a SHARP group without SHARP",
        lambda a: a.sharp_enabled_group is not None and not a.use_sharp,
        "--sharp-enabled-group {sharp_enabled_group} needs --use-sharp",
    ),
    Refusal(
        "SHARP for replicas that do not exist",
        lambda a: a.sharp_enabled_group == "dp_replica" and a.num_distributed_optimizer_instances == 1,
        "--sharp-enabled-group dp_replica needs --num-distributed-optimizer-instances above 1, got 1",
    ),
    Refusal(
        "NCCL settings with gloo",
        lambda a: (a.use_sharp or a.nccl_communicator_config_path is not None) and a.distributed_backend == "gloo",
        "--use-sharp and --nccl-communicator-config-path need NCCL, got --distributed-backend {distributed_backend}",
    ),
    Refusal(
        "gathers between captured iterations",
        lambda a: bool(a.fsdp_all_gather_in_start_param_sync) and captures_iterations(a),
        "--fsdp-all-gather-in-start-param-sync cannot be combined with --cuda-graph-impl full_iteration: nothing may be launched "
        "between captured iterations",
    ),
    Refusal(
        "optimizer on the host without adam",
        lambda a: a.optimizer_cpu_offload and a.optimizer != "adam",
        "--optimizer-cpu-offload needs --optimizer adam, got {optimizer}",
    ),
    Refusal(
        "offload fraction out of range",
        lambda a: not 0.0 <= a.optimizer_offload_fraction <= 1.0,
        "--optimizer-offload-fraction must be from 0 to 1, got {optimizer_offload_fraction}",
    ),
    Refusal(
        "fp16 with bf16",
        lambda a: a.fp16 and a.bf16,
        "--fp16 and --bf16 exclude each other; give one",
    ),
    Refusal(
        "fp16 with FP8",
        lambda a: a.fp16 and not a.bf16 and a.fp8_format is not None,
        "--fp8-format {fp8_format} goes with --bf16, got --fp16: what is not multiplied in FP8 is in bf16; leave out --fp16",
    ),
    Refusal(
        "precision-aware optimizer with sgd",
        lambda a: a.use_precision_aware_optimizer and a.optimizer != "adam",
        "--use-precision-aware-optimizer needs --optimizer adam, got {optimizer}",
    ),
    Refusal(
        "precision-aware optimizer without fp32 main weights",
        lambda a: a.use_precision_aware_optimizer and a.megatron_fsdp_main_params_dtype != "fp32",
        "--use-precision-aware-optimizer keeps fp32 main weights, got --megatron-fsdp-main-params-dtype "
        "{megatron_fsdp_main_params_dtype}",
    ),
    Refusal(
        "main-grads-dtype bf16 without bf16",
        lambda a: a.main_grads_dtype == "bf16" and not a.bf16,
        "--main-grads-dtype bf16 needs --bf16; in fp32 training use --megatron-fsdp-main-grads-dtype bf16",
    ),
    Refusal(
        "main-grads-dtype bf16 with gradients in fp32",
        lambda a: (
            a.main_grads_dtype == "bf16"
            and (a.accumulate_allreduce_grads_in_fp32 or a.megatron_fsdp_main_grads_dtype not in ("auto", "bf16"))
        ),
        "--main-grads-dtype bf16 excludes --accumulate-allreduce-grads-in-fp32, and another --megatron-fsdp-main-grads-dtype; "
        "give one of them",
    ),
    Refusal(
        "grad-reduce-in-bf16 without bf16",
        lambda a: a.grad_reduce_in_bf16 and not a.bf16,
        "--grad-reduce-in-bf16 needs --bf16; in fp32 training use --megatron-fsdp-grad-comm-dtype bf16",
    ),
    Refusal(
        "two gradient dtypes",
        lambda a: (
            a.accumulate_allreduce_grads_in_fp32
            and (a.grad_reduce_in_bf16 or _has_explicit_dtype(a, "bf16") or _has_explicit_dtype(a, "fp16"))
        ),
        "--accumulate-allreduce-grads-in-fp32 excludes --grad-reduce-in-bf16 and gradient dtypes other than fp32",
    ),
    Refusal(
        "no data",
        lambda a: _data_sources(a) == 0,
        "data must be given by --data-path, --train-data-path or --mock-data, got none",
    ),
    Refusal(
        "two data sources",
        lambda a: _data_sources(a) > 1,
        "--data-path and --train-data-path (with --valid-data-path and --test-data-path) exclude each other; give one",
    ),
    Refusal(
        "split with data paths of each split",
        lambda a: a.split is not None and not a.data_path and _data_sources(a) > 0 and not a.mock_data,
        "--split {split} belongs to --data-path; --train-data-path, --valid-data-path and --test-data-path are not split",
    ),
    Refusal(
        "a loader of one's own",
        lambda a: a.dataloader_type == "external",
        "--dataloader-type external means a loader that a script makes, and this one makes its own; use single or cyclic",
        spoils=("dataloader_type",),
    ),
    Refusal(
        "fill-in-the-middle samples of mock data",
        lambda a: a.fim_data and a.mock_data,
        "--fim-data cuts texts, got --mock-data, which are none; give --data-path",
    ),
    Refusal(
        "conversations without a tokenizer of conversations",
        lambda a: a.sft and a.tokenizer_type != "SFTTokenizer",
        "--sft needs --tokenizer-type SFTTokenizer, which knows how conversations become text, got {tokenizer_type}",
    ),
    Refusal(
        "conversations of mock data",
        lambda a: a.sft and a.mock_data,
        "--sft reads conversations from files, got --mock-data; give --data-path or --train-data-path, JSON lines with messages",
    ),
    Refusal(
        "conversations cut in three",
        lambda a: a.sft and a.fim_data,
        "--sft and --fim-data are two kinds of samples; give one",
    ),
    Refusal(
        "full validation of a blend by weights",
        lambda a: a.full_validation and (_has_weights(a.data_path) or _has_weights(a.valid_data_path, beyond=1)),
        "--full-validation reads each sample once, while a blend by weights repeats some; leave out the weights of the "
        "validation data, or give corpora of their own with --valid-data-path",
    ),
    Refusal(
        "validation sets with weights",
        lambda a: a.multiple_validation_sets and not a.full_validation and _has_weights(a.valid_data_path, beyond=1),
        "--multiple-validation-sets keeps the corpora of --valid-data-path apart; leave out their weights",
    ),
    Refusal(
        "names of validation sets that are not kept apart",
        lambda a: a.validation_set_names is not None and not a.multiple_validation_sets,
        "--validation-set-names needs --multiple-validation-sets, got none",
    ),
    Refusal(
        "another number of names than of validation sets",
        lambda a: (
            a.validation_set_names is not None
            and a.multiple_validation_sets
            and not _fit_validation_sets(a.validation_set_names, a.valid_data_path)
        ),
        "--validation-set-names must have as many names as --valid-data-path has corpora, all different, got {validation_set_names}",
    ),
    Refusal(
        "tokenizer without its model",
        lambda a: "tokenizer_model" in tokenizer_config(a).missing(),
        "--tokenizer-type {tokenizer_type} needs --tokenizer-model, got none",
    ),
    Refusal(
        "GPT2BPETokenizer without its files",
        lambda a: bool({"vocab_file", "merge_file"} & set(tokenizer_config(a).missing())),
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file, got {vocab_file} and {merge_file}",
    ),
    Refusal(
        "NullTokenizer without vocab-size",
        lambda a: "vocab_size" in tokenizer_config(a).missing(),
        "--tokenizer-type NullTokenizer needs --vocab-size, got none",
    ),
    Refusal(
        "negative num-workers",
        lambda a: a.num_workers < 0,
        "--num-workers must not be negative, got {num_workers}",
    ),
    Refusal(
        "save-interval below 1",
        lambda a: a.save_interval is not None and a.save_interval < 1,
        "--save-interval must be at least 1, got {save_interval}",
    ),
    Refusal(
        "save-retain-interval that save-interval does not divide",
        lambda a: (
            a.save_retain_interval is not None
            and (not a.save_interval or a.save_retain_interval < 1 or a.save_retain_interval % a.save_interval != 0)
        ),
        "--save-retain-interval must be a positive multiple of --save-interval, got {save_retain_interval} and {save_interval}",
    ),
    Refusal(
        "finetune with the checkpoint's schedule",
        lambda a: a.finetune and a.use_checkpoint_opt_param_scheduler,
        "--finetune starts a new schedule; leave out --use-checkpoint-opt-param-scheduler",
    ),
    Refusal(
        "two ways to divide a pattern",
        lambda a: (
            "|" in (a.hybrid_layer_pattern or "")
            and any(
                value is not None
                for value in (
                    a.pipeline_model_parallel_layout,
                    a.decoder_first_pipeline_num_layers,
                    a.decoder_last_pipeline_num_layers,
                    a.num_layers_per_virtual_pipeline_stage,
                    a.num_virtual_stages_per_pipeline_rank,
                )
            )
        ),
        "--hybrid-layer-pattern {hybrid_layer_pattern} says by | where pipeline stages end; leave out other flags of their layers",
    ),
    Refusal(
        "FP8 with local layers",
        lambda a: a.fp8_format is not None and a.transformer_impl == "local",
        "--fp8-format {fp8_format} needs layers of transformer-engine, got --transformer-impl local; leave one of the two out",
    ),
    Refusal(
        "FP8 with an odd number of tokens",
        lambda a: a.fp8_format is not None and _odd_in_fp8(a, a.micro_batch_size, a.seq_length),
        "--fp8-format {fp8_format} needs microbatches of a multiple of 16 tokens, and of 8 on each sequence-parallel rank, got"
        " --micro-batch-size {micro_batch_size} with --seq-length {seq_length}, --context-parallel-size {context_parallel_size}"
        " and --tensor-model-parallel-size {tensor_model_parallel_size}",
    ),
    Refusal(
        "FP8 with an odd number of tokens in evaluations",
        lambda a: (
            a.fp8_format is not None
            and a.eval_micro_batch_size is not None
            and _odd_in_fp8(a, a.eval_micro_batch_size, a.seq_length)
        ),
        "--fp8-format {fp8_format} needs microbatches of a multiple of 16 tokens, and of 8 on each sequence-parallel rank, got"
        " --eval-micro-batch-size {eval_micro_batch_size} with --seq-length {seq_length}, --context-parallel-size"
        " {context_parallel_size} and --tensor-model-parallel-size {tensor_model_parallel_size}",
    ),
    Refusal(
        "an overlap report beside another profile",
        lambda a: a.overlap_report is not None and a.profile,
        "--overlap-report records steps with torch's profiler, beside which no other can record; leave out --profile",
    ),
    Refusal(
        "the iteration of no overlap report",
        lambda a: a.overlap_report is None and a.overlap_report_step is not None,
        "--overlap-report-step {overlap_report_step} needs --overlap-report FOLDER; give it too",
    ),
    Refusal(
        "the tuner's settings without it",
        lambda a: a.fsdp_tune is None and (a.fsdp_tune_seconds is not None or bool(a.fsdp_tune_also)),
        "--fsdp-tune-seconds and --fsdp-tune-also need --fsdp-tune, got none; give it too",
    ),
    Refusal(
        "the tuner without training",
        lambda a: a.fsdp_tune is not None and a.skip_train,
        "--fsdp-tune measures training steps, got --skip-train; leave one of the two out",
    ),
    Refusal(
        "CUDA graph scope below the iteration",
        lambda a: a.cuda_graph_impl == "full_iteration" and a.cuda_graph_scope not in (None, ["full_iteration"]),
        "--cuda-graph-impl full_iteration captures the whole step, got --cuda-graph-scope {cuda_graph_scope}; leave it out",
    ),
    Refusal(
        "CUDA graph with gloo",
        lambda a: captures_iterations(a) and a.distributed_backend == "gloo",
        "a graph of the iteration needs CUDA devices, got --distributed-backend gloo; use --cuda-graph-impl none",
    ),
    Refusal(
        "CUDA graph with recomputed dropout",
        lambda a: (
            captures_iterations(a)
            and a.recompute_granularity is not None
            and (a.attention_dropout > 0 or a.hidden_dropout > 0)
        ),
        "recomputation under a CUDA graph cannot restore random numbers, got --recompute-granularity "
        "{recompute_granularity} with dropout; set --attention-dropout and --hidden-dropout to 0, or --cuda-graph-impl none",
    ),
    Refusal(
        "CUDA graph with sgd or muon",
        lambda a: captures_iterations(a) and a.optimizer != "adam",
        "in a CUDA graph the learning rate of --optimizer {optimizer} could not change; use adam, or --cuda-graph-impl none",
    ),
)

REFUSALS = CONTRADICTIONS + NOT_SERVED

SAID_BEFORE: tuple[tuple[str, str], ...] = (
    ("--fp16 and --bf16 exclude each other", "fp16 and bf16 exclude each other"),
    ("--fp8-format", "--fp8-format must go with --bf16"),
    ("--fp8-format", "--fp8-format must go with --transformer-impl"),
    ("--use-nccl-ub means", "--use-nccl-ub means"),
    ("--use-symm-mem means", "--use-symm-mem means"),
    ("--use-precision-aware-optimizer needs", "--use-precision-aware-optimizer must go with"),
    ("--optimizer-cpu-offload needs", "--optimizer-cpu-offload must go with"),
    ("--decoupled-min-lr needs", "--decoupled-min-lr needs"),
    ("--recompute-granularity full needs", "--recompute-granularity full must go with"),
    ("attention dropout with", "--attention-dropout must be 0 with --context-parallel-size"),
    ("query groups that", "--num-query-groups must be a multiple of --tensor-model-parallel-size"),
    ("--num-experts with", "--sequence-parallel must be on with experts"),
    ("--context-parallel-size above 1 with --exp", "--context-parallel-size must be 1 with --"),
    ("biases of shared experts", "--moe-shared-expert-intermediate-size must go with --disable-bias-linear"),
)
"""(opening of a fault of flags or of a row, opening of a component's message about the same or about what follows from it)."""
