"""The mixture-of-experts layer, which replaces the MLP of a transformer layer.

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.process_groups_config import group_of, group_size
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, WholeLinear
from megatron.core.transformer.hybrid_layers import EXPERTS, kind_of_layer
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import build_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """The specs of the routed experts and of the shared expert (used where the configuration has one)."""

    experts: ModuleSpec | type
    shared_experts: ModuleSpec | type | None = None
    latent_projection: ModuleSpec | type = WholeLinear
    """The layers before and after the routed experts, where these have a width of their own (``moe_latent_size``)."""


def has_experts(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether ``moe_layer_freq``, or ``hybrid_layer_pattern``, makes the layer of this number (1 is the first of the model) a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    if config.hybrid_layer_pattern is not None:
        return kind_of_layer(config, layer_number) == EXPERTS
    if isinstance(config.moe_layer_freq, int):
        return (layer_number - 1) % config.moe_layer_freq == 0
    return bool(config.moe_layer_freq[layer_number - 1])


def num_expert_layers(config: TransformerConfig) -> int:
    """Count the layers of the whole model that are mixtures of experts, those of multi-token prediction included."""
    number = sum(has_experts(config, number) for number in range(1, config.num_layers + 1))
    further = min(config.mtp_num_layers or 0, 1) if config.mtp_use_repeated_layer else config.mtp_num_layers or 0
    return number + further * has_experts(config, config.num_layers)


class BaseMoELayer(MegatronModule):
    """A mixture of experts, with a ``router``; for callers that ask what a module is."""

    router: TopKRouter

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer in the whole model, from 1; the router's losses are logged under it."""
        self.layer_number: int | None = layer_number
        self.router.set_layer_number(layer_number)


class MoELayer(BaseMoELayer):
    """A mixture of experts: for each token the sum of probability * expert(token), plus the shared expert's result.

    Args:
        num_experts: the layer spec's number; must equal ``config.num_moe_experts``.
        pg_collection: experts are divided over ``ep``, and each expert is split over ``expt_tp``.

    Raises:
        ValueError: the spec or the groups do not fit the configuration.

    Source: Megatron-Core's MoELayer (names, signature, arithmetic).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        num_experts: int | None = None,
    ) -> None:
        super().__init__(config)
        check_layer_arguments("MoELayer", is_mtp_layer=is_mtp_layer, name=name)
        if config.num_moe_experts is None or num_experts not in (None, config.num_moe_experts):
            raise ValueError(
                "the layer spec's num_experts must be TransformerConfig.num_moe_experts, got"
                f" {num_experts} and {config.num_moe_experts}; pass the same to both"
            )
        _check_degrees(config, pg_collection)
        self.router = TopKRouter(config, pg_collection)
        if layer_number is not None:
            self.set_layer_number(layer_number)
        self.token_dispatcher = build_dispatcher(config, pg_collection)
        self.experts = build_module(
            submodules.experts,
            config.num_moe_experts // config.expert_model_parallel_size,
            config,
            pg_collection=pg_collection,
        )
        self.has_latent = config.moe_latent_size is not None
        if config.moe_latent_size is not None:
            sizes, latent = (config.hidden_size, config.moe_latent_size), submodules.latent_projection
            self.fc1_latent_proj = _projection(latent, *sizes, config, config.init_method)
            self.fc2_latent_proj = _projection(latent, *sizes[::-1], config, config.output_layer_init_method)
        self.shared_experts: torch.nn.Module | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            if submodules.shared_experts is None:
                raise ValueError(
                    "MoESubmodules.shared_experts must be a spec with moe_shared_expert_intermediate_size, got None"
                )
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                gate=config.moe_shared_expert_gate,
                pg_collection=pg_collection,
            )

    @property
    def passes(self) -> AlternatingPasses | None:
        """What lets two passes take turns during exchanges of tokens."""
        return self.token_dispatcher.passes

    def take_turns(self, passes: AlternatingPasses) -> None:
        """Let two passes take turns during exchanges of tokens.

        Raises:
            NotImplementedError: weight gradients are to be delayed, and the experts are transformer-engine's.
        """
        self.token_dispatcher.passes = passes
        if not passes.delays_weight_gradients:
            return
        linear_layers = [module for name, module in self.experts.named_modules() if name.endswith(("fc1", "fc2"))]
        if not all(isinstance(layer, ColumnParallelLinear | RowParallelLinear) for layer in linear_layers):
            raise NotImplementedError(
                "delay_wgrad_compute must be off with experts of transformer-engine, got it on: their weight gradients are computed in "
                "backward; use transformer_impl='local', or leave it off"
            )
        for layer in linear_layers:
            layer.later = passes.delay

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute [s, b, h] -> [s, b, h]; the second item, a bias, is None since experts add their own.

        Ranks: all of ``ep`` and ``expt_tp``, and in training with a load-balancing loss all of ``tp_cp``.
        """
        routing = self.router(hidden_states, dense=False)
        plan = self.token_dispatcher.plan(routing)
        if self.router.expert_bias is not None:
            self.router.count(plan.assignments_of_experts())
        # Queued before dispatch makes the host wait for the counts, so that the device has work meanwhile.
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        x, probs = hidden_states, routing.probs
        if self.has_latent:
            x = self.fc1_latent_proj(x)[0]
        if self.config.moe_apply_probs_on_input:
            x, probs = (x * probs.view(*x.shape[:-1], 1)).to(x.dtype), torch.ones_like(probs)
        rows = plan.dispatch(x, probs)
        output = plan.combine(self.experts(rows)).view_as(x)
        if self.has_latent:
            output = self.fc2_latent_proj(output)[0]
        if shared is not None:
            output = output + shared
        return output, None


def _projection(
    spec: ModuleSpec | type, input_size: int, output_size: int, config: TransformerConfig, init: Any
) -> Any:
    further = {"skip_bias_add": False, "bias": False, "parallel_mode": "duplicated"}
    if spec is WholeLinear:
        further.pop("parallel_mode")
    return build_module(spec, input_size, output_size, config=config, init_method=init, **further)


def _check_degrees(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
    """Raise where configuration and process groups disagree: experts would be missing, or exist twice."""
    split = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    for name, degree in (("ep", config.expert_model_parallel_size), ("expt_tp", split)):
        num_ranks = group_size(group_of(pg_collection, name))
        if num_ranks != degree:
            raise ValueError(
                f"pg_collection.{name} must have as many ranks as the configuration says ({degree}:"
                f" expert_model_parallel_size {config.expert_model_parallel_size}, expert_tensor_parallel_size"
                f" {config.expert_tensor_parallel_size}, tensor_model_parallel_size {config.tensor_model_parallel_size}),"
                f" got {num_ranks}; pass the collection that was built for it"
            )
