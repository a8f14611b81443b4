"""Megatron-Core's data parallelism with whole weights, on the sharding engine: its strategies ``no_shard`` and ``optim``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class DistributedDataParallel(FullyShardedDataParallel):
    """A model whose gradients are averaged over the data-parallel ranks; weights are whole on each.

    With ``ddp_config.use_distributed_optimizer`` the optimizer state is sharded. Gradients are in ``param.grad`` after
    ``finish_grad_sync``, in the dtype of the main weights; parameters are DTensors of the main weights.

    Args:
        config, ddp_config, module, disable_bucketing, pg_collection: as for ``FullyShardedDataParallel``.
        full_param_layout: must be None.

    Raises:
        ValueError: ``ddp_config.use_megatron_fsdp`` or a strategy of it is set.
        NotImplementedError: ``full_param_layout``.

    Source: Megatron-Core's class of this name (signature and methods).
    """

    _is_megatron_fsdp = False

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: None = None,
        **further: Any,
    ) -> None:
        if ddp_config.use_megatron_fsdp:
            raise ValueError(
                "DistributedDataParallel must come with use_megatron_fsdp=False, got True; use FullyShardedDataParallel"
            )
        if ddp_config.data_parallel_sharding_strategy != "no_shard":
            raise ValueError(
                f"data_parallel_sharding_strategy={ddp_config.data_parallel_sharding_strategy!r} needs use_megatron_fsdp=True and "
                "FullyShardedDataParallel, got DistributedDataParallel"
            )
        if full_param_layout is not None or further:
            raise NotImplementedError(
                f"DistributedDataParallel takes no {', '.join(further) or 'full_param_layout'}: buffers are planned in the first step"
            )
        super().__init__(config, ddp_config, module, disable_bucketing=disable_bucketing, pg_collection=pg_collection)
