"""The virtual pipeline stages of a rank, each sharded by itself, as one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checkpoint.state import unwrapped
from megatron.core.module_names import whole_names


class StagesOfRank(nn.Module):
    """Stages under the names that their parameters and buffers have in the whole model.

    Args:
        stages: [C] in the order of their layers.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of all stages."""
        of_stages = (stage.named_parameters("", recurse, remove_duplicate) for stage in self.stages)
        return self._named(of_stages, prefix)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers of all stages."""
        of_stages = (stage.named_buffers("", recurse, remove_duplicate) for stage in self.stages)
        return self._named(of_stages, prefix)

    def _named(self, of_stages: Iterable[Iterable[tuple[str, Any]]], prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield tensors of each stage under names in the whole model."""
        for stage, named in zip(self.stages, of_stages, strict=True):
            whole = whole_names(stage)
            for name, tensor in named:
                yield f"{prefix}.{whole(name)}" if prefix else whole(name), tensor


class ModelChunks(StagesOfRank):
    """The stages of a pipeline rank that take turns, for training code that has one model.

    Each stage has a context of its own, and so its own plan: its step begins with its first forward and ends with its last
    backward, and what one pass prefetches at its end is there when the stage's next turn comes. Parameters have the names
    of the whole model, which differ between stages.

    Args:
        chunks: [C] the stages, in the order of their layers.

    Raises:
        ValueError: there is no chunk.

    Ranks: those of the chunks.
    """

    def __init__(self, chunks: Sequence[FullyShardedDataParallel]) -> None:
        if not chunks:
            raise ValueError("a rank must have a stage, got no chunks")
        super().__init__(chunks)
        first = chunks[0]
        self.config, self.ddp_config, self.pg_collection = first.config, first.ddp_config, first.pg_collection
        for context in contexts_of(self):
            context.change_options(spans_step=True)  # also where a stage's turns leave no graph between them

    @property
    def model_chunks(self) -> list[FullyShardedDataParallel]:
        """The stages; checkpoints and schedules look for them by this name."""
        return list(self.stages)  # type: ignore[arg-type]

    @property
    def module(self) -> StagesOfRank:
        """The stages without their wrappers."""
        return StagesOfRank([chunk.module for chunk in self.model_chunks])

    @property
    def parameter_groups(self) -> list[FsdpParameterGroup]:
        """The parameter groups of all units of all stages."""
        return [group for chunk in self.model_chunks for group in chunk.parameter_groups]

    @property
    def transport_names(self) -> list[str]:
        """The ``name`` of each transport that moves bytes between data-parallel ranks."""
        return sorted({name for chunk in self.model_chunks for name in chunk.transport_names})

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the sharded main weights of all stages, under the names of the unwrapped whole model."""
        found: dict[str, Any] = {}
        for chunk in self.model_chunks:
            whole = whole_names(unwrapped(chunk))
            found.update((prefix + whole(key), value) for key, value in chunk.state_dict(keep_vars=keep_vars).items())
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run: stages take turns."""
        raise RuntimeError("the stages of a rank take turns; call the chunks, or InterleavedPipeline")

    def start_param_sync(self) -> None:
        """Do as ``FullyShardedDataParallel.start_param_sync`` for each stage."""
        for chunk in self.model_chunks:
            chunk.start_param_sync()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all main gradients by ``scaling_factor``."""
        for chunk in self.model_chunks:
            chunk.scale_gradients(scaling_factor)

    def describe(self) -> str:
        """Return a table of the engine's memory on this rank for each stage."""
        return "\n".join(f"virtual stage {index}:\n{chunk.describe()}" for index, chunk in enumerate(self.model_chunks))

    def close(self) -> None:
        """Do as ``FullyShardedDataParallel.close`` for each stage."""
        for chunk in self.model_chunks:
            chunk.close()
