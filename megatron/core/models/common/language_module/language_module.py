"""What language models have in common: the loss of each token, and the weight that embedding and output layer may share.

Shapes: b batch, s sequence, v vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.process_groups_config import group_of
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """Base class of language models.

    A subclass sets ``pre_process`` and ``post_process``, and builds ``embedding`` and ``output_layer`` where its stage has them.

    Args:
        pg_collection: the process groups over which the model is split; None: those of ``parallel_state``.

    Source: Megatron-Core's LanguageModule (names and signatures).
    """

    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights = False
    vocab_size: int
    """Where a subclass sets it, logits of this width are whole and not this tensor-parallel rank's part."""

    embedding: Any
    output_layer: Any

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self._tp_group = group_of(pg_collection, "tp")
        self._cp_group = group_of(pg_collection, "cp")

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the weights of embedding and output layer for optimizers and engines.

        Raises:
            NotImplementedError: both share a weight and are on different stages of a pipeline; ``GPTModel`` serves that.
        """
        apart = not (self.pre_process and self.post_process)
        if self.share_embeddings_and_output_weights and apart:
            raise NotImplementedError(
                "LanguageModule: an embedding shared between stages of a pipeline is served by GPTModel alone"
            )
        owners = [self.embedding.word_embeddings] if self.pre_process else []
        if self.post_process and not self.share_embeddings_and_output_weights:
            owners.append(self.output_layer)
        for owner in owners:
            owner.weight.is_embedding_or_output_parameter = True

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return the word embedding's weight; on a last stage without embedding the output layer's; otherwise None."""
        weight: torch.Tensor | None = None
        if self.pre_process:
            weight = self.embedding.word_embeddings.weight
        elif self.post_process:
            weight = self.output_layer.weight
        return weight

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor, *, overwrite_logits: bool = False
    ) -> torch.Tensor:
        """Compute the loss of each token [b, s] from labels [b, s] and logits [s, b, v], all or this rank's part of them.

        Args:
            overwrite_logits: with ``config.cross_entropy_loss_fusion``, backward may overwrite the logits.

        Ranks: all tensor-parallel ranks where the logits are parts.
        """
        tp_group = None if logits.shape[-1] == getattr(self, "vocab_size", None) else self._tp_group
        if not self.config.cross_entropy_loss_fusion:
            return vocab_parallel_cross_entropy(logits, labels.t(), tp_group=tp_group).t().contiguous()
        compiled = not self.config.disable_jit_fuser
        losses = fused_vocab_parallel_cross_entropy(
            logits, labels.t(), tp_group, overwrite_logits=overwrite_logits, compiled=compiled
        )
        return losses.t().contiguous()
