"""Flags in effect whose values are taken as others, since the results are the same or Megatron-LM ignores them: one table.

Rank 0 says once what is taken instead.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.cli.flags_attention import YARN
from megatron.training.cli.flags_data import FIM_TOKENS
from megatron.training.cli.flags_experts import DEFAULTS_OF_EXPERTS
from megatron.training.cli.flags_graphs import captures_iterations
from megatron.training.cli.flags_loss_scale import LOSS_SCALING, scales_dynamically
from megatron.training.cli.flags_mla import DEFAULTS_OF_MLA
from megatron.training.cli.flags_model import position_embedding_type
from megatron.training.cli.flags_offload import ACTIVATION_OFFLOAD, OPTIMIZER_OFFLOAD


@dataclass(frozen=True)
class Substitution:
    """Values of flags that are taken as others."""

    when: Callable[[Namespace], bool]
    said: str
    """What rank 0 says; formatted with the values of the flags."""

    takes: Mapping[str, Any] | Callable[[Namespace], Mapping[str, Any]]
    """The values that are taken, by setting."""


_OF_ANY_YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
"""Flags of YaRN in multi-latent and in other attention."""


def substitute(args: Namespace, malformed: frozenset[str] = frozenset()) -> list[str]:
    """Change the settings as the table says, and return what is to be said.

    Args:
        malformed: names of settings that ``args`` lacks; rows that read one are left out.
    """
    said = []
    for row in SUBSTITUTIONS:
        if holds(row.when, args, malformed):
            said.append(row.said.format(**vars(args)))
            takes = row.takes(args) if callable(row.takes) else row.takes
            vars(args).update({name: value for name, value in takes.items() if name not in malformed})
    return said


def holds(condition: Callable[[Namespace], bool], args: Namespace, malformed: frozenset[str]) -> bool:
    """Evaluate a condition; False if it reads a setting that ``args`` lacks."""
    try:
        return bool(condition(args))
    except AttributeError as error:
        if error.name not in malformed:
            raise
        return False


def _useless(dests: Mapping[str, Any], needs: Callable[[Namespace], bool], flag: str) -> list[Substitution]:
    """Return a row for each setting that has no effect where something else is not given."""
    return [
        Substitution(
            lambda a, dest=dest, off=off: not needs(a) and getattr(a, dest) != off,  # type: ignore[misc]
            f"{_flag_of(dest)} has no effect without {flag}",
            {dest: off},
        )
        for dest, off in dests.items()
    ]


def _flag_of(dest: str) -> str:
    return _OTHER_NAMES.get(dest) or f"--{dest.replace('_', '-')}"


_OTHER_NAMES = {
    "pin_cpu_grads": "--no-pin-cpu-grads",
    "pin_cpu_params": "--no-pin-cpu-params",
    "moe_router_load_balancing_type": "--moe-router-load-balancing-type",
}


def _renamed(names: Sequence[str], others: Mapping[str, str]) -> list[str]:
    """Rename some of the names; those without another name are left out, and each comes once."""
    return [name for name in dict.fromkeys(others.get(name, name) for name in names) if name]


def _num_groups(args: Namespace) -> int:
    """Return the number of key and value heads; 1 where it is not given."""
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads or 1)


def _without_training(args: Namespace) -> dict[str, Any]:
    """Return the settings of a run that only evaluates; a length and a rate need not be given."""
    settings: dict[str, Any] = {
        "save": None,
        "no_load_optim": True,
        "no_load_rng": True,
        "override_opt_param_scheduler": True,
        "use_checkpoint_opt_param_scheduler": False,
    }
    if getattr(args, "lr", 0.0) is None:
        settings["lr"] = 0.0
    if getattr(args, "train_iters", 0) is None and getattr(args, "train_samples", 0) is None:
        settings["train_iters"] = 1
    return settings


def _recomputes(args: Namespace, module: str) -> bool:
    return args.recompute_modules is not None and module in args.recompute_modules


def _layer_graphs(args: Namespace) -> bool:
    given = args.cuda_graph_impl != "none" or args.cuda_graph_scope is not None
    return given and args.cuda_graph_impl != "full_iteration" and not captures_iterations(args)


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        lambda a: (
            a.skip_train and any(getattr(a, name, value) != value for name, value in _without_training(a).items())
        ),
        "--skip-train: nothing is trained or saved; of a checkpoint the weights and the counters are loaded",
        lambda a: _without_training(a),
    ),
    Substitution(
        lambda a: a.ckpt_format in ("torch", "torch_dcp"),
        "--ckpt-format {ckpt_format}: checkpoints are saved as PyTorch DCP directories, which any number of ranks can load",
        {"ckpt_format": None},
    ),
    Substitution(
        lambda a: a.use_torch_fsdp2 and not a.torch_fsdp2_reshard_after_forward,
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward is taken as --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads",
        {
            "use_torch_fsdp2": False,
            "torch_fsdp2_reshard_after_forward": True,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    Substitution(
        lambda a: a.use_torch_fsdp2,
        "--use-torch-fsdp2 is taken as --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        {
            "use_torch_fsdp2": False,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    ),
    Substitution(
        lambda a: (
            a.use_megatron_fsdp and a.use_distributed_optimizer and a.data_parallel_sharding_strategy == "no_shard"
        ),
        "--use-distributed-optimizer has no effect with --use-megatron-fsdp --data-parallel-sharding-strategy no_shard, which "
        "says that nothing is sharded",
        {"use_distributed_optimizer": False},
    ),
    Substitution(
        lambda a: a.num_experts is not None and a.moe_token_dispatcher_type == "flex",
        "--moe-token-dispatcher-type flex is taken as alltoall: tokens go to their experts by one all-to-all",
        {"moe_token_dispatcher_type": "alltoall"},
    ),
    Substitution(
        lambda a: (
            a.num_experts is not None
            and a.expert_model_parallel_size > 1
            and a.moe_token_dispatcher_type == "allgather"
        ),
        "--moe-token-dispatcher-type allgather is taken as alltoall: only the tokens of an expert travel to it, and the numbers "
        "are the same",
        {"moe_token_dispatcher_type": "alltoall"},
    ),
    Substitution(
        lambda a: a.fp8_format is not None and not a.bf16 and not a.fp16,
        "--fp8-format {fp8_format} is taken with --bf16: what is not multiplied in FP8 is in bf16, and main weights are in fp32",
        {"bf16": True},
    ),
    Substitution(
        lambda a: a.moe_router_pre_softmax and a.moe_router_score_function != "softmax",
        "--moe-router-pre-softmax has no effect with --moe-router-score-function {moe_router_score_function}: scores are made "
        "before the choice",
        {"moe_router_pre_softmax": False},
    ),
    Substitution(
        lambda a: not a.moe_router_enable_expert_bias and a.moe_router_bias_update_rate != 1e-3,
        "--moe-router-bias-update-rate has no effect without --moe-router-enable-expert-bias",
        {"moe_router_bias_update_rate": 1e-3},
    ),
    Substitution(
        lambda a: a.moe_router_num_groups is not None and a.moe_router_group_topk is None,
        "--moe-router-num-groups has no effect without --moe-router-group-topk",
        {"moe_router_num_groups": None},
    ),
    *_useless(DEFAULTS_OF_EXPERTS, lambda a: a.num_experts is not None, "--num-experts"),
    Substitution(
        lambda a: a.cp_comm_type == ["a2a+p2p"],
        "--cp-comm-type a2a+p2p is taken as p2p: keys and values go round one ring, and the numbers are the same",
        {"cp_comm_type": ["p2p"]},
    ),
    Substitution(
        lambda a: (
            a.context_parallel_size > 1
            and a.attention_dropout > 0.0
            and a.cp_comm_type != ["a2a"]
            and _num_groups(a) % (a.context_parallel_size * a.tensor_model_parallel_size) == 0
        ),
        "--cp-comm-type {cp_comm_type} is taken as a2a: with --attention-dropout, attention is over whole sequences, of some heads",
        {"cp_comm_type": ["a2a"]},
    ),
    Substitution(
        _layer_graphs,
        "--cuda-graph-impl {cuda_graph_impl} is taken as none: layers are not captured one by one; full_iteration captures the "
        "whole step",
        {"cuda_graph_impl": "none", "cuda_graph_scope": None},
    ),
    *_useless({"cuda_graph_warmup_steps": 3}, captures_iterations, "--cuda-graph-impl full_iteration"),
    *_useless(
        {"recompute_method": None, "recompute_num_layers": None},
        lambda a: a.recompute_granularity == "full",
        "--recompute-granularity full",
    ),
    *_useless(
        {"recompute_modules": None},
        lambda a: a.recompute_granularity == "selective",
        "--recompute-granularity selective",
    ),
    *_useless(
        {
            "fp8_recipe": "delayed",
            "fp8_margin": 0,
            "fp8_amax_history_len": 1,
            "fp8_amax_compute_algo": "most_recent",
            "fp8_dot_product_attention": False,
            "fp8_multi_head_attention": False,
            "tp_only_amax_red": False,
            "use_transformer_engine_op_fuser": False,
            "activation_func_fp8_input_store": False,
            "first_last_layers_bf16": False,
        },
        lambda a: a.fp8_format is not None,
        "--fp8-format",
    ),
    Substitution(
        lambda a: a.use_transformer_engine_op_fuser and a.num_experts is not None,
        "--use-transformer-engine-op-fuser has no effect with --num-experts: experts' activations are not written in FP8",
        {"use_transformer_engine_op_fuser": False},
    ),
    Substitution(
        lambda a: a.recompute_modules is not None and bool({"moe_act", "shared_experts"} & set(a.recompute_modules)),
        "--recompute-modules {recompute_modules}: moe_act and shared_experts are taken as moe, all of which is recomputed",
        lambda a: {"recompute_modules": _renamed(a.recompute_modules, {"moe_act": "moe", "shared_experts": "moe"})},
    ),
    Substitution(
        lambda a: _recomputes(a, "layernorm"),
        "--recompute-modules layernorm: outputs of norms are kept",
        lambda a: {"recompute_modules": _renamed(a.recompute_modules, {"layernorm": ""})},
    ),
    Substitution(
        lambda a: _recomputes(a, "mla_up_proj") and not a.multi_latent_attention,
        "--recompute-modules mla_up_proj: there is none without --multi-latent-attention",
        lambda a: {"recompute_modules": _renamed(a.recompute_modules, {"mla_up_proj": ""})},
    ),
    *_useless(
        {
            "mup_base_hidden_size": None,
            "mup_embedding_mult": 1.0,
            "mup_output_mult": 1.0,
            "mup_base_head_dim": None,
            "mup_attn_scale_power": 1.0,
        },
        lambda a: a.use_mup,
        "--use-mup",
    ),
    Substitution(
        lambda a: a.mock_data and bool(a.data_path or a.train_data_path or a.valid_data_path or a.test_data_path),
        "data paths have no effect with --mock-data",
        {"data_path": None, "train_data_path": None, "valid_data_path": None, "test_data_path": None},
    ),
    Substitution(
        lambda a: a.cross_entropy_fusion_impl == "te",
        "--cross-entropy-fusion-impl te is taken as native, the fused cross entropy that is here",
        {"cross_entropy_fusion_impl": "native"},
    ),
    Substitution(
        lambda a: scales_dynamically(a) and a.check_for_nan_in_loss_and_grad,
        "--fp16 is taken with --no-check-for-nan-in-loss-and-grad: the loss scale follows overflows of gradients",
        {"check_for_nan_in_loss_and_grad": False},
    ),
    Substitution(
        lambda a: (
            a.optimizer_cpu_offload
            and a.bf16
            and not a.use_precision_aware_optimizer
            and a.megatron_fsdp_main_params_dtype == "fp32"
        ),
        "--optimizer-cpu-offload is taken with --use-precision-aware-optimizer: the device has weights in bf16 alone",
        {"use_precision_aware_optimizer": True},
    ),
    *_useless(OPTIMIZER_OFFLOAD, lambda a: a.optimizer_cpu_offload, "--optimizer-cpu-offload"),
    *_useless(
        ACTIVATION_OFFLOAD, lambda a: a.fine_grained_activation_offloading, "--fine-grained-activation-offloading"
    ),
    *_useless(LOSS_SCALING, scales_dynamically, "--fp16, or with --loss-scale, which is constant"),
    *_useless({"num_query_groups": 1}, lambda a: a.group_query_attention, "--group-query-attention"),
    *_useless(
        {
            "rotary_base": 10000,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
        },
        lambda a: position_embedding_type(a) in ("rope", "yarn") or a.multi_latent_attention,
        "--position-embedding-type rope or yarn",
    ),
    *_useless(
        {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None},
        lambda a: position_embedding_type(a) == "rope" or a.multi_latent_attention,
        "--position-embedding-type rope",
    ),
    *_useless(
        {"reset_position_ids": False},
        lambda a: position_embedding_type(a) == "learned_absolute",
        "learned positions: rotary ones say how far tokens are apart",
    ),
    *_useless(
        YARN,
        lambda a: position_embedding_type(a) == "yarn" and not a.multi_latent_attention,
        "--position-embedding-type yarn",
    ),
    *_useless(
        {"kv_channels": None, "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None},
        lambda a: not a.multi_latent_attention,
        "heads of one width: --multi-latent-attention has widths and rotary frequencies of its own",
    ),
    *_useless(
        {name: default for name, default in DEFAULTS_OF_MLA.items() if name not in _OF_ANY_YARN},
        lambda a: a.multi_latent_attention,
        "--multi-latent-attention",
    ),
    *_useless(
        {name: DEFAULTS_OF_MLA[name] for name in _OF_ANY_YARN},
        lambda a: a.multi_latent_attention or position_embedding_type(a) == "yarn",
        "--multi-latent-attention or --position-embedding-type yarn",
    ),
    *_useless(
        {
            "fim_rate": 0.5,
            "fim_spm_rate": 0.5,
            "fim_split_sample": None,
            "fim_fragment_rate": None,
            "fim_no_prefix": None,
            **{f"fim_{name}_token": token for name, token in FIM_TOKENS.items()},
        },
        lambda a: a.fim_data,
        "--fim-data",
    ),
    *_useless({"rope_scaling_factor": 8.0}, lambda a: a.use_rope_scaling, "--use-rope-scaling"),
    *_useless(
        {"lr_wsd_decay_iters": None, "lr_wsd_decay_samples": None, "lr_wsd_decay_style": "exponential"},
        lambda a: a.lr_decay_style == "WSD",
        "--lr-decay-style WSD",
    ),
    *_useless(
        {
            "save_interval": None,
            "save_retain_interval": None,
            "async_save": False,
            "no_save_optim": False,
            "no_save_rng": False,
            "log_progress": False,
        },
        lambda a: a.save is not None,
        "--save",
    ),
    *_useless(
        {
            "finetune": False,
            "no_load_optim": False,
            "no_load_rng": False,
            "exit_on_missing_checkpoint": False,
            "use_checkpoint_opt_param_scheduler": False,
            "ckpt_step": None,
        },
        lambda a: a.load is not None,
        "--load",
    ),
    *_useless(
        {"wandb_entity": "", "wandb_exp_name": "", "wandb_save_dir": ""},
        lambda a: bool(a.wandb_project),
        "--wandb-project",
    ),
    *_useless(
        {
            "log_timers_to_tensorboard": False,
            "log_memory_to_tensorboard": False,
            "log_validation_ppl_to_tensorboard": False,
            "log_world_size_to_tensorboard": False,
        },
        lambda a: bool(a.tensorboard_dir or a.wandb_project),
        "--tensorboard-dir or --wandb-project",
    ),
)
