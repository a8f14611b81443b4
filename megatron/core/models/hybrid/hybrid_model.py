"""Models of Mamba, attention, MLP and expert layers under Megatron-Core's name and signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from megatron.core.models.gpt.gpt_model import GPTModel

if TYPE_CHECKING:
    import torch

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


class HybridModel(GPTModel):
    """A ``GPTModel`` whose layers are those of a pattern.

    Args:
        config: a copy with the pattern is the model's configuration. Without a pattern, sizes of Mamba are kept in it only with
            ``is_hybrid_model``.
        hybrid_stack_spec: the specs of its layers, or a function of the configuration that returns them, as the one of this name.
        hybrid_layer_pattern: a letter for each layer (see ``TransformerConfig``); None: that of the configuration.
        hybrid_override_pattern: an earlier name of it.
        hybrid_attention_ratio, hybrid_mlp_ratio: must be None or 0; give a pattern.
        others: as for ``GPTModel``.

    Raises:
        ValueError: there is no pattern, or there are two; and as ``GPTModel``.
        NotImplementedError: a ratio is given; and as ``GPTModel``.

    Source: Megatron-Core's class of this name (signature).
    """

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: TransformerBlockSubmodules | Callable[[TransformerConfig], TransformerBlockSubmodules],
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        hybrid_attention_ratio: float | None = None,
        hybrid_mlp_ratio: float | None = None,
        hybrid_override_pattern: str | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        if hybrid_attention_ratio or hybrid_mlp_ratio:
            raise NotImplementedError(
                "hybrid_attention_ratio and hybrid_mlp_ratio must be None or 0, got "
                f"{hybrid_attention_ratio} and {hybrid_mlp_ratio}: give hybrid_layer_pattern"
            )
        given = {hybrid_layer_pattern, hybrid_override_pattern, config.hybrid_layer_pattern} - {None}
        if len(given) != 1:
            raise ValueError(f"hybrid_layer_pattern must be one pattern, got {sorted(map(str, given))}")
        config = replace(config, hybrid_layer_pattern=given.pop())
        further: dict[str, Any] = {"logit_dtype": logit_dtype, "fp16_lm_cross_entropy": fp16_lm_cross_entropy}
        super().__init__(
            config,
            hybrid_stack_spec(config) if callable(hybrid_stack_spec) else hybrid_stack_spec,
            vocab_size,
            max_sequence_length,
            pre_process,
            post_process,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            scatter_embedding_sequence_parallel=scatter_embedding_sequence_parallel,
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **further,
        )
