"""Multi-token prediction: further layers that predict tokens beyond the next one, whose losses training adds to the main one.

Layer k takes the hidden states of layer k - 1 (the main model's for the first) at a position, and the embedding of the token k
further on; its output, through the main model's output layer, predicts the token behind that one.

[Note: scale of these losses] Each is a mean over the tokens that count in a microbatch, over all context-parallel ranks, times
``mtp_loss_scaling_factor / mtp_num_layers``. Their gradients enter backward beside the main loss's, as those of routers' auxiliary losses do
(``auxiliary_losses.py`` has the factor): times cp / microbatches, or, with ``calculate_per_token_loss``, times the tokens that count for the
main loss, since gradients are divided by all of these later.

Shapes: s sequence, b batch, h hidden size, v vocabulary, K layers of this kind.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2), with Megatron-Core's names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megatron.core.fp8_utils import Quantization, quantize_weights, recomputation_in_fp8
from megatron.core.packed_seq_params import DocumentsOfRows
from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.auxiliary_losses import CallersLossAutoScaler, LossAutoScaler
from megatron.core.transformer.moe.loss_record import AuxiliaryLossRecord, mtp_loss_name
from megatron.core.transformer.moe.loss_tracker import add_value, reduce_values, write
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.pipeline_layers import stages_of
from megatron.core.transformer.recomputation import repeats_a_forward
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import both

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """The modules of a layer: norms of embedding and hidden states, their projection, a transformer layer, and the norm behind it."""

    enorm: ModuleSpec | type
    hnorm: ModuleSpec | type
    layer_norm: ModuleSpec | type
    eh_proj: ModuleSpec | type
    mtp_model_layer: ModuleSpec | type


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """The specs of the layers, one for each; one alone where a layer is applied repeatedly."""

    layer_specs: list[ModuleSpec]


class MultiTokenPredictionLayer(MegatronModule):
    """A layer: hidden states and the embeddings of later tokens -> hidden states.

    Args:
        layer_number: from 1; layers of this kind are counted apart.
        vp_stage, name: accepted.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, group_of(pg_collection, "tp")
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(submodules.enorm, **norm)
        self.hnorm = build_module(submodules.hnorm, **norm)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )
        self.mtp_model_layer = build_module(
            submodules.mtp_model_layer,
            config=config,
            layer_number=layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )
        self.final_layernorm = build_module(submodules.layer_norm, **norm)

    def forward(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Run the layer: [s, b, h] -> [s, b, h].

        Args:
            decoder_input: [s, b, h] embeddings of the tokens ``layer_number`` further on.
            rest: what ``TransformerLayer.forward`` takes behind the hidden states.
        """
        both = torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), dim=-1)
        projected, _ = self.eh_proj(both)
        projected = gather_from_tensor_model_parallel_region(projected, self.tp_group)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, self.tp_group)
        normed: torch.Tensor = self.final_layernorm(self.mtp_model_layer(projected, *rest))
        return normed


class MultiTokenPredictionBlock(MegatronModule):
    """The layers of multi-token prediction, all on one pipeline stage.

    Args:
        spec: of the layers.
        vp_stage, name: accepted.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        submodules: MultiTokenPredictionBlockSubmodules
        submodules = spec if isinstance(spec, MultiTokenPredictionBlockSubmodules) else spec.submodules
        specs = submodules.layer_specs[:1] if config.mtp_use_repeated_layer else submodules.layer_specs
        expected = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers
        if len(specs) != expected:
            raise ValueError(
                f"MultiTokenPredictionBlockSubmodules.layer_specs must hold mtp_num_layers ({config.mtp_num_layers}) specs, got "
                f"{len(specs)}"
            )
        self.cp_group = group_of(pg_collection, "cp")
        self.layers = torch.nn.ModuleList(
            build_module(one, config=config, layer_number=number, pg_collection=pg_collection)
            for number, one in enumerate(specs, start=1)
        )
        if config.mtp_use_repeated_layer:
            for module in self.layers.modules():
                if isinstance(module, TopKRouter):
                    module.num_forwards = config.mtp_num_layers or 1
        self._quantization = None if config.fp8 is None else Quantization(config, pg_collection)
        if config.fp8_param:
            quantize_weights(config, [layer.mtp_model_layer for layer in self.layers])

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        rest: tuple[Any, ...],
        *,
        embedding: Callable[..., torch.Tensor],
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of the main model and of each layer, one behind the other: [s, b, h] -> [(1 + K) s, b, h].

        Args:
            input_ids: [b, s] tokens of the main model.
            position_ids: [b, s] their positions; None: 0, 1, ... in each sample.
            rest: what ``TransformerLayer.forward`` takes behind the hidden states.
            embedding: the model's.

        Ranks: all that share the sequences.
        """
        states = [hidden_states]
        roll = partial(roll_tensor, cp_group=self.cp_group, packed_seq_params=packed_seq_params, return_sum=False)
        for number in range(self.config.mtp_num_layers or 0):
            input_ids, _ = roll(input_ids)
            if position_ids is not None:
                position_ids, _ = roll(position_ids)
            layer = self.layers[0 if self.config.mtp_use_repeated_layer else number]
            decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)
            states.append(self._quantized(layer, states[-1], decoder_input, *rest))
        return torch.cat(states)

    def _quantized(self, layer: torch.nn.Module, *inputs: Any) -> torch.Tensor:
        """Run a layer, in FP8 where configured."""
        quantization = self._quantization
        if quantization is None:
            return self._run(layer, layer, *inputs)
        if not quantization.spans_block:
            return self._run(partial(_in_context, quantization, layer), layer, *inputs)
        # Delayed scales are made at the context's end, which recomputation must not come to again.
        with quantization.of_block([layer]):
            return self._run(layer, layer, *inputs)

    def _run(self, run: Callable[..., Any], layer: torch.nn.Module, *inputs: Any) -> torch.Tensor:
        """Call ``run``, which runs the layer, with recomputation where configured."""
        config = self.config
        output: torch.Tensor
        if config.recompute_granularity != "full" or not (self.training and torch.is_grad_enabled()):
            output = run(*inputs)
            return output
        restores = config.hidden_dropout > 0 or config.attention_dropout > 0
        contexts: Any = self.rng_tracker.recomputation if restores and self.rng_tracker else noop_context_fn
        if self._quantization is not None:
            contexts = partial(both, contexts, partial(recomputation_in_fp8, [layer]))
        output = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=restores, context_fn=contexts)
        return output


def _in_context(quantization: Quantization, layer: torch.nn.Module, *inputs: Any) -> Any:
    with quantization.of_layer(-1):
        return layer(*inputs)


class MultiTokenPredictionLosses(MegatronModule):
    """The losses of multi-token prediction, whose gradients backward adds to the main loss's: [Note: scale of these losses].

    Attributes:
        loss_record: gets the mean of each loss; None: nothing is recorded.
        loss_scale: [1] by what losses are multiplied before backward; None: by nothing.
    """

    loss_scale: torch.Tensor | None = None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.cp_group, self.tp_size = group_of(pg_collection, "cp"), group_size(group_of(pg_collection, "tp"))
        self.dp_cp_group = group_of(pg_collection, "dp_cp")
        self.loss_record: AuxiliaryLossRecord | None = None
        self.set_num_microbatches(1)

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Scale the losses for steps of this many microbatches (1 at first)."""
        is_sum = self.config.calculate_per_token_loss
        self.scale = 1.0 if is_sum else group_size(self.cp_group) / num_microbatches

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor | None,
        token_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of the main model [s, b, h], behind which the losses' gradients begin.

        Args:
            hidden_states: [(1 + K) s, b, h] of ``MultiTokenPredictionBlock``.
            labels: [b, s] tokens that the main model predicts.
            loss_mask: [b, s] 1 where they count; None: everywhere.
            token_losses: (hidden states [s, b, h], labels [b, s]) -> losses [b, s].

        Ranks: all that share the sequences.
        """
        depth = self.config.mtp_num_layers or 0
        main, *further = hidden_states.chunk(1 + depth)
        if not torch.is_grad_enabled():
            return main
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask.float()
        roll = partial(roll_tensor, cp_group=self.cp_group, packed_seq_params=packed_seq_params, return_sum=False)
        sums, counts = [], [mask.sum()]
        for states in further:
            labels, mask = roll(labels)[0], roll(mask)[0]
            sums.append((token_losses(states, labels) * mask).sum())
            counts.append(mask.sum())
        num_tokens = torch.stack(counts)
        if group_size(self.cp_group) > 1:
            dist.all_reduce(num_tokens, group=self.cp_group)
        means = torch.stack(sums) / num_tokens[1:].clamp(min=1.0)
        if self.training:
            for number, mean in enumerate(means.detach(), start=1):
                self._log(number, mean)
        loss = means.sum() * (self.config.mtp_loss_scaling_factor / depth * self.scale)
        if self.config.calculate_per_token_loss:
            loss = loss * num_tokens[0]
        result: torch.Tensor = LossAutoScaler.apply(main, loss, self.loss_scale)
        return result

    def _log(self, number: int, mean: torch.Tensor) -> None:
        """Record this rank's part of a layer's loss for the log of the training loop, or else of callers."""
        if self.loss_record is not None:
            self.loss_record.add(mtp_loss_name(number), mean / self.tp_size)
        elif not repeats_a_forward():
            # The average over cp times cp is the sum of the parts.
            loss, depth = mean * group_size(self.cp_group), self.config.mtp_num_layers or 0
            MTPLossLoggingHelper.save_loss_to_tracker(loss, number - 1, depth, avg_group=self.dp_cp_group)


class MTPLossAutoScaler(CallersLossAutoScaler):
    """For losses of multi-token prediction."""

    main_loss_backward_scale = None


class MTPLossLoggingHelper:
    """The losses of multi-token prediction, for callers with a training loop of their own.

    A model whose ``loss_record`` no training loop has set adds its losses here. ``tracker`` has ``values`` [number of layers],
    their sums since the last ``clean_loss_in_tracker``, and the groups over which these are summed and averaged.
    """

    tracker: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def save_loss_to_tracker(
        loss: torch.Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: ProcessGroup | None = None,
        avg_group: ProcessGroup | None = None,
    ) -> None:
        """Add the loss [] of a layer, counted from 0; nothing if this is None."""
        if layer_number is None:
            return
        tracker = MTPLossLoggingHelper.tracker
        add_value(tracker, layer_number, loss, num_layers)
        tracker.update(reduce_group=reduce_group, avg_group=avg_group)

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Set the values to zero and forget the groups."""
        tracker = MTPLossLoggingHelper.tracker
        if "values" in tracker:
            tracker["values"].zero_()
        tracker.update(reduce_group=None, avg_group=None)

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """Sum and average the values over their groups. Ranks: all of these."""
        tracker = MTPLossLoggingHelper.tracker
        if "values" in tracker:
            reduce_values(tracker["values"], tracker["reduce_group"])
            reduce_values(tracker["values"], tracker["avg_group"], averages=True)

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Complete the losses of a step over ranks, log them, add them to ``total_loss_dict``, and set the values to zero.

        Args:
            loss_scale: factor of the values, 1 / microbatches.

        Ranks: as ``reduce_loss_in_tracker``. Without a loss there, nothing happens.
        """
        MTPLossLoggingHelper.reduce_loss_in_tracker()
        if "values" not in MTPLossLoggingHelper.tracker:
            return
        for number, loss in enumerate(MTPLossLoggingHelper.tracker["values"] * loss_scale, start=1):
            name = mtp_loss_name(number)
            if total_loss_dict is not None:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + loss
            write(writer, wandb_writer, name, loss, iteration)
        MTPLossLoggingHelper.clean_loss_in_tracker()


def roll_tensor(
    tensor: torch.Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    return_sum: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move the entries of each sequence one place to the front; the last one is zero.

    Args:
        tensor: its ``dims`` is the sequence, of which a context-parallel rank of R has the parts r and 2 R - 1 - r of 2 R.
        shifts: must be -1.
        packed_seq_params: of several sequences in a row; each is moved by itself.

    Returns:
        The moved tensor, and its sum if asked for.

    Raises:
        NotImplementedError: another shift; packed sequences that are split.

    Ranks: all of ``cp_group``.
    Source: Megatron-Core's function of this name (signature).
    """
    ranks = group_size(cp_group)
    if shifts != -1 or (packed_seq_params is not None and ranks > 1):
        raise NotImplementedError(
            f"roll_tensor must move by -1, and packed sequences must not be split, got shifts={shifts} on {ranks} ranks"
        )
    rolled = torch.roll(tensor, shifts=-1, dims=dims)
    if ranks == 1:
        last = rolled.select(dims, -1)
        last.zero_()
        if isinstance(packed_seq_params, DocumentsOfRows):
            rolled[..., :-1].masked_fill_(packed_seq_params.ends(), 0)
        elif packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q
            assert ends is not None, "packed sequences have lengths"
            rolled.index_fill_(dims, ends[1:].long() - 1, 0)
    else:
        rolled = _roll_parts(tensor, dims, cp_group)
    return rolled, rolled.sum() if return_sum else None


def _roll_parts(tensor: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    """Move both parts of a context-parallel rank; the entry behind each is the first one of the part that follows."""
    ranks, rank = group_size(group), group_rank(group)
    parts = tensor.chunk(2, dim)
    own = torch.stack([part.select(dim, 0) for part in parts])
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group=group)
    firsts = {}
    for other, (early, late) in enumerate(found):
        firsts[other], firsts[2 * ranks - 1 - other] = early, late
    rolled = []
    for part, index in zip(parts, (rank, 2 * ranks - 1 - rank), strict=True):
        behind = firsts.get(index + 1)
        behind = torch.zeros_like(own[0]) if behind is None else behind
        rolled.append(torch.cat((part.narrow(dim, 1, part.shape[dim] - 1), behind.unsqueeze(dim)), dim))
    return torch.cat(rolled, dim)


def get_mtp_ranks(pp_ranks: Sequence[int], config: TransformerConfig) -> list[int]:
    """Return which of a pipeline's ranks have layers of multi-token prediction, in the order of the stages."""
    return sorted({pp_ranks[stage.index % len(pp_ranks)] for stage in stages_of(config) if stage.mtp})


def get_mtp_layer_spec(mtp_model_layer_spec: ModuleSpec, use_transformer_engine: bool) -> ModuleSpec:
    """Return the spec of a layer whose transformer layer is of the given spec.

    Raises:
        ImportError: transformer-engine cannot be used; gives the reason.
    """
    column: ModuleSpec | type = ColumnParallelLinear
    norm: ModuleSpec | type = WrappedTorchNorm
    if use_transformer_engine:
        from megatron.core.extensions import transformer_engine_layers as te

        column, norm = te.TEColumnParallelLinear, te.TENorm
    return ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=column, mtp_model_layer=mtp_model_layer_spec
        ),
    )
