"""The stack of transformer layers, with recomputation where configured.

Shapes: s sequence, b batch, h hidden size, r rotated width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megatron.core.fp8_utils import Quantization, quantize_weights, recomputation_in_fp8
from megatron.core.module_names import ModuleListPart
from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.offload.offloaded_modules import offload_activations
from megatron.core.transformer.pipeline_layers import get_num_layers_to_build as get_num_layers_to_build
from megatron.core.transformer.pipeline_layers import stage_of
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerBlockSubmodules:
    """The specs of a block's layers, one for each, and of the norm after the last layer (None: no norm)."""

    layer_specs: list[ModuleSpec] | None = None
    layer_norm: ModuleSpec | type | None = None


class TransformerBlock(MegatronModule):
    """The layers of this pipeline stage, numbered from 0, and on the last stage the final norm; ``layer_number`` counts all stages' from 1.

    Args:
        spec: of one layer (all are built from it, with the configured norm at the end), or a block's submodules with the
            specs of the layers of all stages.
        post_layer_norm: whether a norm follows the last layer (only with ``post_process``).
        pre_process: whether this is the first stage; if not, the input is the last argument of ``set_input_tensor``.
        pg_collection: the stages are the ranks of its ``pp``, in order.
        vp_stage: which of the rank's virtual stages this is, where it has several.

    Raises:
        ValueError: the submodules hold another number of layer specs than ``config.num_layers``, or there is no such virtual
            stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: torch.Tensor | None = None
        self.passes: AlternatingPasses | None = None
        submodules = _block_submodules(config, spec)
        ranks = group_of(pg_collection, "pp")
        stage = stage_of(config, pp_rank=group_rank(ranks), vp_stage=vp_stage, num_ranks=group_size(ranks))
        own, self.vp_stage = stage.decoder, vp_stage
        specs = submodules.layer_specs or []
        self.layers = ModuleListPart(
            [
                build_module(specs[index], config=config, layer_number=index + 1, pg_collection=pg_collection)
                for index in own
            ],
            first_index=own.start,
        )
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.offload = offload_activations(config, list(self.layers))
        self._quantization = None if config.fp8 is None else Quantization(config, pg_collection)
        _check_quantized(config, self.layers)
        if config.fp8_param:
            quantize_weights(config, self.layers)
        self.final_layernorm: torch.nn.Module | None = None
        normed = stage.has_final_norm if config.mtp_num_layers else post_process
        if normed and post_layer_norm and submodules.layer_norm is not None:
            self.final_layernorm = build_module(
                submodules.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Set the input [s, b, h] of the next forward, where the block is not on the first stage."""
        self.input_tensor = input_tensor

    def take_turns(self, passes: AlternatingPasses) -> None:
        """Let a backward of another microbatch run while the layers do."""
        self.passes = passes

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Run the layers: [s, b, h] -> [s, b, h]; the other arguments as in ``SelfAttention.forward``.

        Raises:
            RuntimeError: a later stage runs before ``set_input_tensor``.
        """
        if not self.pre_process:
            hidden_states = self.input_tensor
        if hidden_states is None:
            raise RuntimeError("the block must have an input, got None; call set_input_tensor or pass hidden_states")
        rest: tuple[Any, ...] = (attention_mask, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin)
        if packed_seq_params is not None:
            rest = (*rest, packed_seq_params)
        if self.passes is not None:
            self.passes.begin_layers()
        quantization = self._quantization
        if quantization is not None and quantization.spans_block:
            with quantization.of_block(self.layers):
                hidden_states = self._run(hidden_states, rest, None)
        else:
            hidden_states = self._run(hidden_states, rest, quantization)
        if self.passes is not None:
            self.passes.finish()
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _run(
        self, hidden_states: torch.Tensor, rest: tuple[Any, ...], quantization: Quantization | None
    ) -> torch.Tensor:
        """Run the layers; ``quantization``: each in its own context."""
        run_layers: type[_Layers] = _Layers if quantization is None else partial(_QuantizedLayers, quantization)  # type: ignore[assignment]
        for layers, recompute in self._chunks():
            if recompute:
                run = run_layers(layers)
                # Without dropout there is no random state to restore; in a CUDA graph it could not be restored.
                restores = self.config.hidden_dropout > 0 or self.config.attention_dropout > 0
                contexts: Any = self.rng_tracker.recomputation if restores and self.rng_tracker else noop_context_fn
                if self._quantization is not None:
                    contexts = partial(both, contexts, partial(recomputation_in_fp8, layers))
                hidden_states = checkpoint(
                    run,
                    hidden_states,
                    *rest,
                    use_reentrant=False,
                    preserve_rng_state=restores,
                    context_fn=contexts,
                )
            else:
                hidden_states = run_layers(layers)(hidden_states, *rest)
        return hidden_states

    def _chunks(self) -> list[tuple[list[torch.nn.Module], bool]]:
        """Split the layers, in order of execution, into chunks; each comes with whether it is recomputed."""
        layers, config = list(self.layers), self.config
        # Without gradients nothing is saved, so there is nothing to recompute.
        if config.recompute_granularity != "full" or not (self.training and torch.is_grad_enabled()):
            return [(layers, False)]
        size = config.recompute_num_layers or 1
        if config.recompute_method == "block":
            return [([layer], True) for layer in layers[:size]] + [(layers[size:], False)]
        return [(layers[start : start + size], True) for start in range(0, len(layers), size)]


class _Layers:
    """A function that runs layers in order; recomputation calls it a second time."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self.layers = layers

    def __call__(self, hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, *rest)
        return hidden_states


