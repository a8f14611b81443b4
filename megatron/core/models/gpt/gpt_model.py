"""The GPT language model.

Shapes: b batch, s sequence, h hidden size, v vocabulary. Activations are [s, b, h], inputs and outputs [b, s, ...].
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed import ProcessGroup

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel_state import default_rng_tracker, take_default_degrees
from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.served_arguments import ANY, Served, check_arguments
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.context_parallel import positions_on_this_cp_rank
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import mla_rotary_embedding
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLosses,
)
from megatron.core.transformer.parameter_init import initialize_model
from megatron.core.transformer.pipeline_layers import stage_of, wide_messages
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_SHARED_WEIGHT = "embedding.word_embeddings.weight"
_POSITION_EMBEDDINGS = ("learned_absolute", "rope", "yarn", "none")


class GPTModel(LanguageModule):
    """A decoder-only transformer whose parameters have Megatron-Core's names and layouts.

    It is built on torch's default device (``with torch.device(...):`` chooses another). Initial weights are a function of
    ``config.init_seed``, parameter name and shape. On the meta device they are left out; ``to_empty`` and then each module's
    ``reset_parameters()`` give the same values.

    Args:
        transformer_layer_spec: the spec of one layer, or of the block.
        vocab_size: rows of the embedding, padding included.
        max_sequence_length: number of learned positions.
        pre_process: whether this stage has the embedding; of several pipeline stages the first alone.
        post_process: whether this stage has the final norm and the output layer; of several stages the last alone.
        parallel_output: forward returns this tensor-parallel rank's part of the logits; False: all of them.
        share_embeddings_and_output_weights: the output layer uses the word embedding's weight. A last stage without
            embedding has a copy of it, which starts with the same values (see ``canonical_name``).
        rotary_percent, rotary_base, rope_scaling, rope_scaling_factor, seq_len_interpolation_factor: see
            ``RotaryEmbedding``; used only with position_embedding_type="rope". With an ``MLATransformerConfig`` rotary positions
            are those of its own fields, whatever the type is, and only learned ones are added; the last three must be left out.
        scatter_embedding_sequence_parallel: with sequence parallelism the embedding's output is this rank's part of the
            sequence; False: the whole sequence, for callers that add to it and scatter it themselves (``decoder_input``).
        pg_collection: the process groups over which the model is split; each rank builds its part. None: those of
            ``parallel_state``, and where it has none the model is not split. With the groups of ``parallel_state`` degrees
            that ``config`` leaves at 1 are set to theirs.
        vp_stage: which of the rank's virtual stages this is, where it has several.
        mtp_block_spec: of ``get_gpt_mtp_block_spec``, where the configuration has layers of multi-token prediction. Their stage has
            a copy of the embedding, if it is not the first.
        logit_dtype: must be None.

    Raises:
        ValueError: an argument is out of range, or the process groups have other sizes than the configuration says.
        NotImplementedError: an argument asks for something that is not served; the message names it.

    Source: Megatron-Core's GPTModel (names, signature, layouts and order of operations).
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        config.check_has_width()
        if config.is_hybrid_model and config.hybrid_layer_pattern is None:
            raise ValueError(
                "is_hybrid_model must be False without hybrid_layer_pattern, got True: no layer has states; give the pattern to "
                "TransformerConfig or to HybridModel"
            )
        _check_arguments(vocab_size, max_sequence_length, position_embedding_type)
        _check_served(
            fp16_lm_cross_entropy=fp16_lm_cross_entropy,
            logit_dtype=logit_dtype,
        )
        if pg_collection is None:
            take_default_degrees(config)
        _check_degrees(config, pg_collection)
        self.vp_stage = vp_stage
        _check_stage(config, pre_process, post_process, group_of(pg_collection, "pp"), vp_stage)
        _check_copies(
            config,
            ties=share_embeddings_and_output_weights,
            learns_positions=position_embedding_type == "learned_absolute",
        )
        self.transformer_layer_spec = transformer_layer_spec
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.mtp_block_spec = mtp_block_spec
        self.mtp_process = _has_mtp(config, mtp_block_spec, group_of(pg_collection, "pp"), vp_stage)
        self.parallel_output = parallel_output
        self.scatter_embedding_sequence_parallel = scatter_embedding_sequence_parallel
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.model_type = ModelType.encoder_or_decoder
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if isinstance(config, MLATransformerConfig):
            _check_rope_of_mla(rope_scaling=rope_scaling, seq_len_interpolation_factor=seq_len_interpolation_factor)
            self.rotary_pos_emb = mla_rotary_embedding(config, cp_group=self._cp_group)
        elif position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels or 1,
                rotary_percent,
                config.rotary_interleaved,
                seq_len_interpolation_factor,
                rotary_base,
                rope_scaling,
                rope_scaling_factor,
                cp_group=self._cp_group,
            )
        elif position_embedding_type == "yarn":
            self.rotary_pos_emb = _yarn(config, rotary_percent, rotary_base, cp_group=self._cp_group)
        self.window_rotary_pos_emb: RotaryEmbedding | None = None
        if self.rotary_pos_emb is not None and config.window_rotary_base is not None:
            self.window_rotary_pos_emb = RotaryEmbedding(
                config.kv_channels or 1,
                rotary_percent,
                config.rotary_interleaved,
                rotary_base=config.window_rotary_base,
                cp_group=self._cp_group,
            )
        device = torch.get_default_device()
        with torch.device("meta"):
            self._build_modules()
        initialize_model(self, device)
        self._set_rng_tracker()

    def _build_modules(self) -> None:
        config = self.config
        if self.pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                self.max_sequence_length,
                self.position_embedding_type,
                scatter_to_sequence_parallel=self.scatter_embedding_sequence_parallel,
                pg_collection=self.pg_collection,
            )
            self._mark_embedding()
        self.decoder = TransformerBlock(
            config,
            self.transformer_layer_spec,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        if self.mtp_process:
            assert self.mtp_block_spec is not None
            self.mtp = MultiTokenPredictionBlock(
                config, self.mtp_block_spec, vp_stage=self.vp_stage, pg_collection=self.pg_collection
            )
        if self.post_process and config.mtp_num_layers:
            self.mtp_losses = MultiTokenPredictionLosses(config, self.pg_collection)
        if self.post_process:
            is_shared = self.share_embeddings_and_output_weights
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                self.vocab_size,
                config=config,
                init_method=config.embedding_init_method if is_shared or config.use_mup else config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=not self.parallel_output,
                tp_group=self._tp_group,
                skip_weight_param_allocation=self._has_embedding and is_shared,
            )
            if self.output_layer.weight is not None:
                self._mark_shared(self.output_layer)
                if is_shared:
                    # The first stage's embedding is the same parameter: same start, gradient and checkpoint entry.
                    self.output_layer.set_parameter_attribute("weight", "canonical_name", _SHARED_WEIGHT)

    def _set_rng_tracker(self) -> None:
        """Pass one random number tracker to all modules: [Note: random streams of tensor ranks] in tensor_parallel/random.py."""
        if group_size(self._tp_group) == 1:
            return
        if self.pg_collection is None:
            tracker = default_rng_tracker()
        else:
            tracker = CudaRNGStatesTracker(group_rank(self._tp_group), self.config.init_seed)
        for module in self.modules():
            if isinstance(module, MegatronModule):
                module.rng_tracker = tracker

    @property
    def _has_embedding(self) -> bool:
        return self.pre_process or self.mtp_process

    def _mark_embedding(self) -> None:
        """Mark the embedding, which another stage may have a copy of, or which is a copy itself."""
        self._mark_shared(self.embedding.word_embeddings)
        if not self.config.mtp_num_layers or group_size(group_of(self.pg_collection, "pp")) == 1:
            return
        for name, module in self.embedding.named_children():
            module.set_parameter_attribute("weight", "shared_embedding", True)
            if not self.pre_process:
                module.set_parameter_attribute("weight", "canonical_name", f"embedding.{name}.weight")

    def _mark_shared(self, module: Any) -> None:
        """Set the attributes by which optimizers and engines recognise embedding and output weights."""
        module.set_parameter_attribute("weight", "is_embedding_or_output_parameter", True)
        is_embedding = self.share_embeddings_and_output_weights or isinstance(module, VocabParallelEmbedding)
        if is_embedding and self.config.embedding_init_method_std is not None:
            module.set_parameter_attribute("weight", "skip_weight_decay", True)
        if self.share_embeddings_and_output_weights:
            module.set_parameter_attribute("weight", "shared_embedding", True)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor] | None) -> None:
        """Set the input [s, b, h] (or a list of one) of the next forward, where the stage has no embedding.

        Raises:
            ValueError: the list has another length than one.
        """
        if isinstance(input_tensor, list):
            if len(input_tensor) != 1:
                raise ValueError(f"set_input_tensor must be given one tensor, got a list of {len(input_tensor)}")
            input_tensor = input_tensor[0]
        self.decoder.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inference_context: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: None = None,
        loss_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        output_processor: None = None,
        output_processor_context: None = None,
    ) -> torch.Tensor:
        """Compute the loss of each token where labels are given, otherwise logits.

        Args:
            input_ids: [b, s] tokens.
            position_ids: [b, s], used only where positions are learned; None: 0, 1, ... in each sample.
            attention_mask: see ``DotProductAttention.forward``; None is causal.
            decoder_input: [s, b, h] used instead of the embedding; with sequence parallelism the rank's part of s.
            labels: [b, s] tokens to predict.
            packed_seq_params: samples that are packed into one row (b is 1): tokens attend within their own sample, and rotary
                positions begin anew in each; learned ones are those of ``position_ids``.
            extra_block_kwargs: further arguments of the decoder's forward.
            loss_mask: [b, s] which tokens count in the losses of multi-token prediction; None: all. The caller masks the losses
                that are returned.
            padding_mask: in Megatron-Core it takes tokens out of the routers' auxiliary losses; must be None for a model
                with experts, and is ignored for a dense one.

        Returns:
            Losses [b, s], fp32, or logits [b, s, v]; with ``parallel_output`` v is this tensor-parallel rank's part of the
            vocabulary. A stage without output layer returns hidden states [s, b, h], with sequence parallelism the rank's
            part of s.

        Raises:
            NotImplementedError: an inference context, or a padding mask for experts is given.
        """
        _check_served(
            inference_context=inference_context,
            inference_params=inference_params,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
        )
        if padding_mask is not None and self.config.num_moe_experts is not None:
            raise NotImplementedError(
                "GPTModel.forward(padding_mask=...) is not served, got Tensor: routers would count the padding"
            )
        packed = packed_seq_params
        embed = partial(self._embed, is_pack=packed is not None and packed.resets_positions and packed.is_packed)
        if decoder_input is None and self.pre_process:
            decoder_input = embed(input_ids, position_ids)
        cos, sin = self._rotary_tables(decoder_input)
        hidden_states: torch.Tensor = self.decoder(
            decoder_input,
            attention_mask,
            rotary_pos_cos=cos,
            rotary_pos_sin=sin,
            **({} if packed_seq_params is None else {"packed_seq_params": packed_seq_params}),
            **(extra_block_kwargs or {}),
        )
        if self.mtp_process and labels is not None:
            assert input_ids is not None, "a stage with multi-token prediction gets tokens"
            if position_ids is None and self.embedding.add_position_embedding:
                length = input_ids.shape[1] * group_size(self._cp_group)
                position_ids = positions_on_this_cp_rank(length, self._cp_group, input_ids.device).expand_as(input_ids)
            hidden_states = self.mtp(
                input_ids,
                position_ids,
                hidden_states,
                (attention_mask, None, cos, sin, *([] if packed_seq_params is None else [packed_seq_params])),
                embedding=embed,
                packed_seq_params=packed_seq_params,
            )
        if not self.post_process:
            return hidden_states
        if labels is None:
            return self._logits(hidden_states, runtime_gather_output).transpose(0, 1).contiguous()
        # The loss is computed from each rank's part of the logits.
        gathers = False if runtime_gather_output is None else runtime_gather_output
        if self.config.mtp_num_layers:
            hidden_states = self.mtp_losses(
                hidden_states,
                labels,
                loss_mask,
                partial(self._token_losses, gathers),
                packed_seq_params=packed_seq_params,
            )
        return self._token_losses(gathers, hidden_states, labels)

    def _embed(
        self, input_ids: torch.Tensor | None, position_ids: torch.Tensor | None, *, is_pack: bool
    ) -> torch.Tensor:
        # Unless it matters, an embedding in this one's place is called with Megatron-Core's arguments.
        more = {"is_pack": True} if is_pack else {}
        embedded: torch.Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids, **more)
        if self.config.sequence_parallel and not self.scatter_embedding_sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded, self._tp_group)
        return embedded

    def _logits(self, hidden_states: torch.Tensor, gathers: bool | None) -> torch.Tensor:
        """Compute logits [s, b, v] from hidden states [s, b, h]."""
        # A last stage without embedding has its own copy in the output layer.
        uses_embedding = self.share_embeddings_and_output_weights and self._has_embedding
        weight = self.embedding.word_embeddings.weight if uses_embedding else None
        logits: torch.Tensor
        logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=gathers)
        return logits * self.config.mup_output_mult if self.config.use_mup else logits

    def _token_losses(self, gathers: bool, hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the losses [b, s] of tokens from hidden states [s, b, h]."""
        logits = self._logits(hidden_states, gathers)
        if self.config.cross_entropy_loss_fusion:
            return self.compute_language_model_loss(labels, logits, overwrite_logits=True)
        return self.compute_language_model_loss(labels, logits)

    def _rotary_tables(self, decoder_input: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.rotary_pos_emb is None:
            return None, None
        if not len(self.decoder.layers) and not self.mtp_process:
            return None, None
        hidden_states = decoder_input if self.pre_process else self.decoder.input_tensor
        assert hidden_states is not None, "a first stage has an embedding; the decoder of a later one raises before"
        # Attention gets the whole sequence also with sequence parallelism, where hidden states are a part of it.
        parts = group_size(self._tp_group) if self.config.sequence_parallel else 1
        parts *= group_size(self._cp_group)
        length, device = hidden_states.shape[0] * parts, hidden_states.device
        tables = self.rotary_pos_emb.get_cos_sin(length, device)
        if self.window_rotary_pos_emb is None:
            return tables
        of_windows = self.window_rotary_pos_emb.get_cos_sin(length, device)
        return torch.stack((tables[0], of_windows[0])), torch.stack((tables[1], of_windows[1]))


def _yarn(
    config: TransformerConfig, rotary_percent: float, rotary_base: float, *, cp_group: ProcessGroup | None
) -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(
        config.kv_channels or 1,
        rotary_percent,
        config.rotary_interleaved,
        rotary_base=rotary_base,
        scaling_factor=config.yarn_rotary_scaling_factor,
        original_max_position_embeddings=config.yarn_original_max_position_embeddings,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.yarn_mscale,
        mscale_all_dim=config.yarn_mscale_all_dim,
        correction_range_round_to_int=config.yarn_correction_range_round_to_int,
        cp_group=cp_group,
    )


def _check_arguments(
    vocab_size: int,
    max_sequence_length: int,
    position_embedding_type: str,
) -> None:
    if vocab_size < 1 or max_sequence_length < 1:
        raise ValueError(
            f"vocab_size and max_sequence_length must be at least 1, got {vocab_size} and {max_sequence_length}"
        )
    if position_embedding_type not in _POSITION_EMBEDDINGS:
        raise NotImplementedError(
            f"position_embedding_type must be one of {', '.join(_POSITION_EMBEDDINGS)}, got {position_embedding_type!r}"
        )


_NOT_SERVED: Served = {
    "fp16_lm_cross_entropy": (ANY, "the cross entropy is always in fp32, as in Megatron-Core"),
    "logit_dtype": ((None,), "logits have the dtype of the output layer"),
    "inference_context": ((None,), "the model has no cache of keys and values"),
    "inference_params": ((None,), "the model has no cache of keys and values"),
    "output_processor": ((None,), "process what forward returns"),
    "output_processor_context": ((None,), "process what forward returns"),
}


def _check_served(**given: object) -> None:
    check_arguments("GPTModel", given, _NOT_SERVED)


def _check_rope_of_mla(*, rope_scaling: bool, seq_len_interpolation_factor: float | None) -> None:
    if rope_scaling or seq_len_interpolation_factor is not None:
        raise NotImplementedError(
            f"GPTModel(rope_scaling={rope_scaling}, seq_len_interpolation_factor={seq_len_interpolation_factor}) is not served with"
            " multi-latent attention; use rope_type and rotary_scaling_factor of MLATransformerConfig"
        )


def _has_mtp(config: TransformerConfig, spec: object, ranks: ProcessGroup | None, vp_stage: int | None) -> bool:
    """Return whether the stage has the layers of multi-token prediction.

    Raises:
        ValueError: it has, and there is no spec of them; or there is one, and the configuration has no such layers.
    """
    stage = stage_of(config, pp_rank=group_rank(ranks), vp_stage=vp_stage, num_ranks=group_size(ranks))
    if (spec is None and stage.mtp > 0) or (spec is not None and not config.mtp_num_layers):
        raise ValueError(
            "mtp_block_spec must be given where a stage has layers of multi-token prediction, and be None where a model has none, "
            f"got {spec} and {stage.mtp} layers; use get_gpt_mtp_block_spec(config, ...) and mtp_num_layers"
        )
    return stage.mtp > 0


def _check_copies(config: TransformerConfig, *, ties: bool, learns_positions: bool) -> None:
    """Raise where stages would share other parameters of the embedding with one stage than with another."""
    if config.mtp_num_layers and ties and learns_positions and wide_messages(config):
        raise NotImplementedError(
            "share_embeddings_and_output_weights with learned positions is not served where pipeline_model_parallel_layout puts "
            f"multi-token prediction apart from the loss, got {config.pipeline_model_parallel_layout}; put m and L into one stage, "
            "untie the weights, or use rotary positions"
        )


def _check_stage(
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    ranks: ProcessGroup | None,
    vp_stage: int | None,
) -> None:
    """Raise where another stage than the first has the embedding, or another than the last has the output layer."""
    num_stages = group_size(ranks) * (config.virtual_pipeline_model_parallel_size or 1)
    stage = stage_of(config, pp_rank=group_rank(ranks), vp_stage=vp_stage, num_ranks=group_size(ranks)).index
    if num_stages > 1 and (pre_process, post_process) != (stage == 0, stage == num_stages - 1):
        raise ValueError(
            f"of {num_stages} pipeline stages only the first must have pre_process=True and only the last post_process=True, "
            f"got pre_process={pre_process}, post_process={post_process} on stage {stage}"
        )


def _check_degrees(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
    """Raise where configuration and process groups disagree: only a part of the model would be split."""
    for name, field in (("tp", "tensor_model_parallel_size"), ("cp", "context_parallel_size")):
        num_ranks = group_size(group_of(pg_collection, name))
        if num_ranks != getattr(config, field):
            raise ValueError(
                f"pg_collection.{name} must have TransformerConfig.{field} ({getattr(config, field)}) ranks, got"
                f" {num_ranks}; pass the collection that was built for this configuration"
            )
