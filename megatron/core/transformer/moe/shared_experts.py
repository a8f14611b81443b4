"""The shared expert, which computes all tokens.

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.parameter_init import InitializedParameters

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(InitializedParameters):
    """A dense MLP of width ``moe_shared_expert_intermediate_size``; with a gate, its output times sigmoid(gate_weight x).

    Source: Megatron-Core's SharedExpertMLP (names and arithmetic).
    """

    gate_weight: torch.Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        mlp = MLP(
            config,
            submodules,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            pg_collection=pg_collection,
        )
        # Its layers are registered here, under Megatron-Core's names; the tuple keeps the MLP itself unregistered.
        self.linear_fc1, self.linear_fc2 = mlp.linear_fc1, mlp.linear_fc2
        self._mlp = (mlp,)
        if gate:
            assert config.init_method, "derived by the configuration"
            marks: dict[str, Any] = {"sequence_parallel": True} if config.sequence_parallel else {}
            self.add_parameter("gate_weight", (1, config.hidden_size), config.init_method, **marks)
        else:
            self.register_parameter("gate_weight", None)
        self.reset_parameters()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute [s, b, h] -> [s, b, h]; with sequence parallelism s is this rank's part."""
        output: torch.Tensor = self._mlp[0](hidden_states)[0]
        if self.gate_weight is None:
            return output
        return output * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
