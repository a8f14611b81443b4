"""The routed experts of one rank.

Shapes: r rows of this rank's experts, l experts of this rank, h hidden size, f width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.activations import quick_gelu
from megatron.core.fusions.clamped_glu import clamped_glu
from megatron.core.module_names import ModuleListPart
from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_gemm import can_group, grouped_linear
from megatron.core.transformer.moe.weighted_activation import weighted_swiglu
from megatron.core.transformer.spec_utils import build_module

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.linear_function import Later
    from megatron.core.transformer.moe.token_exchange import ExpertRows
    from megatron.core.transformer.transformer_config import TransformerConfig


class ExpertMLP(MLP):
    """An MLP whose result is scaled row by row: probs * (fc2(activation(fc1(x))) + bias).

    The factor is applied before fc2, so that autograd need not keep fc2's result for the router's gradient.

    Where matrices are split over ``pg_collection.expt_tp``, the results of these ranks are summands of the expert's, and the first of
    them alone adds the bias.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adds_bias = group_rank(group_of(kwargs.get("pg_collection"), "expt_tp")) == 0

    def own_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds of fc2's bias; its gradient is that of the whole bias on all ranks, since all have the rows."""
        own: torch.Tensor = bias if self.adds_bias else _Zeros.apply(bias)  # type: ignore[no-untyped-call, unused-ignore]
        return own

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute [r, h] rows of this expert, scaled by their factors [r]; the second item, a bias, is always None."""
        intermediate, bias = self.linear_fc1(hidden_states)
        output, bias = self.linear_fc2(self.activate_scaled(intermediate, bias, probs))
        return output if bias is None else output + scaled(self.own_bias(bias), probs), None

    def activate_scaled(self, x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        """Activate [r, f] (or [r, 2f] where gated) and scale by [r] to [r, f]; ``bias`` None: x includes it already."""
        config = self.config
        if config.bias_activation_fusion and self.is_swiglu and bias is None:
            return weighted_swiglu(x, probs, compiled=not config.disable_jit_fuser)
        if config.bias_activation_fusion and config.gated_linear_unit and self.activation_func is quick_gelu:
            return clamped_glu(x, bias, probs, **self.glu_settings())
        return scaled(self._activate(x, bias), probs)


class _Zeros(torch.autograd.Function):
    """Zeros in the place of a tensor, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def scaled(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Multiply [r, f] (or [f]) by [r] and return the dtype of x."""
    return (x * probs.unsqueeze(1)).to(x.dtype)


def _first_expert(
    num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection | None
) -> int:
    """Return the number of this rank's first expert, once their number is checked."""
    ep_group = group_of(pg_collection, "ep")
    if num_local_experts * group_size(ep_group) != config.num_moe_experts:
        raise ValueError(
            f"num_local_experts must be num_moe_experts ({config.num_moe_experts}) / {group_size(ep_group)} ranks, got"
            f" {num_local_experts}"
        )
    return group_rank(ep_group) * num_local_experts


class SequentialMLP(MegatronModule):
    """This rank's experts, computed one after the other; experts without rows run too and get gradients of zeros.

    Each rank numbers its experts from 0, in checkpoints they have numbers in the whole model.

    Args:
        num_local_experts: must be ``num_moe_experts`` divided by the number of ranks of ``pg_collection.ep``.

    Raises:
        ValueError: ``num_local_experts`` is another number.

    Source: Megatron-Core's SequentialMLP (names and arithmetic).
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        first_expert = _first_expert(num_local_experts, config, pg_collection)
        self.num_local_experts = num_local_experts
        experts = [
            ExpertMLP(
                config,
                submodules,
                is_expert=True,
                input_size=config.moe_latent_size or config.hidden_size,
                ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
                pg_collection=pg_collection,
            )
            for _ in range(num_local_experts)
        ]
        self.local_experts = ModuleListPart(experts, first_index=first_expert)

    def forward(self, rows: ExpertRows) -> torch.Tensor:
        """Return the [r, h] scaled results. On CUDA the host waits for the counts unless it knows them."""
        counts = rows.counts_on_host()
        if len(counts) == 1 and not rows.has_padding:
            output: torch.Tensor = self.local_experts[0](rows.hidden_states, rows.probs)[0]
            return output
        x, probs, padding = rows.without_padding(counts)
        pieces = zip(torch.split(x, counts), torch.split(probs, counts), strict=True)
        results = [expert(*piece)[0] for expert, piece in zip(self.local_experts, pieces, strict=True)]
        return torch.cat(results if padding is None else [*results, padding])


class GroupedMLP(SequentialMLP):
    """This rank's experts with one grouped kernel for each layer, where the device has it (see ``can_group``).

    Elsewhere experts are computed one after the other. Names and values are the same either way.
    """

    def forward(self, rows: ExpertRows) -> torch.Tensor:
        """Return the [r, h] scaled results. The host does not wait where the device has the kernel."""
        experts: list[ExpertMLP] = list(self.local_experts)  # type: ignore[arg-type]
        fc1, fc2 = [expert.linear_fc1 for expert in experts], [expert.linear_fc2 for expert in experts]
        weights = [layer.weight for layer in fc1], [layer.weight for layer in fc2]
        if not all(can_group(rows.hidden_states, matrices) for matrices in weights):
            return super().forward(rows)
        biases = [layer.bias for layer in fc1], [layer.bias for layer in fc2]
        return _in_groups(experts[0], rows, weights, biases, (fc1[0].later, fc2[0].later))


def _in_groups(
    expert: ExpertMLP,
    rows: ExpertRows,
    weights: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    biases: tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]],
    later: tuple[Later | None, Later | None] = (None, None),
) -> torch.Tensor:
    """Return the [r, h] scaled results of all experts by one grouped kernel for each layer.

    Args:
        expert: activates and scales; any of them.
        weights, biases: those of l experts, of the first and of the second layer.
        later: as for ``grouped_linear``, of the two layers.
    """
    ends = rows.ends()
    intermediate = grouped_linear(rows.hidden_states, weights[0], ends, later[0])
    bias = _bias_of_rows(biases[0], rows)
    if bias is not None:
        intermediate = intermediate + bias
    output = grouped_linear(expert.activate_scaled(intermediate, None, rows.probs), weights[1], ends, later[1])
    bias = _bias_of_rows([None if bias is None else expert.own_bias(bias) for bias in biases[1]], rows)
    return output if bias is None else output + scaled(bias, rows.probs)


def _bias_of_rows(biases: Sequence[torch.Tensor | None], rows: ExpertRows) -> torch.Tensor | None:
    """Repeat each expert's bias for its rows to [r, f]; None where experts have no bias."""
    if biases[0] is None:
        return None
    num_rows, counts = rows.hidden_states.shape[0], rows.counts
    stack: torch.Tensor = torch.stack(list(biases))  # type: ignore[arg-type]
    if rows.has_padding:  # as if it were of one expert more
        stack = torch.cat((stack, torch.zeros_like(stack[:1])))
        counts = torch.cat((counts, (num_rows - counts.sum()).unsqueeze(0)))
    return stack.repeat_interleave(counts, dim=0, output_size=num_rows)


class TEGroupedMLP(ExpertMLP):
    """This rank's experts with transformer-engine's grouped linear layers, whose weights are ``linear_fc1.weight{local number}``.

    In checkpoints they have the names of ``SequentialMLP``, and they start as its weights do. In bf16 torch's grouped kernel
    multiplies where the device has it: transformer-engine issues GEMMs expert by expert, which takes three times as long.
    ``TransformerConfig.layer_kernels`` can ask for them.

    Args:
        submodules: ``TEColumnParallelGroupedLinear`` and ``TERowParallelGroupedLinear``.

    Raises:
        ValueError: ``num_local_experts`` is not ``num_moe_experts`` divided by the number of ranks of ``pg_collection.ep``.

    Source: Megatron-Core's TEGroupedMLP (names and arithmetic).
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        self.first_expert = _first_expert(num_local_experts, config, pg_collection)
        self.num_local_experts, self.activation_func = num_local_experts, config.activation_func
        self.adds_bias = group_rank(group_of(pg_collection, "expt_tp")) == 0
        width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
        gated, hidden = config.gated_linear_unit, config.moe_latent_size or config.hidden_size
        shared = {"config": config, "bias": config.add_bias_linear, "skip_bias_add": True, "is_expert": True}
        shared["tp_group"] = group_of(pg_collection, "expt_tp")
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            num_local_experts,
            hidden,
            2 * width if gated else width,
            init_method=config.init_method,
            stride=2 if gated else 1,
            **shared,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            num_local_experts,
            width,
            hidden,
            init_method=config.output_layer_init_method,
            **shared,
        )
        self._multiplies_by_torch = config.fp8 is None and config.layer_kernels == "fastest"
        self._padding: tuple[torch.nn.Module, torch.nn.Module] | None = None
        if config.fp8 is not None:
            from megatron.core.extensions.transformer_engine_layers import te

            self._padding = te.Fp8Padding(num_local_experts), te.Fp8Unpadding(num_local_experts)

    @property
    def names_in_checkpoint(self) -> dict[str, str]:
        """Names of the parameters, relative to this module, and those that they have in checkpoints."""
        return {
            f"{layer}.{kind}{index}": f"local_experts.{self.first_expert + index}.{layer}.{kind}"
            for layer in ("linear_fc1", "linear_fc2")
            for kind in ("weight", "bias")
            for index in range(self.num_local_experts)
        }

    def _matrices(self, layer: torch.nn.Module, kind: str) -> list[Any]:
        """Return the weights or biases of the experts' part of a layer; Nones for biases where there are none."""
        if kind == "bias" and not self.config.add_bias_linear:
            return [None] * self.num_local_experts
        return [getattr(layer, f"{kind}{index}") for index in range(self.num_local_experts)]

    def forward(self, rows: ExpertRows) -> torch.Tensor:  # type: ignore[override]
        """Return the [r, h] scaled results. On CUDA the host waits for the counts unless it knows them or the kernel is torch's."""
        if self._multiplies_by_torch:
            weights = self._matrices(self.linear_fc1, "weight"), self._matrices(self.linear_fc2, "weight")
            if all(can_group(rows.hidden_states, matrices) for matrices in weights):
                biases = self._matrices(self.linear_fc1, "bias"), self._matrices(self.linear_fc2, "bias")
                return _in_groups(self, rows, weights, biases)
        own_counts = counts = rows.counts_on_host()
        x, probs, padding = rows.without_padding(counts)
        if self._padding is not None:
            x, counts = self._padding[0](x, own_counts)
            probs = self._padding[0](probs.unsqueeze(1), own_counts)[0].squeeze(1)
        intermediate, biases = self.linear_fc1(x, counts)
        if biases is not None:
            intermediate = intermediate + _repeated(biases, counts)
        output, biases = self.linear_fc2(self.activate_scaled(intermediate, None, probs), counts)
        if biases is not None:
            output = output + scaled(_repeated([self.own_bias(bias) for bias in biases], counts), probs)
        if self._padding is not None:
            output = self._padding[1](output, own_counts)
        return output if padding is None else torch.cat((output, padding))


def _repeated(biases: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Repeat each expert's bias for its rows: l of [f] -> [r, f]."""
    return torch.cat([bias.expand(count, -1) for bias, count in zip(biases, counts, strict=True)])
