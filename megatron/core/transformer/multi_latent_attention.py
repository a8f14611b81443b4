"""Multi-latent attention: queries, keys and values from narrow latent vectors.

[Note: latent vectors] The down-projections are whole on each tensor-parallel rank: their outputs are narrow, and with sequence
parallelism each rank computes those of its part of the sequence. The up-projections give each rank its heads, and gather the
sequence. The part of the keys that all heads share skips them, so it is gathered alone, and its gradient is the sum over ranks.

Shapes: s sequence, b batch, h hidden size, n heads of this tensor-parallel rank, c width of a head that positions do not turn, r
width that they turn, v width of values, k latent width. A head's rows of the up-projections are c, then r (queries), or c, then
v (keys and values).

Source: DeepSeek-V2 (arXiv:2405.04434) section 2.1; names and layouts are Megatron-Core's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.fp8_utils import recomputation_in_fp8
from megatron.core.fusions.fused_mla_rope import fused_rotate_and_join
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, apply_rotary
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, yarn_mscale
from megatron.core.process_groups_config import group_of, group_size
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, WholeLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.attention import Attention, tables_of_samples
from megatron.core.transformer.context_parallel_attention import core_attention_for
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_arguments import check_cp_comm_type, check_layer_arguments
from megatron.core.transformer.recomputation import call_before_backward_of, recomputes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class MLASelfAttentionSubmodules:
    """The specs of the modules of a multi-latent attention.

    ``linear_q_proj`` is built without ``config.q_lora_rank``, the two others of queries with it. A norm is a module of its own, or
    IdentityOp where the up-projection behind it has one.
    """

    linear_proj: ModuleSpec | type
    q_layernorm: ModuleSpec | type | None = None
    kv_layernorm: ModuleSpec | type | None = None
    linear_q_proj: ModuleSpec | type | None = None
    linear_q_down_proj: ModuleSpec | type | None = None
    linear_q_up_proj: ModuleSpec | type | None = None
    linear_kv_down_proj: ModuleSpec | type | None = None
    linear_kv_up_proj: ModuleSpec | type | None = None
    core_attention: ModuleSpec | type | None = None


class MLASelfAttention(Attention):
    """Self-attention over keys and values that are made from a latent vector of each token.

    Args:
        pg_collection: heads are split over its ``tp``, sequences over its ``cp``.

    Raises:
        TypeError: ``config`` is not an ``MLATransformerConfig``.
        ValueError: a module that the configuration needs is not in the spec, the two disagree about norms, or the number of heads
            is not a multiple of the ranks.

    Source: Megatron-Core's class of this name. Without ``q_lora_rank``, ``qk_layernorm`` normalises latent keys and values
    alone, as DeepSeek-V2-Lite does.
    """

    names_in_checkpoint: Mapping[str, str] = {
        f"linear_{kind}_up_proj.layer_norm_{part}": f"{kind}_layernorm.{part}"
        for kind in ("q", "kv")
        for part in ("weight", "bias")
    }
    """Norms that are part of a linear layer are stored as the modules that they are otherwise."""

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        if not isinstance(config, MLATransformerConfig):
            raise TypeError(
                f"multi-latent attention needs an MLATransformerConfig, got {type(config).__name__}; use that class, or a layer"
                " spec without multi_latent_attention"
            )
        check_cp_comm_type(config, cp_comm_type)
        check_layer_arguments("MLASelfAttention", pp_layer_offset=pp_layer_offset, name=name)
        self.layer_number = layer_number
        self.tp_group, self.cp_group = group_of(pg_collection, "tp"), group_of(pg_collection, "cp")
        num_heads, self.q_head_dim = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        self.num_heads = part_extent(num_heads, 1, group_size(self.tp_group))
        self.rotary_pos_emb = mla_rotary_embedding(config, cp_group=self.cp_group)
        mscale = yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        self.core_attention = build_module(
            core_attention_for(_given(submodules, "core_attention"), pg_collection),
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=mscale * mscale / math.sqrt(self.q_head_dim),
            pg_collection=pg_collection,
            k_channels=self.q_head_dim,
            v_channels=config.v_head_dim,
        )
        linear: dict[str, Any] = {"config": config, "skip_bias_add": True, "tp_group": self.tp_group}
        self.linear_proj = build_module(
            submodules.linear_proj,
            num_heads * config.v_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            bias=config.add_bias_linear,
            **linear,
        )
        self._build_projections(submodules)

    def _build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        config, num_heads = self.config, self.config.num_attention_heads
        if config.q_lora_rank is None:
            self.linear_q_proj = self._column(
                submodules, "linear_q_proj", config.hidden_size, num_heads * self.q_head_dim
            )
            self.q_layernorm: torch.nn.Module | None = None
        else:
            self.linear_q_down_proj = self._whole(submodules, "linear_q_down_proj", config.q_lora_rank)
            self.linear_q_up_proj = self._column(
                submodules, "linear_q_up_proj", config.q_lora_rank, num_heads * self.q_head_dim
            )
            self.q_layernorm = self._norm(submodules, "q", self.linear_q_up_proj, config.q_lora_rank)
        self.linear_kv_down_proj = self._whole(
            submodules, "linear_kv_down_proj", config.kv_lora_rank + config.qk_pos_emb_head_dim
        )
        self.linear_kv_up_proj = self._column(
            submodules, "linear_kv_up_proj", config.kv_lora_rank, num_heads * (config.qk_head_dim + config.v_head_dim)
        )
        self.kv_layernorm = self._norm(submodules, "kv", self.linear_kv_up_proj, config.kv_lora_rank)

    def _column(self, submodules: MLASelfAttentionSubmodules, name: str, inputs: int, outputs: int) -> torch.nn.Module:
        """Build a projection whose output features, whole heads, are split over tensor-parallel ranks."""
        module: torch.nn.Module = build_module(
            _given(submodules, name),
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        return module

    def _whole(self, submodules: MLASelfAttentionSubmodules, name: str, outputs: int) -> torch.nn.Module:
        """Build a projection that is whole on each tensor-parallel rank: [Note: latent vectors].

        Megatron-Core's specs also name column-parallel layers, whose results it gathers: a whole layer takes their place.
        """
        spec = _given(submodules, name)
        if get_module(spec) is ColumnParallelLinear:
            spec = WholeLinear
        parameters = inspect.signature(get_module(spec)).parameters
        if "gather_output" in parameters:
            raise ValueError(
                f"{name} must be whole on each tensor-parallel rank, got {get_module(spec).__name__}; use TELinear or WholeLinear"
            )
        module: torch.nn.Module = build_module(
            spec,
            self.config.hidden_size,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            **({"parallel_mode": "duplicated"} if "parallel_mode" in parameters else {}),
        )
        return module

    def _norm(
        self, submodules: MLASelfAttentionSubmodules, kind: str, linear: torch.nn.Module, width: int
    ) -> torch.nn.Module | None:
        """Build the norm of latent vectors, where it is a module of its own."""
        spec = getattr(submodules, f"{kind}_layernorm")
        is_own, is_fused = spec not in (None, IdentityOp), hasattr(linear, "layer_norm_weight")
        if is_own + is_fused != self.config.qk_layernorm:
            raise ValueError(
                f"the layer spec and TransformerConfig must agree on qk_layernorm, got {kind}_layernorm {spec} and"
                f" linear_{kind}_up_proj {type(linear).__name__} in the spec and {self.config.qk_layernorm} in the config; pass"
                " the same value to both, and one norm"
            )
        if not is_own:
            return None
        norm: torch.nn.Module = build_module(
            spec, config=self.config, hidden_size=width, eps=self.config.layernorm_epsilon
        )
        return norm

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over [s, b, h]; return [s, b, h] and the bias [h] that the caller still has to add (or None).

        With sequence parallelism input and output are this rank's part of the sequence; masks and tables are of all of it.

        Args:
            attention_mask: see ``DotProductAttention.forward``; None is causal.
            rotary_pos_emb: must be None: the angles are this attention's own.
            rotary_pos_cos, rotary_pos_sin: [s, r/2] tables of ``mla_rotary_embedding``; None: they are made here.
            packed_seq_params: samples within which tokens attend; see ``SelfAttention.forward``.

        Raises:
            ValueError: angles are given.
        """
        if rotary_pos_emb is not None:
            raise ValueError(
                "rotary_pos_emb must be None: multi-latent attention turns heads by angles of its own, got a tensor"
            )
        cos, sin = rotary_pos_cos, rotary_pos_sin
        if cos is None or sin is None:
            cos, sin = self._tables(hidden_states)
        packed = packed_seq_params if packed_seq_params is not None and packed_seq_params.is_packed else None
        if packed is not None:
            cos, sin = tables_of_samples(packed, cos, sin)
        latents = self._latents(hidden_states)
        releases = self._releases_heads
        now, again = self._contexts_of_heads() if releases else (nullcontext(), nullcontext())
        with now:
            heads = self._heads(*latents, cos, sin)
        context = self.attend(*heads, attention_mask, packed)
        if releases and context.requires_grad:
            _release(heads, context, partial(self._heads, *latents, cos, sin), again)
        output, bias = self.linear_proj(context)
        return output, bias

    def _tables(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (group_size(self.tp_group) if self.config.sequence_parallel else 1) * group_size(self.cp_group)
        return self.rotary_pos_emb.get_cos_sin(hidden_states.shape[0] * parts, hidden_states.device)

    def _latents(self, hidden_states: torch.Tensor) -> Heads:
        """Return latent queries [s, b, k] (or hidden states), latent keys and values [s, b, k], and the shared keys [s, b, r].

        With sequence parallelism the first two are of this rank's part of the sequence.
        """
        config = self.config
        queries = hidden_states
        if config.q_lora_rank is not None:
            queries = _normed(self.q_layernorm, self.linear_q_down_proj(hidden_states)[0])
        latent, shared = self.linear_kv_down_proj(hidden_states)[0].split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        if group_size(self.tp_group) > 1:
            whole = (
                gather_from_sequence_parallel_region
                if config.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
            shared = whole(shared.contiguous(), group=self.tp_group)
        return queries, _normed(self.kv_layernorm, latent), shared

    def _heads(
        self, queries: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """Return queries and keys [s, b, n, c + r] and values [s, b, n, v], all contiguous, of what ``_latents`` returned."""
        config = self.config
        linear = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = linear(queries)[0].unflatten(-1, (self.num_heads, -1))
        key_value = self.linear_kv_up_proj(latent)[0].unflatten(-1, (self.num_heads, -1))
        if config.apply_rope_fusion:
            return fused_rotate_and_join(
                query,
                key_value,
                shared,
                cos,
                sin,
                content_width=config.qk_head_dim,
                compiled=not config.disable_jit_fuser,
            )
        query, turning = query.split((config.qk_head_dim, config.qk_pos_emb_head_dim), dim=-1)
        key, value = key_value.split((config.qk_head_dim, config.v_head_dim), dim=-1)
        turned = apply_rotary(shared, cos, sin, interleaved=True).unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        query = torch.cat((query, apply_rotary(turning, cos, sin, interleaved=True)), dim=-1)
        # A view of the values would keep the whole projection in memory until backward.
        return query, torch.cat((key, turned), dim=-1), value.contiguous()

    @property
    def _releases_heads(self) -> bool:
        """Whether queries, keys and values are released after forward and computed again in backward.

        Not in a forward that is itself a recomputation in backward: what that one saves is used at once. And not where core
        attention saves them in the host's memory: they are still being copied, and then released anyway.
        """
        config = self.config
        if config.fine_grained_activation_offloading and "core_attn" in config.offload_modules:
            return False
        return self.training and recomputes(config, "mla_up_proj") and torch._C._current_graph_task_id() == -1

    def _contexts_of_heads(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the up-projections and of their recomputation."""
        if self.config.fp8 is None:
            return nullcontext(), nullcontext()
        queries = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        return recomputation_in_fp8([queries, self.linear_kv_up_proj])


def _release(
    heads: Heads, context: torch.Tensor, compute: Callable[[], Heads], again: AbstractContextManager[None]
) -> None:
    """Free the memory of the heads until the backward of ``context``, which computes and fills it again.

    Args:
        again: in which they are computed again.
    """
    storages = [x.untyped_storage() for x in heads]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)

    def refill() -> None:
        with again:
            fresh = compute()
        for storage, size, x in zip(storages, sizes, fresh, strict=True):
            storage.resize_(size)
            storage.copy_(x.untyped_storage())

    call_before_backward_of(context, refill)


def mla_rotary_embedding(config: MLATransformerConfig, *, cp_group: ProcessGroup | None = None) -> RotaryEmbedding:
    """Build the tables of ``config.rope_type`` for the part of a head that positions turn.

    Args:
        cp_group: the ranks that split a sequence.
    """
    width = config.qk_pos_emb_head_dim
    if config.rope_type == "rope":
        return RotaryEmbedding(width, config.rotary_percent, rotary_base=config.rotary_base, cp_group=cp_group)
    return YarnRotaryEmbedding(
        width,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        cp_group=cp_group,
    )


def _given(submodules: MLASelfAttentionSubmodules, name: str) -> ModuleSpec | type:
    spec: ModuleSpec | type | None = getattr(submodules, name)
    if spec is None:
        raise ValueError(f"MLASelfAttentionSubmodules.{name} must be given for this configuration, got None")
    return spec


def _normed(norm: torch.nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x.contiguous() if norm is None else norm(x)
