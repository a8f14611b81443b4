"""Core attention over sequences that are split over context-parallel ranks.

Shapes: l tokens of this rank, b batch, n query heads, g key and value heads, d head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange

from megatron.core.packed_seq_params import PackedSeqParams, check_pack
from megatron.core.process_groups_config import ProcessGroupCollection, group_of, group_size
from megatron.core.transformer.context_parallel import comm_type_of_layer
from megatron.core.transformer.context_parallel_gather import gathered_attention
from megatron.core.transformer.context_parallel_heads import gather_heads, scatter_heads
from megatron.core.transformer.context_parallel_ring import ring_attention
from megatron.core.transformer.context_parallel_window import windowed_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention, check_core_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ContextParallelAttention(DotProductAttention):
    """Causal attention of this rank's tokens over the tokens of all context-parallel ranks.

    Args:
        kwargs: further arguments of ``DotProductAttention``.

    Raises:
        NotImplementedError: attention dropout is on, and the kind of communication is not "a2a".
        ValueError: ``config.context_parallel_size`` is not the size of the process group.

    Ranks: all of ``pg_collection.cp`` call forward and backward in the same order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, pg_collection=pg_collection, **kwargs)
        cp_group = group_of(pg_collection, "cp")
        assert cp_group is not None, "chosen where there is such a group"
        self.cp_group = cp_group
        self.comm_type = comm_type_of_layer(config.cp_comm_type, layer_number)
        if config.context_parallel_size != self.cp_group.size():
            raise ValueError(
                "context_parallel_size must be the number of ranks of pg_collection.cp, got"
                f" {config.context_parallel_size} and {self.cp_group.size()}; build both from the same degrees"
            )
        if self.attention_dropout > 0.0 and self.comm_type != "a2a":
            raise NotImplementedError(
                f"attention_dropout must be 0 with cp_comm_type {self.comm_type!r}, got {self.attention_dropout}: blocks of keys"
                " come one after the other; use 'a2a', which has whole sequences, or no dropout"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute the context [l, b, n * d] of query [l, b, n, d], key and value [l, b, g, d].

        Raises:
            NotImplementedError: a mask, or a pack, is given.
            ValueError: heads cannot be divided over the ranks (``a2a``), or this rank's tokens into two chunks.
        """
        check_core_attention(attn_mask_type, attention_bias)
        if packed_seq_params is not None and packed_seq_params.is_packed:
            check_pack(packed_seq_params, 1, cp_size=self.cp_group.size())
        if attention_mask is not None:
            raise NotImplementedError(
                "attention_mask must be None (causal) with context parallelism, got a mask: each rank sees only a part of"
                " the sequence; use context_parallel_size 1 for other masks"
            )
        self._check(query, None)
        if query.shape[0] % 2 != 0:
            raise ValueError(
                "a context-parallel rank must hold two chunks of equal length of each sequence, got"
                f" {query.shape[0]} tokens; cut batches with get_batch_on_this_cp_rank"
            )
        if self.comm_type == "a2a":
            return self._over_heads(query, key, value)
        options: dict[str, Any] = {"cp_group": self.cp_group, "scale": self.softmax_scale}
        options["kernel"] = self.kernel(*(rearrange(x, "s b h d -> b h s d") for x in (query, key, value)))
        sinks = self.sinks(query)
        if self.window is not None:
            return windowed_attention(query, key, value, sinks, window=self.window, **options).flatten(2)
        attention = ring_attention if self.comm_type == "p2p" else gathered_attention
        return attention(query, key, value, sinks, **options).flatten(2)

    def sinks(self, query: torch.Tensor) -> torch.Tensor | None:
        """Return the sinks of the heads of query [s, b, n, d]: with "a2a" a rank attends with a part of them."""
        sinks = super().sinks(query)
        if sinks is None or len(sinks) == query.shape[2]:
            return sinks
        return sinks.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _over_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        size = self.cp_group.size()
        if key.shape[2] % size != 0:
            raise ValueError(
                "with cp_comm_type 'a2a' the key and value heads of a rank must be a multiple of context_parallel_size,"
                f" got {key.shape[2]} heads and {size} ranks; use cp_comm_type 'p2p' or 'all_gather'"
            )
        query, key, value = (scatter_heads(x, self.cp_group) for x in (query, key, value))
        context = super().forward(query, key, value, None)
        return gather_heads(torch.unflatten(context, 2, (query.shape[2], -1)), self.cp_group).flatten(2)


def core_attention_for(core_attention: ModuleSpec | type, pg_collection: ProcessGroupCollection | None) -> Any:
    """Replace ``DotProductAttention`` in a spec by ``ContextParallelAttention`` where ``pg_collection`` splits sequences.

    Other classes are returned as they are: they get the process groups and must handle them.
    """
    if group_size(group_of(pg_collection, "cp")) == 1:
        return core_attention
    return ContextParallelAttention if core_attention is DotProductAttention else core_attention
