"""Word and position embeddings.

Shapes: b batch, s sequence, h hidden size, v vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.tensor_parallel.layers import Embedding, VocabParallelEmbedding
from megatron.core.transformer.context_parallel import positions_on_this_cp_rank
from megatron.core.transformer.module import MegatronModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """The embedding: dropout(word embedding + position embedding); the second only where positions are learned.

    Args:
        scatter_to_sequence_parallel: with sequence parallelism return this rank's part of the sequence; False: all of it.
        tp_group: the ranks over which the rows of the word embedding are split.
        pg_collection: groups of which ``tp`` and ``cp`` are used where these are None; None: those of ``parallel_state``.
        cp_group: the ranks that split each sequence.
        num_tokentypes: must be 0.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: ProcessGroup | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        if num_tokentypes > 0:
            raise NotImplementedError(f"LanguageModelEmbedding(num_tokentypes={num_tokentypes}) is not served")
        if tp_group is None:
            tp_group = group_of(pg_collection, "tp")
        if cp_group is None:
            cp_group = group_of(pg_collection, "cp")
        self.tp_group, self.cp_group = tp_group, cp_group
        self.scatters = config.sequence_parallel and scatter_to_sequence_parallel and group_size(tp_group) > 1
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        assert config.embedding_init_method is not None, "derived with the configuration"
        init_method = config.embedding_init_method
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=init_method,
            config=config,
            reduce_scatter_embeddings=self.scatters,
            tp_group=tp_group,
        )
        if self.add_position_embedding:
            # Each rank looks up its own positions alone, so its gradient is a partial sum.
            marks = {"sequence_parallel": True} if self.scatters else {}
            if config.embedding_init_method_std is not None:
                marks["skip_weight_decay"] = True
            self.position_embeddings = Embedding(
                max_sequence_length, config.hidden_size, init_method=init_method, config=config, **marks
            )

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, *, is_pack: bool = False
    ) -> torch.Tensor:
        """Embed tokens and positions [b, s] to [s, b, h] ([s/n, b, h] where it scatters); fp32 if the residual stream is.

        Args:
            position_ids: None: 0, 1, ... in each sample, of which a context-parallel rank has its part.
            is_pack: rows are samples one after the other, each with positions of its own: a row may be longer than a sample.

        Raises:
            ValueError: positions are learned and the sequence is longer than their number, or the sequence is scattered
                and not a multiple of the ranks.

        Ranks: all of ``tp_group``.
        """
        # Transposed before the look-up, so that the result needs no transposition.
        embeddings = self.word_embeddings(input_ids.t())
        if self.add_position_embedding:
            length = input_ids.shape[1] * group_size(self.cp_group)
            if length > self.max_sequence_length and not (is_pack and position_ids is not None):
                raise ValueError(
                    f"a sequence must not be longer than max_sequence_length ({self.max_sequence_length}), got"
                    f" {length}; build the model with a larger max_sequence_length or shorten the input"
                )
            if position_ids is None:
                position_ids = positions_on_this_cp_rank(length, self.cp_group, input_ids.device).unsqueeze(0)
            embeddings = embeddings + self.position_embeddings(self._own_part(position_ids.t()))
        if self.config.use_mup:
            embeddings = embeddings * self.config.mup_embedding_mult
        if self.config.embedding_scale is not None:
            embeddings = embeddings * self.config.embedding_scale
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        draws = self.training and self.config.hidden_dropout > 0.0
        with self.drawing_apart(embeddings, draws and self.scatters):
            return F.dropout(embeddings, p=self.config.hidden_dropout, training=self.training)

    def _own_part(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the positions: [s, b] -> [s/n, b] where the sequence is scattered."""
        if not self.scatters:
            return position_ids
        return position_ids.chunk(group_size(self.tp_group))[group_rank(self.tp_group)]
