"""The router of a mixture-of-experts layer.

Shapes: s sequence, b batch, h hidden size, t tokens (s * b), e experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import group_size
from megatron.core.transformer.moe.auxiliary_losses import MoEAuxLossAutoScaler, load_balancing_loss, z_loss
from megatron.core.transformer.moe.loss_record import AuxiliaryLossRecord, auxiliary_loss_names, balancing_loss_name
from megatron.core.transformer.moe.routing import Routing, route, scores_of_all
from megatron.core.transformer.parameter_init import InitializedParameters

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(InitializedParameters):
    """Sends each token to its best experts, and adds the gradients of its auxiliary losses in training's backward.

    Args:
        pg_collection: ``tp_cp`` holds the ranks that share a microbatch's tokens, ``cp`` those of them whose gradients
            are averaged.

    Raises:
        ValueError: ``tp_cp`` is not tp x cp ranks.

    Source: Megatron-Core's TopKRouter (names, arithmetic, defaults).
    """

    weight: torch.Tensor

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        assert config.num_moe_experts and config.init_method, "a router is built for experts only; derived"
        marks: dict[str, Any] = {"sequence_parallel": True} if config.sequence_parallel else {}
        self.add_parameter("weight", (config.num_moe_experts, config.hidden_size), config.init_method, **marks)
        self.tp_cp_group = getattr(pg_collection, "tp_cp", None)
        self.cp_size = group_size(getattr(pg_collection, "cp", None))
        expected = self.cp_size * group_size(getattr(pg_collection, "tp", None))
        if group_size(self.tp_cp_group) != expected:
            raise ValueError(
                f"pg_collection.tp_cp must hold the ranks of tp and cp ({expected}), got {group_size(self.tp_cp_group)}"
            )
        self.loss_record: AuxiliaryLossRecord | None = None
        self.set_num_microbatches(1)
        self.reset_parameters()

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Auxiliary losses are from now on scaled for steps of so many microbatches (1 at first).

        See [Note: scale of auxiliary losses].
        """
        self.aux_loss_scale = 1.0 if self.config.calculate_per_token_loss else self.cp_size / num_microbatches

    def forward(self, hidden_states: torch.Tensor) -> Routing:
        """[s, b, h] -> routing of s * b tokens. Ranks: all of ``tp_cp``, in training with a load-balancing loss."""
        logits = self._logits(hidden_states)
        learns = self.training and torch.is_grad_enabled()
        if learns and self.config.moe_z_loss_coeff is not None:
            loss = z_loss(logits, group=self.tp_cp_group)
            logits = self._with_loss(logits, loss, "z_loss", self.config.moe_z_loss_coeff)
        routing = route(logits, self.config)
        if learns and self.config.moe_aux_loss_coeff != 0.0:
            is_by_sequence = self.config.moe_router_load_balancing_type == "seq_aux_loss"
            loss = load_balancing_loss(
                scores_of_all(logits, self.config.moe_router_score_function),
                routing.experts,
                num_sequences=hidden_states.shape[1] if is_by_sequence else 1,
                group=self.tp_cp_group,
            )
            name, coefficient = balancing_loss_name(self.config), self.config.moe_aux_loss_coeff
            routing = routing._replace(probs=self._with_loss(routing.probs, loss, name, coefficient))
        return routing

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[t, e] in ``moe_router_dtype``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", tokens.dtype)
        return F.linear(tokens.to(dtype), self.weight.to(dtype))

    def _with_loss(self, x: torch.Tensor, loss: torch.Tensor, name: str, coefficient: float) -> torch.Tensor:
        """x of [t, ...], whose backward also starts that of ``coefficient * loss``; the loss is recorded."""
        if self.loss_record is not None:
            self.loss_record.add(name, loss)
        scale = self.aux_loss_scale
        if self.config.calculate_per_token_loss:
            scale *= x.shape[0] * group_size(self.tp_cp_group)
        output: torch.Tensor = MoEAuxLossAutoScaler.apply(x, loss * coefficient, scale)  # type: ignore[no-untyped-call, unused-ignore]
        return output

    def extra_repr(self) -> str:
        return f"{self.config.hidden_size}, {self.config.num_moe_experts}, topk={self.config.moe_router_topk}"


def set_num_microbatches(model: torch.nn.Module, num_microbatches: int) -> None:
    """Afterwards all routers of the model scale their auxiliary losses for steps of ``num_microbatches`` microbatches.

    Call it before training and whenever the number changes; it goes through all modules. A model without experts is
    left as it is.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.set_num_microbatches(num_microbatches)


def record_auxiliary_losses(model: torch.nn.Module, config: TransformerConfig) -> AuxiliaryLossRecord | None:
    """The record that the model's routers add their losses to from now on; None where its configuration has none.

    Whoever asks for it must ``take`` from it in every step: until then it keeps a number for each loss.

    Ranks: each alone. A pipeline stage without routers has a record too, of zeros.
    """
    names = auxiliary_loss_names(config)
    if not names:
        return None
    record = AuxiliaryLossRecord(names)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.loss_record = record
    return record
