"""The router of a mixture-of-experts layer.

Shapes: s sequence, b batch, h hidden size, t tokens (s * b), e experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.process_groups_config import group_of, group_size
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.moe.auxiliary_losses import AuxiliaryLosses, RunningCounts, balancing_losses
from megatron.core.transformer.moe.loss_record import AuxiliaryLossRecord, auxiliary_loss_names, balancing_loss_name
from megatron.core.transformer.moe.loss_tracker import save_to_aux_losses_tracker
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.routing import Routing, logits_of, route
from megatron.core.transformer.parameter_init import InitializedParameters
from megatron.core.transformer.recomputation import repeats_a_forward

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class Router(InitializedParameters):
    """The weight, and with ``add_bias_linear`` the bias, that give each token a logit for each expert.

    Args:
        pg_collection: ``tp_cp`` are the ranks that share a microbatch's tokens, ``cp`` those of them whose gradients are
            averaged.

    Attributes:
        layer_number: of its layer in the whole model, from 1; None: not known.

    Raises:
        ValueError: ``tp_cp`` is not tp x cp ranks.

    Source: Megatron-Core's Router (names).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__(config)
        check_layer_arguments(type(self).__name__, is_mtp_layer=is_mtp_layer)
        assert config.num_moe_experts and config.init_method, "routers are built with experts; init_method is derived"
        self.num_experts = config.num_moe_experts
        self.layer_number: int | None = None
        marks: dict[str, Any] = {"sequence_parallel": True} if config.sequence_parallel else {}
        self.add_parameter("weight", (config.num_moe_experts, config.hidden_size), config.init_method, **marks)
        if config.add_bias_linear:
            self.add_parameter("bias", (config.num_moe_experts,), config.init_method, **marks)
        else:
            self.register_parameter("bias", None)
        self.tp_cp_group = group_of(pg_collection, "tp_cp")
        self.cp_size = group_size(group_of(pg_collection, "cp"))
        expected = self.cp_size * group_size(group_of(pg_collection, "tp"))
        if group_size(self.tp_cp_group) != expected:
            raise ValueError(
                f"pg_collection.tp_cp must hold the ranks of tp and cp ({expected}), got {group_size(self.tp_cp_group)}"
            )
        self.dp_group = group_of(pg_collection, "dp")

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the logits in ``moe_router_dtype``: [..., h] -> [..., e]."""
        return logits_of(input, self.weight, self.bias, self.config)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the router's layer in the whole model, from 1."""
        self.layer_number = layer_number


