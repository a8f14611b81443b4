"""The MLP of a transformer layer.

Shapes: s sequence, b batch, h hidden size, f MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from megatron.core.activations import QUICK_SLOPE, quick_gelu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.model_tensors import strided
from megatron.core.fusions.bias_activation import bias_geglu, bias_gelu, bias_swiglu, swiglu
from megatron.core.fusions.clamped_glu import clamped_glu
from megatron.core.process_groups_config import group_of
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recomputation import call_before_backward_of, recomputes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


_SLOPES: dict[Any, float] = {F.silu: 1.0, quick_gelu: QUICK_SLOPE}
"""The slope of an activation that is gate * sigmoid(slope * gate)."""


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Sequence[tuple[int, int, int]],
    singleton_local_shards: bool = False,
) -> ShardedTensorFactory:
    """Describe a part of gate and up projection, one behind the other along dim 0, as a part of each in the whole tensor.

    Args:
        original_sh_ten: describes it as one box, ``sharded_offsets`` axes before those of the data.
        singleton_local_shards: must be False: both have one key.

    Raises:
        NotImplementedError: ``singleton_local_shards``.
    """
    if singleton_local_shards:
        raise NotImplementedError("singleton_local_shards must be False, got True: gate and up projection have one key")
    axis, own, offsets = len(sharded_offsets), original_sh_ten, list(sharded_offsets)
    assert own.axis_fragmentations is not None, "boxes of ranks are a regular grid"
    rank, size = own.global_offset[axis] // own.local_shape[0], own.axis_fragmentations[axis]
    return strided(own.data, own.key, offsets, own.replica_id, 0, 2, rank, size)


@dataclass
class MLPSubmodules:
    """The specs of the modules of an MLP."""

    linear_fc1: ModuleSpec | type
    linear_fc2: ModuleSpec | type


class MLP(MegatronModule):
    """An MLP, fc2(activation(fc1(x))); gated, fc1 has 2f outputs: all gates, then all ups of this rank's part of the width.

    Gated, activation(x) is function(gate) * (up + ``glu_linear_offset``), both clamped by ``activation_func_clamp_value``.

    Args:
        is_expert: whether the MLP is an expert. It is then split over ``pg_collection.expt_tp`` instead of ``tp``, and
            neither gathers its input nor sums its output.
        tp_group: the ranks over which it is split; None: as ``pg_collection`` says.
        name: without effect.
    """

    activates_with_bias: ClassVar[bool] = True
    """Whether fc1's bias and the activation are one function where ``bias_activation_fusion`` asks for it."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.input_size = config.hidden_size if input_size is None else input_size
        width = ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
        self.activation_func = config.activation_func
        if tp_group is None:
            tp_group = group_of(pg_collection, "expt_tp" if is_expert else "tp")
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            self.input_size,
            2 * width if config.gated_linear_unit else width,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            # The GEMM adds the bias at no cost, unless bias and activation are to be one function.
            skip_bias_add=config.bias_activation_fusion and self.activates_with_bias,
            is_expert=is_expert,
            stride=2 if config.gated_linear_unit else 1,
            tp_group=tp_group,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            self.input_size if is_expert else config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_group=tp_group,
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute [s, b, h] from [s, b, h]; return it and the bias [h] that the caller still has to add (or None).

        With sequence parallelism s is this rank's part of the sequence.
        """
        intermediate, bias = self.linear_fc1(hidden_states)
        activated = self._activate(intermediate, bias)
        output, output_bias = self.linear_fc2(activated)
        if self.recomputes_activation and output.requires_grad:
            storage = activated.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)

            def refill() -> None:
                fresh = self._activate(intermediate, bias).untyped_storage()
                storage.resize_(nbytes)
                storage.copy_(fresh)

            call_before_backward_of(output, refill)
        return output, output_bias

    @property
    def recomputes_activation(self) -> bool:
        """Whether what is activated is released after forward and computed again in backward.

        Not in a forward that is itself a recomputation in backward: that one's backward never runs, only what it saves is used.
        """
        return self.training and recomputes(self.config, "mlp_act") and torch._C._current_graph_task_id() == -1

    def _activate(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Activate [s, b, f] (or [s, b, 2f] where gated) to [s, b, f]; ``bias`` None: x includes it already."""
        config, gated, function = self.config, self.config.gated_linear_unit, self.activation_func
        if config.bias_activation_fusion:
            compiled = not config.disable_jit_fuser
            if self.is_swiglu:
                return bias_swiglu(x, bias, compiled=compiled)
            if gated and function in _SLOPES:
                return clamped_glu(x, bias, **self.glu_settings())
            return (bias_geglu if gated else bias_gelu)(x, bias, compiled=compiled)
        if self.is_swiglu:
            return swiglu(x)
        if gated:
            gate, up = x.chunk(2, dim=-1)
            limit = config.activation_func_clamp_value
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return function(gate) * (up + config.glu_linear_offset)  # type: ignore[operator]
        return function(x)  # type: ignore[operator]

    @property
    def is_swiglu(self) -> bool:
        """Whether the MLP is silu(gate) * up, without clamps and offset."""
        config = self.config
        is_plain = config.glu_linear_offset == 0.0 and config.activation_func_clamp_value is None
        return config.gated_linear_unit and self.activation_func is F.silu and is_plain

    def glu_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of ``clamped_glu``."""
        config = self.config
        return {
            "slope": _SLOPES[self.activation_func],
            "limit": config.activation_func_clamp_value,
            "offset": config.glu_linear_offset,
            "compiled": not config.disable_jit_fuser,
        }
