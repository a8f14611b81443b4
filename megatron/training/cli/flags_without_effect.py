"""Flags that nothing reads where another is not given: a table, whose rows are among those of ``substitutions``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import gathers_always_overlap
from megatron.core.substitutions import Substitution, without_effect
from megatron.core.transformer.context_parallel import COMM_TYPES
from megatron.training.cli.flags_attention import YARN
from megatron.training.cli.flags_model import position_embedding_type
from megatron.training.cli.flags_tokenizer import tokenizer_config
from megatron.training.cli.flags_training import captures_iterations
from megatron.training.cli.served_flags import DEFAULTS, SPELLINGS


def _useless(names: str, needs: Callable[[Namespace], bool], words: str, **named: Any) -> list[Substitution]:
    """Return a row for each of these arguments, which have no effect where something else is not given.

    Args:
        named: see ``without_effect``.
    """
    defaults = {name: DEFAULTS[name] for name in names.split()}
    return without_effect(defaults, needs=needs, words=words, name_of=SPELLINGS.__getitem__, **named)


_ROTARY = "--position-embedding-type rope or yarn"


def _rotates(args: Namespace) -> bool:
    return position_embedding_type(args) in ("rope", "yarn") or args.multi_latent_attention


_OF_MUON = (
    "muon_momentum muon_nesterov muon_scale_mode muon_extra_scale_factor muon_fp32_matmul_prec muon_coefficient_type "
    "muon_num_ns_steps muon_tp_mode muon_split_qkv"
)


def _is_decay(value: float) -> bool:
    return 0.0 <= value < 1.0


_LAWFUL_OF_MUON = {"muon_momentum": _is_decay, "muon_num_ns_steps": lambda value: value >= 1}
_MUON = "--optimizer muon"


def _is_muon(args: Namespace) -> bool:
    return args.optimizer in ("muon", "dist_muon")


def _has_virtual_stages(args: Namespace) -> bool:
    return bool(
        args.num_layers_per_virtual_pipeline_stage
        or args.num_virtual_stages_per_pipeline_rank
        or args.pipeline_model_parallel_layout
    )


def _tokenizers(*kinds: str) -> Callable[[Namespace], bool]:
    """Return what tells whether the tokenizer is one of these."""
    return lambda args: tokenizer_config(args).kind in kinds


def _gathers_ahead(args: Namespace) -> bool:
    always = args.use_megatron_fsdp and gathers_always_overlap(args.data_parallel_sharding_strategy)
    return (args.overlap_param_gather or always) and not args.no_overlap_param_gather


def _gathers_weights(args: Namespace) -> bool:
    # Settings that are not those of a launch have no number of ranks.
    shards = args.use_megatron_fsdp and args.data_parallel_sharding_strategy == "optim_grads_params"
    return shards and getattr(args, "world_size", None) != 1


WITHOUT_EFFECT: tuple[Substitution, ...] = (
    *_useless("cuda_graph_warmup_steps", captures_iterations, "--cuda-graph-impl full_iteration"),
    *_useless("torch_fsdp2_reshard_after_forward", lambda a: a.use_torch_fsdp2, "--use-torch-fsdp2"),
    *_useless(
        "outer_dp_sharding_strategy",
        lambda a: a.num_distributed_optimizer_instances != 1,
        "--num-distributed-optimizer-instances above 1",
    ),
    *_useless(
        "fsdp_memory_budget",
        _gathers_weights,
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params on several ranks: no weights are gathered twice",
        choices={"fsdp_memory_budget": lambda size: size > 0 and (size < 1 or isinstance(size, int))},
    ),
    *_useless(
        "suggested_communication_unit_size",
        lambda a: _gathers_ahead(a) or a.fsdp_tune is not None,
        "--overlap-param-gather",
        choices={"suggested_communication_unit_size": lambda size: size >= 1},
    ),
    *_useless(
        "overlap_param_gather no_overlap_param_gather",
        lambda a: a.use_megatron_fsdp or a.use_distributed_optimizer,
        "--use-megatron-fsdp or --use-distributed-optimizer: nothing is gathered",
    ),
    *_useless(
        "data_sharding",
        lambda a: a.dataloader_type == "cyclic",
        "--dataloader-type cyclic: ranks draw from all data in one order",
    ),
    *_useless(
        "use_precision_aware_optimizer",
        lambda a: a.bf16 or {a.exp_avg_dtype, a.exp_avg_sq_dtype} != {"fp32"},
        "--bf16 or --exp-avg-dtype: main weights are those of the model",
    ),
    Substitution(
        lambda a: (
            (a.microbatch_group_size_per_vp_stage or 0) >= a.pipeline_model_parallel_size and not _has_virtual_stages(a)
        ),
        "--microbatch-group-size-per-virtual-pipeline-stage has no effect without virtual pipeline stages",
        {"microbatch_group_size_per_vp_stage": None},
    ),
    *_useless("moe_token_dispatcher_type", lambda a: a.num_experts is not None, "--num-experts"),
    *_useless(
        "moe_expert_rank_capacity_factor",
        # On one rank it says that the host is not to wait for counts of rows, which grouped kernels alone can do without.
        lambda a: a.expert_model_parallel_size != 1 or a.moe_grouped_gemm,
        "--expert-model-parallel-size above 1, or --moe-grouped-gemm",
        choices={"moe_expert_rank_capacity_factor": lambda factor: factor > 0.0},
    ),
    *_useless(
        "cp_comm_type",
        lambda a: a.context_parallel_size != 1,
        "--context-parallel-size above 1",
        choices={"cp_comm_type": lambda types: {*types} <= {*COMM_TYPES}},
    ),
    *_useless(
        "overlap_p2p_comm",
        _has_virtual_stages,
        "virtual pipeline stages: there is nothing to wait for meanwhile",
    ),
    *_useless(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split use_tp_pp_dp_mapping",
        lambda a: a.pipeline_model_parallel_size != 1,
        "--pipeline-model-parallel-size above 1",
    ),
    *_useless(
        "bias_gelu_fusion",
        lambda a: not a.swiglu and not a.squared_relu and (a.add_bias_linear or a.geglu or a.quick_geglu),
        "GELU with a bias or a gate",
    ),
    *_useless("bias_swiglu_fusion", lambda a: a.swiglu, "--swiglu"),
    *_useless("apply_rope_fusion", _rotates, _ROTARY),
    *_useless(
        "make_vocab_size_divisible_by",
        lambda a: a.pad_vocab_size and a.padded_vocab_size is None,
        "padding that is computed, and with --padded-vocab-size or --no-pad-vocab-size none is",
        choices={"make_vocab_size_divisible_by": lambda multiple: multiple >= 1},
    ),
    *_useless(_OF_MUON, _is_muon, _MUON, choices=_LAWFUL_OF_MUON),
    *_useless(
        "adam_beta1 adam_beta2 adam_eps",
        lambda a: a.optimizer != "sgd",
        "--optimizer adam or muon",
        choices={"adam_beta1": _is_decay, "adam_beta2": _is_decay, "adam_eps": lambda value: value >= 0.0},
    ),
    *_useless(
        "sgd_momentum",
        lambda a: a.optimizer == "sgd",
        "--optimizer sgd",
        choices={"sgd_momentum": _is_decay},
    ),
    *_useless(
        "apply_wd_to_qk_layernorm no_weight_decay_cond_type",
        lambda a: a.qk_layernorm,
        "--qk-layernorm",
    ),
    *_useless("num_query_groups", lambda a: a.group_query_attention, "--group-query-attention"),
    *_useless(
        "rotary_base rotary_percent rotary_interleaved no_rope_freq",
        _rotates,
        _ROTARY,
    ),
    *_useless("window_rotary_base", lambda a: _rotates(a) or a.window_size is None, _ROTARY),
    *_useless(
        "use_rope_scaling rotary_seq_len_interpolation_factor",
        lambda a: position_embedding_type(a) == "rope" or a.multi_latent_attention,
        "--position-embedding-type rope",
    ),
    *_useless(
        "reset_position_ids",
        lambda a: position_embedding_type(a) == "learned_absolute",
        "learned positions: rotary ones say how far tokens are apart",
    ),
    *_useless(
        " ".join(YARN),
        lambda a: position_embedding_type(a) == "yarn" and not a.multi_latent_attention,
        "--position-embedding-type yarn",
    ),
    *_useless(
        "kv_channels use_rope_scaling rotary_seq_len_interpolation_factor",
        lambda a: not a.multi_latent_attention,
        "heads of one width: --multi-latent-attention has widths and rotary frequencies of its own",
    ),
    *_useless(
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim original_max_position_embeddings beta_fast beta_slow",
        lambda a: a.multi_latent_attention,
        "--multi-latent-attention",
    ),
    *_useless(
        "rotary_scaling_factor mscale mscale_all_dim",
        lambda a: a.multi_latent_attention or position_embedding_type(a) == "yarn",
        "--multi-latent-attention or --position-embedding-type yarn",
    ),
    *_useless(
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token "
        "fim_pad_token fim_eod_token",
        lambda a: a.fim_data,
        "--fim-data",
    ),
    *_useless("rope_scaling_factor", lambda a: a.use_rope_scaling, "--use-rope-scaling"),
    *_useless(
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style",
        lambda a: a.lr_decay_style == "WSD",
        "--lr-decay-style WSD",
    ),
    *_useless(
        "save_interval save_retain_interval async_save no_save_optim no_save_rng log_progress",
        lambda a: a.save is not None,
        "--save",
    ),
    *_useless(
        "finetune no_load_optim no_load_rng exit_on_missing_checkpoint "
        "use_checkpoint_opt_param_scheduler ckpt_step no_verify_checkpoint",
        lambda a: a.load is not None,
        "--load",
    ),
    *_useless(
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args",
        lambda a: a.use_checkpoint_args,
        "--use-checkpoint-args",
    ),
    *_useless(
        "mmap_bin_files allow_gaps_in_corpora",
        lambda a: not a.mock_data,
        "data paths, and with --mock-data there are none",
    ),
    *_useless("tiktoken_pattern tiktoken_num_special_tokens", _tokenizers("TikTokenizer"), "TikTokenizer"),
    *_useless("null_tokenizer_eod_id null_tokenizer_pad_id", _tokenizers("NullTokenizer"), "NullTokenizer"),
    *_useless("sft_tokenizer_prompt_format", _tokenizers("SFTTokenizer"), "SFTTokenizer"),
    *_useless("tokenizer_hf_no_include_special_tokens", _tokenizers("HuggingFaceTokenizer"), "HuggingFaceTokenizer"),
    *_useless(
        "special_tokens",
        _tokenizers("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"),
        "HuggingFaceTokenizer, GPT2BPETokenizer or TikTokenizer",
    ),
    *_useless("manual_gc_eval", lambda a: a.manual_gc, "--manual-gc"),
    *_useless("timing_log_option", lambda a: a.timing_log_level > 0, "--timing-log-level above 0"),
    *_useless(
        "profile_step_end profile_ranks",
        lambda a: a.profile or a.record_memory_history,
        "--profile or --record-memory-history",
    ),
    *_useless("profile_step_start use_pytorch_profiler", lambda a: a.profile, "--profile"),
    *_useless(
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra",
        lambda a: a.profile and a.use_pytorch_profiler,
        "--profile --use-pytorch-profiler",
    ),
    *_useless("record_shapes", lambda a: a.profile, "--profile"),
    *_useless(
        "nvtx_ranges",
        lambda a: a.profile and not a.use_pytorch_profiler,
        "--profile for an nsys, that is, without --use-pytorch-profiler",
    ),
    *_useless("memory_snapshot_path", lambda a: a.record_memory_history, "--record-memory-history"),
    *_useless("tensorboard_queue_size", lambda a: bool(a.tensorboard_dir), "--tensorboard-dir"),
    *_useless(
        "wandb_entity wandb_save_dir",
        lambda a: bool(a.wandb_project),
        "--wandb-project",
    ),
    *_useless(
        "wandb_exp_name",
        lambda a: bool(a.wandb_project or a.status_page or a.prometheus_file),
        "--wandb-project, --status-page or --prometheus-file",
    ),
    *_useless(
        "log_timers_to_tensorboard log_memory_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_world_size_to_tensorboard log_loss_scale_to_tensorboard tensorboard_log_interval",
        lambda a: bool(a.tensorboard_dir or a.wandb_project),
        "--tensorboard-dir or --wandb-project",
    ),
)
