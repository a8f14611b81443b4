"""Gated delta net: attention whose memory of earlier tokens is one matrix for each head.

Shapes: s sequence, b batch, h hidden size, g key heads, n value heads (r = n/g of each key head), k and v their widths; g and n count
this tensor-parallel rank's heads.

[Note: rows of key heads] The projection's output holds, key head after key head, its query, its key, its r values, the r gates of
their outputs, r numbers that become the strength of the correction (beta), and r that become the decay (alpha); the convolution's channels
are those of query, key and values, in the same order. So a rank's rows are whole heads, as in the query-key-value projection.
Megatron-Core's module holds all queries, then all keys, and so on: conversions of checkpoints permute the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange

from megatron.core.process_groups_config import group_of, group_size
from megatron.core.ssm.causal_convolution import CausalConvolution
from megatron.core.ssm.delta_rule import gated_delta_rule
from megatron.core.ssm.state_layers import (
    DECAY_RATES,
    check_alone,
    check_causal,
    package_serves,
    projection_in,
    projection_out,
    recomputed,
)
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.init_methods import ConstantInit, UniformInit
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.parameter_init import SeededParameters
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class GatedDeltaNetSubmodules:
    """The specs of the modules of a gated delta net."""

    in_proj: ModuleSpec | type
    out_norm: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedDeltaNet(SeededParameters, MegatronModule):
    """Linear attention by the gated delta rule: project, convolve, correct and read the states, normalise, gate, project back.

    Args:
        pg_collection: heads are split over its ``tp``.
        bias, conv_bias: biases of the projections and of the convolution.

    Raises:
        ValueError: the number of key heads is not a multiple of the ranks.
        NotImplementedError: an argument asks for something that is not served; the message names it.

    Source: Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next has it; names and initial values are those of Megatron-Core's class,
    rows are in another order: [Note: rows of key heads].
    """

    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int = 1,
        bias: bool = False,
        conv_bias: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
    ) -> None:
        super().__init__(config)
        self.begin_parameters(config)
        check_layer_arguments("GatedDeltaNet", pp_layer_offset=pp_layer_offset, name=name)
        check_alone(group_of(pg_collection, "cp"), config.context_parallel_size, cp_comm_type)
        self.layer_number = layer_number
        self.tp_group = tp_group = group_of(pg_collection, "tp")
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads = part_extent(config.linear_num_key_heads, 1, group_size(tp_group))
        self.values_of_key = config.linear_num_value_heads // config.linear_num_key_heads
        keys = config.linear_num_key_heads * self.key_width
        values = config.linear_num_value_heads * self.value_width
        outputs = 2 * keys + 2 * values + 2 * config.linear_num_value_heads
        self.in_proj = projection_in(submodules.in_proj, config, outputs, tp_group, bias=bias)
        self.conv1d = CausalConvolution(
            config, 2 * keys + values, config.linear_conv_kernel_dim, bias=conv_bias, tp_group=tp_group
        )
        heads: dict[str, Any] = {"partition_dim": 0, "group": tp_group}
        for name_, init in (("dt_bias", ConstantInit(1.0)), ("A_log", UniformInit(*DECAY_RATES, logarithm=True))):
            shape = self.describe_parameter(name_, (config.linear_num_value_heads,), init, **heads)
            self.register_parameter(name_, torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_width, eps=config.layernorm_epsilon
        )
        if group_size(tp_group) > 1 and isinstance(self.out_norm, SeededParameters):
            # All ranks hold these weights and each rank's heads give a part of their gradient, also without sequence parallelism.
            self.out_norm.sum_gradients_over_tensor_ranks()
        self.out_proj = projection_out(submodules.out_proj, config, values, tp_group, bias=bias)
        self.reset_parameters()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over [s, b, h]; return [s, b, h] and the bias [h] that the caller still has to add (or None).

        With sequence parallelism input and output are this rank's part of the sequence.

        Args:
            attention_mask: must be None, which is causal: a state has all tokens before.
            rotary_pos_emb, rotary_pos_cos, rotary_pos_sin: without effect: states know the order of tokens.

        Raises:
            NotImplementedError: there is a mask, or there are samples that must be kept apart.
        """
        check_causal("gated delta net", attention_mask, packed_seq_params)
        width = self.values_of_key * self.value_width
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.unflatten(-1, (self.num_key_heads, -1))
        channels, gate, beta, alpha = mixed.split(
            [2 * self.key_width + width, width, self.values_of_key, self.values_of_key], dim=-1
        )
        context = recomputed(self._read, self.config, training=self.training)(channels, beta, alpha)
        gate = gate.reshape(context.shape).float()
        context = (self.out_norm(context) * F.silu(gate)).to(hidden_states.dtype)
        output, bias = self.out_proj(context.flatten(2))
        return output, bias

    def _read(self, channels: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """Convolve the channels [s, b, g, 2k + rv], and apply the rule: [s, b, n, v]."""
        channels = self.conv1d(channels.flatten(2)).unflatten(-1, (self.num_key_heads, -1))
        width = self.values_of_key * self.value_width
        query, key, value = channels.split([self.key_width, self.key_width, width], dim=-1)
        rate = self.A_log.float().exp()
        log_decay = -rate * F.softplus(alpha.flatten(2).float() + self.dt_bias.float())
        value = rearrange(value, "s b g (r v) -> s b (g r) v", v=self.value_width)
        beta = beta.flatten(2).sigmoid()
        if package_serves("flash_linear_attention", value, self.config):
            from megatron.core.extensions.flash_linear_attention import fused_gated_delta_rule

            return fused_gated_delta_rule(query, key, value, log_decay, beta)
        return gated_delta_rule(query, key, value, log_decay, beta)
