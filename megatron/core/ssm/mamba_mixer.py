"""The Mamba-2 mixer: a state space whose steps, writes and reads depend on the token.

Shapes: s sequence, b batch, g groups, r heads of a group, h = g * r heads, p width of a head, n of a state; g and h count this
tensor-parallel rank's.

[Note: rows of groups] The projection's output holds, group after group, the gates z of its r heads, their inputs x, the group's write
(B) and read (C), and its heads' steps of time (dt); the convolution's channels are x, B and C, in the same order. So a rank's rows
are whole groups. Megatron-Core's module holds all z, then all x, and so on: conversions must permute the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange

from megatron.core.process_groups_config import group_of, group_size
from megatron.core.ssm.causal_convolution import CausalConvolution
from megatron.core.ssm.state_layers import (
    DECAY_RATES,
    check_alone,
    check_causal,
    package_serves,
    projection_in,
    projection_out,
    recomputed,
)
from megatron.core.ssm.state_space_scan import state_space_scan
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.hybrid_layers import KERNEL, num_mamba_heads
from megatron.core.transformer.init_methods import ConstantInit, StepInit, UniformInit
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.parameter_init import InitializedParameters, SeededParameters
from megatron.core.transformer.spec_utils import ModuleSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

EPSILON = 1e-5
"""Of the gated norm, whatever ``layernorm_epsilon`` is, as in Megatron-Core."""


@dataclass
class MambaMixerSubmodules:
    """The specs of the projections of a mixer."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedGroupNorm(InitializedParameters):
    """RMSNorm of x * silu(z) over each group of channels, with a weight for each channel."""

    weight: torch.Tensor

    def __init__(self, config: TransformerConfig, channels: int, groups: int, tp_group: ProcessGroup | None) -> None:
        super().__init__(config)
        self.groups = groups
        self.add_parameter("weight", (channels,), ConstantInit(1.0), partition_dim=0, group=tp_group)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise [s, b, h * p] of this rank's groups, in fp32 and back to the dtype of x."""
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], None, EPSILON).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


class MambaMixer(SeededParameters, MegatronModule):
    """Mamba-2: project, convolve, carry states through the sequence, gate and normalise, project back.

    Args:
        d_model: must be ``config.hidden_size``.
        pg_collection: groups, with their heads, are split over its ``tp``.

    Raises:
        ValueError: the number of groups is not a multiple of the ranks, or ``d_model`` is another.
        NotImplementedError: an argument asks for something that is not served; the message names it.

    Source: Mamba-2 (arXiv:2405.21060) section 7; names and initial values are those of Megatron-Core's class, rows are in another
    order: [Note: rows of groups], the convolution is a module, and A_log and D have the dtype of other weights.
    """

    A_log: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.begin_parameters(config)
        check_layer_arguments("MambaMixer", pp_layer_offset=pp_layer_offset, name=name)
        check_alone(group_of(pg_collection, "cp"), config.context_parallel_size)
        if d_model != config.hidden_size:
            raise ValueError(f"d_model must be hidden_size ({config.hidden_size}), got {d_model}")
        self.layer_number = layer_number
        self.tp_group = tp_group = group_of(pg_collection, "tp")
        heads, groups, self.state = num_mamba_heads(config), config.mamba_num_groups, config.mamba_state_dim
        self.num_groups = part_extent(groups, 1, group_size(tp_group))
        self.heads_of_group, self.head_width = heads // groups, config.mamba_head_dim
        channels = heads * self.head_width
        outputs = 2 * channels + 2 * groups * self.state + heads
        self.in_proj = projection_in(submodules.in_proj, config, outputs, tp_group)
        if isinstance(self.in_proj, SeededParameters):
            self.in_proj.set_parameter_attribute("weight", "use_muon", False)  # several matrices in one
        self.conv1d = CausalConvolution(
            config, channels + 2 * groups * self.state, KERNEL, bias=True, tp_group=tp_group
        )
        initial: dict[str, Any] = {
            "dt_bias": StepInit(),
            "A_log": UniformInit(*DECAY_RATES, logarithm=True),
            "D": ConstantInit(1.0),
        }
        for own, init in initial.items():
            shape = self.describe_parameter(own, (heads,), init, partition_dim=0, group=tp_group)
            self.register_parameter(own, torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
        self.norm = GatedGroupNorm(config, channels, self.num_groups, tp_group)
        self.out_proj = projection_out(submodules.out_proj, config, channels, tp_group)
        self.reset_parameters()

    def forward(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix [s, b, h] along the sequence; return [s, b, h] and the bias [h] that the caller still has to add (or None).

        With sequence parallelism input and output are this rank's part of the sequence.

        Raises:
            NotImplementedError: there are samples that must be kept apart.
        """
        check_causal("Mamba", None, packed_seq_params)
        width = self.heads_of_group * self.head_width
        mixed, _ = self.in_proj(hidden_states)
        gate, channels, step = mixed.unflatten(-1, (self.num_groups, -1)).split(
            [width, width + 2 * self.state, self.heads_of_group], dim=-1
        )
        scan = recomputed(self._scan, self.config, training=self.training)
        context = self.norm(scan(channels, step), gate.flatten(2))
        output, bias = self.out_proj(context)
        return output, bias

    def _scan(self, channels: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Convolve the channels [s, b, g, rp + 2n], and carry states through the sequence: [s, b, h * p]."""
        channels = self.conv1d(channels.flatten(2)).unflatten(-1, (self.num_groups, -1))
        width = self.heads_of_group * self.head_width
        x, write, read = channels.split([width, self.state, self.state], dim=-1)
        x = rearrange(x, "s b g (r p) -> s b (g r) p", p=self.head_width)
        step, rate = F.softplus(step.flatten(2).float() + self.dt_bias.float()), self.A_log.float().exp()
        function: Callable[..., torch.Tensor] = state_space_scan
        if package_serves("mamba_ssm", x, self.config):
            from megatron.core.extensions.mamba_ssm import fused_state_space_scan

            function = fused_state_space_scan
        scanned = function(x, step, rate, write, read)
        skipped: torch.Tensor = x.float() * self.D.float().unsqueeze(-1)
        return skipped.to(x.dtype).add(scanned).flatten(2)