class TopKRouter(Router):
    """A router that chooses the top-k experts of each token; in training its backward adds the auxiliary losses' gradients.

    With ``moe_router_enable_expert_bias`` it has two buffers, see [Note: expert bias] in ``expert_bias.py``: the bias, which is in
    checkpoints and stays in fp32 whatever the model is converted to, and this rank's counts of assignments in a step. With
    ``moe_enable_routing_replay`` it has a ``RouterReplay``.

    Attributes:
        num_forwards: in each microbatch, over which auxiliary losses are means: several in a layer of multi-token prediction that
            is repeated.

    Source: Megatron-Core's TopKRouter (names, arithmetic, defaults).
    """

    expert_bias: torch.Tensor | None
    local_tokens_per_expert: torch.Tensor
    loss_scale: torch.Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__(config, pg_collection, is_mtp_layer)
        self.running_counts = RunningCounts()
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        self.loss_record: AuxiliaryLossRecord | None = None
        self.frozen_expert_bias = False
        self.num_forwards = 1
        if config.moe_router_enable_expert_bias:
            self.register_buffer("expert_bias", torch.empty(self.num_experts, dtype=torch.float32))
            # Not in fp32, in which sums of ones end at 2**24.
            counts = torch.empty(self.num_experts, dtype=torch.int64)
            self.register_buffer("local_tokens_per_expert", counts, persistent=False)
        else:
            self.expert_bias = None
        self.set_num_microbatches(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters and buffers with their initial values. Ranks: each alone, no communication."""
        super().reset_parameters()
        if self.expert_bias is not None:
            self.expert_bias.zero_()
            self.local_tokens_per_expert.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TopKRouter:
        """Apply a conversion as ``torch.nn.Module`` does, but keep the expert bias in fp32."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype is not torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def count(self, assignments: torch.Tensor) -> None:
        """Add the [e] assignments of a microbatch to those of the step, in training and where backward does not recompute it."""
        if self.training and torch.is_grad_enabled() and not repeats_a_forward():
            self.local_tokens_per_expert += assignments

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Scale auxiliary losses for steps of this many microbatches (1 at first).

        See [Note: scale of auxiliary losses].
        """
        self.aux_loss_scale = 1.0 if self.config.calculate_per_token_loss else self.cp_size / num_microbatches

    def forward(
        self, hidden_states: torch.Tensor, *, dense: bool = True
    ) -> Routing | tuple[torch.Tensor, torch.Tensor]:
        """Route the s * b tokens of [s, b, h].

        Args:
            dense: return factors and routing map as Megatron-Core does, [t, e] each, without the assignments that the capacity of
                experts drops (and with those that pad them); False: the ``Routing``, of which the dispatcher drops them.

        Ranks: all of ``tp_cp``, in training with a load-balancing loss; all of ``dp`` too, if it is the global one.
        """
        # What the configuration asks for now: callers change coefficients between steps.
        losses = self._losses(hidden_states) if self.training and torch.is_grad_enabled() else None
        routing, balancing, z_loss = route(
            hidden_states,
            self.weight,
            self.config,
            losses,
            bias=self.bias,
            expert_bias=self.expert_bias,
            training=self.training,
            replay=self.router_replay,
        )
        if losses is not None:
            for kind, loss in zip(losses.balancing, balancing, strict=True):
                self._log(balancing_loss_name(kind), loss)
            if z_loss is not None:
                self._log("z_loss", z_loss)
        return self._dense(routing) if dense else routing

    def _dense(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        config, shape = self.config, (routing.probs.shape[0], self.num_experts)
        probs = routing.probs.new_zeros(shape).scatter(1, routing.experts, routing.probs)
        routing_map = torch.zeros(shape, dtype=torch.bool, device=probs.device).scatter(1, routing.experts, True)
        if config.moe_expert_capacity_factor is None:
            return probs, routing_map
        policy, pads = config.moe_token_drop_policy, config.moe_pad_expert_input_to_capacity
        return apply_router_token_dropping(
            probs, routing_map, config.moe_router_topk, config.moe_expert_capacity_factor, policy, pads
        )

    def _log(self, name: str, loss: torch.Tensor) -> None:
        """Record this rank's part of a loss for the log of the training loop, or else of callers."""
        if self.loss_record is not None:
            self.loss_record.add(name, loss)
        elif self.layer_number is not None and not repeats_a_forward():
            num_layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
            save_to_aux_losses_tracker(name, loss, self.layer_number, num_layers, reduce_group=self.tp_cp_group)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the router's layer in the whole model, from 1."""
        super().set_layer_number(layer_number)
        if self.router_replay is not None:
            self.router_replay.layer_number = layer_number

    def _losses(self, hidden_states: torch.Tensor) -> AuxiliaryLosses | None:
        config, (sequence, batch), balancing = self.config, hidden_states.shape[:2], balancing_losses(self.config)
        if not balancing and config.moe_z_loss_coeff is None:
            return None
        per_token = sequence * batch * group_size(self.tp_cp_group) if config.calculate_per_token_loss else 1
        return AuxiliaryLosses(
            balancing=balancing,
            z=config.moe_z_loss_coeff,
            scale=self.aux_loss_scale * per_token,
            loss_scale=self.loss_scale,
            num_forwards=self.num_forwards,
            num_sequences=batch if "seq_aux_loss" in balancing else 1,
            group=self.tp_cp_group,
            running=self.running_counts,
            data_group=self.dp_group,
        )

    def extra_repr(self) -> str:
        return f"{self.config.hidden_size}, {self.config.num_moe_experts}, topk={self.config.moe_router_topk}"


def set_num_microbatches(model: torch.nn.Module, num_microbatches: int) -> None:
    """Tell all modules whose backward adds losses of their own how many microbatches a step has, by which they scale these.

    Such modules have a method ``set_num_microbatches``. Call it before training and whenever the number changes; it visits all
    modules.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "set_num_microbatches"):
            module.set_num_microbatches(num_microbatches)


def set_loss_scale(model: torch.nn.Module, scale: torch.Tensor | None) -> None:
    """Tell all modules whose backward adds losses of their own by what the main loss is multiplied; None: by nothing.

    Such modules have the attribute ``loss_scale``, None at first. Call it before training with the tensor [1] that always
    holds the scale; it visits all modules.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "loss_scale"):
            module.loss_scale = scale


def forget_running_counts(model: torch.nn.Module) -> None:
    """Let the global load-balancing loss count anew; it visits all modules."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.running_counts.clear()


def record_auxiliary_losses(model: torch.nn.Module, config: TransformerConfig) -> AuxiliaryLossRecord | None:
    """Attach a record to the modules that have losses of their own, such as routers; None where the configuration has none.

    The caller must call ``clear`` before and ``take`` after every step: until then it keeps one tensor for each loss and
    forward, and the global load-balancing loss counts on (or until ``finalize_model_grads``).

    Ranks: each alone. A pipeline stage without such modules gets a record of zeros.
    """
    names = auxiliary_loss_names(config)
    if not names:
        return None
    record = AuxiliaryLossRecord(names)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "loss_record"):
            module.loss_record = record
        if getattr(module, "running_counts", None) is not None:
            record.running_counts.append(module.running_counts)
    return record