class _QuantizedLayers(_Layers):
    """A function that runs layers in order, each in its own context of quantisation, also in recomputation."""

    def __init__(self, quantization: Quantization, layers: list[torch.nn.Module]) -> None:
        super().__init__(layers)
        self.quantization = quantization

    def __call__(self, hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self.layers:
            number: Any = layer.layer_number
            with self.quantization.of_layer(number - 1):
                hidden_states = layer(hidden_states, *rest)
        return hidden_states


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[_Both, _Both]:
    """Do what two ``context_fn`` of torch.utils.checkpoint do."""
    (forward, repeated), (other_forward, other_repeated) = first(), second()
    return _Both(forward, other_forward), _Both(repeated, other_repeated)


class _Both(AbstractContextManager[None]):
    """Two contexts, the second one within the first."""

    def __init__(self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        self._second.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._second.__exit__(*error)
        self._first.__exit__(*error)


def _check_quantized(config: TransformerConfig, layers: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError where the configuration asks for FP8 and the layers cannot."""
    if config.fp8 is None:
        return
    for layer in layers:
        if not any(hasattr(module, "get_optional_state") for module in layer.modules()):
            raise ValueError(
                f"fp8 must go with layers of transformer-engine, got {config.fp8!r} and a spec of others; use"
                " get_gpt_decoder_block_spec(config, use_transformer_engine=True)"
            )


def _block_submodules(
    config: TransformerConfig, spec: TransformerBlockSubmodules | ModuleSpec
) -> TransformerBlockSubmodules:
    if isinstance(spec, ModuleSpec):
        if issubclass(get_module(spec), TransformerLayer):
            return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=WrappedTorchNorm)
        spec = spec.submodules
    if not isinstance(spec, TransformerBlockSubmodules):
        raise TypeError(
            f"a block's spec must be a ModuleSpec of a TransformerLayer or TransformerBlockSubmodules, got {spec!r}"
        )
    if len(spec.layer_specs or []) != config.num_layers:
        raise ValueError(
            f"TransformerBlockSubmodules.layer_specs must hold num_layers ({config.num_layers}) specs, got"
            f" {len(spec.layer_specs or [])}"
        )
    return spec
