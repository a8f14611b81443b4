"""Word and position embeddings.

Shapes: b batch, s sequence, h hidden size, v vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel.layers import Embedding, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """dropout(word + position embedding), the positions only where they are learned."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute",
    ) -> None:
        super().__init__(config)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        assert config.embedding_init_method is not None, "derived with the configuration"
        init_method = config.embedding_init_method
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=init_method, config=config
        )
        if self.add_position_embedding:
            self.position_embeddings = Embedding(
                max_sequence_length, config.hidden_size, init_method=init_method, config=config
            )

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Tokens and positions [b, s] -> [s, b, h], in fp32 where the residual stream is.

        Args:
            position_ids: None: 0, 1, ... in each sample.

        Raises:
            ValueError: positions are learned and the sequence is longer than they reach.
        """
        # Looked up by [s, b], the result has its final layout at once.
        embeddings = self.word_embeddings(input_ids.t())
        if self.add_position_embedding:
            length = input_ids.shape[1]
            if length > self.max_sequence_length:
                raise ValueError(
                    f"a sequence must not be longer than max_sequence_length ({self.max_sequence_length}), got"
                    f" {length}; build the model with a larger max_sequence_length or shorten the input"
                )
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
            embeddings = embeddings + self.position_embeddings(position_ids.t())
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        return F.dropout(embeddings, p=self.config.hidden_dropout, training=self.training)
