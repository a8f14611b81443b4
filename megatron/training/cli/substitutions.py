"""Flags in effect whose values are taken as others, since the results are the same or Megatron-LM ignores them: one table.

Rank 0 says once what is taken instead. What is said of the fields of configurations is in their own tables (``substitutions`` of
each), and what is said of flags that nothing reads in ``flags_without_effect``; both are part of this one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.substitutions import Substitution
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.cli.flags_training import captures_iterations, scales_dynamically
from megatron.training.cli.flags_without_effect import WITHOUT_EFFECT

_OF_DOCUMENTS = {
    "reset_position_ids": "positions begin anew in each conversation",
    "reset_attention_mask": "tokens attend within their own conversation",
    "dataloader_inter_document_masking": "tokens attend within their own conversation",
    "eod_mask_loss": "what the assistant says is in the loss with its end",
    "allow_ambiguous_pad_tokens": "padding is never in the loss",
}
"""Flags of corpora of documents that conversations do without, and why."""

DESTS = {
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
    "fp8_param": "fp8_param_gather",
}
"""Fields whose flags set something of another name."""


def substitute(args: Namespace, malformed: frozenset[str] = frozenset()) -> list[str]:
    """Change the settings as the table says, and return what is to be said, which may name fields.

    Args:
        malformed: names of settings that ``args`` lacks; rows that read one are left out.
    """
    said = []
    for row in SUBSTITUTIONS:
        if holds(row.when, args, malformed):
            said.append(row.text(args))
            taken = row.values(args)
            vars(args).update({name: value for name, value in taken.items() if name not in malformed})
    return said


def holds(condition: Callable[[Namespace], bool], args: Namespace, malformed: frozenset[str]) -> bool:
    """Evaluate a condition; False if it reads a setting that ``args`` lacks, or divides by a degree of 0, which components refuse."""
    try:
        return bool(condition(args))
    except ZeroDivisionError:
        return False
    except AttributeError as error:
        if error.name not in malformed:
            raise
        return False


class _Fields:
    """Settings of the command line under the names of fields."""

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, DESTS.get(name, name))

    @property
    def num_query_groups(self) -> int | None:
        return self._args.num_query_groups if self._args.group_query_attention else None

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._args.bf16 else torch.float32


class _OfFields(Substitution):
    """A row about fields, for the command line."""

    def text(self, settings: Any) -> str:
        return super().text(_Fields(settings))

    def values(self, settings: Any) -> dict[str, Any]:
        taken = {DESTS.get(name, name): value for name, value in super().values(_Fields(settings)).items()}
        return {name: value for name, value in taken.items() if name != "params_dtype"}


def _of_fields(kind: type[TransformerConfig | OptimizerConfig | DistributedDataParallelConfig]) -> list[Substitution]:
    return [
        _OfFields(lambda a, when=row.when: when(_Fields(a)), row.said, row.takes)  # type: ignore[misc]
        for row in kind.substitutions
    ]


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
        lambda a: a.hybrid_layer_pattern is not None and a.ckpt_format is not None,
        "--ckpt-format {ckpt_format}: checkpoints of hybrid models are saved as PyTorch DCP directories, under our names",
        {"ckpt_format": None},
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
    *_of_fields(TransformerConfig),
    Substitution(
        _layer_graphs,
        "--cuda-graph-impl {cuda_graph_impl} is taken as none: layers are not captured one by one; full_iteration captures the "
        "whole step",
        {"cuda_graph_impl": "none", "cuda_graph_scope": None},
    ),
    *(
        Substitution(
            lambda a, dest=dest: a.sft and getattr(a, dest),  # type: ignore[misc]
            f"--{dest.replace('_', '-')} has no effect with --sft: {words}",
            {dest: False},
        )
        for dest, words in _OF_DOCUMENTS.items()
    ),
    Substitution(
        lambda a: a.mock_data and bool(a.data_path or a.train_data_path or a.valid_data_path or a.test_data_path),
        "data paths have no effect with --mock-data",
        {"data_path": None, "train_data_path": None, "valid_data_path": None, "test_data_path": None},
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
    *_of_fields(OptimizerConfig),
    *_of_fields(DistributedDataParallelConfig),
    *WITHOUT_EFFECT,
)
