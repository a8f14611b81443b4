"""Muon for the matrices of a model: which parameters are such matrices, and how queries, keys and values lie in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.distributed.fsdp import FlatMuon, group_of
from megatron.core.optimizer.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

Named = Iterable[tuple[str, torch.nn.Parameter]]


def get_megatron_muon_optimizer(
    config: OptimizerConfig, *others: Any, layer_wise_distributed_optimizer: bool = False, **further: Any
) -> MegatronOptimizer:
    """Return the optimizer of ``get_megatron_optimizer``, which has Muon where ``config.optimizer`` says so.

    Args:
        others, further: its further arguments.
        layer_wise_distributed_optimizer: accepted; the engine divides the work of sharded matrices among ranks.
    """
    from megatron.core.optimizer.optimizer import get_megatron_optimizer  # which imports this module

    return get_megatron_optimizer(config, *others, **further)


def uses_muon(parameter: torch.Tensor) -> bool:
    """Return whether Muon updates the parameter, and not AdamW.

    It must have two dimensions, and be neither word embedding nor output layer; ``use_muon=False`` on a parameter leaves it
    out.

    Source: Megatron-Core's rule.
    """
    is_table = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() == 2 and not is_table and bool(getattr(parameter, "use_muon", True))


def flat_muon(config: OptimizerConfig, groups: list[dict[str, Any]], named: Named, model_config: Any) -> FlatMuon:
    """Build the optimizer.

    Args:
        groups: param groups, with ``use_muon``.
        named: the names of the model's parameters.
        model_config: the ``TransformerConfig`` of the model; None where there is none.

    Raises:
        ValueError: a parameter is not sharded by the engine.

    Ranks: all that hold the parameters.
    """
    params = [param for group in groups for param in group["params"]]
    if not FlatMuon.serves(params):
        raise ValueError(
            "optimizer muon needs a model whose parameters are all sharded by the engine, got others; wrap it with "
            "FullyShardedDataParallel (any strategy, no_shard too)"
        )
    return FlatMuon(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        coefficient_type=config.muon_coefficient_type,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,  # type: ignore[arg-type]
        extra_scale_factor=config.muon_extra_scale_factor,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        tp_mode=config.muon_tp_mode,  # type: ignore[arg-type]
        row_blocks_of=_qkv_blocks(named, model_config) if config.muon_split_qkv else None,
        overlaps_forward=config.overlap_update_with_forward,
    )


def _qkv_blocks(named: Named, model_config: Any) -> Callable[[torch.Tensor], Sequence[int] | None]:
    """Return which parameters hold queries, keys and values, with the rows of each for a group of heads.

    Where tensor-parallel ranks hold parts of a group of heads, the parameter is one matrix, as in Megatron-Core.
    """
    heights: dict[torch.Tensor, list[int]] = {}
    for name, parameter in named:
        if name.endswith("linear_qkv.weight") and uses_muon(parameter) and parameter.requires_grad:
            blocks = _heights(model_config)
            if _rows_here(parameter) % sum(blocks) == 0:
                heights[parameter] = blocks
    return heights.get


def _heights(config: Any) -> list[int]:
    """Return the rows of queries (twice, with an output gate), keys and values of a group of heads."""
    groups = config.num_query_groups or config.num_attention_heads
    channels = config.kv_channels or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads // groups * channels
    return [queries] * (2 if getattr(config, "attention_output_gate", False) else 1) + [channels, channels]


def _rows_here(parameter: torch.Tensor) -> int:
    """Return the rows of this rank's tensor-parallel part."""
    group = group_of(parameter)
    assert group is not None, "checked before"
    pairs = zip(group.sharded, group.unsharded, strict=True)
    return next(unsharded.shape[0] for sharded, unsharded in pairs if sharded is parameter)
