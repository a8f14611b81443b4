"""Linear layers that are split over tensor-parallel ranks, and the vocabulary embedding, under Megatron-Core's names.

Every layer takes its process group as ``tp_group``; with None, or one rank, the layer is not split; where it is left out, it is
the one of ``pg_collection`` or ``parallel_state``. With
``config.sequence_parallel`` each rank holds a part of the sequence between split layers: a column-parallel layer gathers its
input, a row-parallel layer reduce-scatters its output. Layers of experts (``is_expert``) do not communicate: the token
dispatcher brings their rows and sums their results.

Shapes: s sequence, b batch, i input size, o output size, v vocabulary, h hidden size, n ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import DEFAULT_GROUP, group_of, group_or_default, group_rank, group_size
from megatron.core.served_arguments import ANY, check_arguments
from megatron.core.tensor_parallel.attributes import (  # noqa: F401 (Megatron-Core's import path)
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.column_function import column_parallel_linear
from megatron.core.tensor_parallel.linear_function import Later, linear_with_main_grad
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.init_methods import ConstantInit, InitMethod
from megatron.core.transformer.parameter_init import InitializedParameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


_NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "keep_master_weight_for_test": ((False,), "each rank has its part of the weight alone"),
    "embedding_activation_buffer": ((None,), "weight gradients are computed in backward"),
    "grad_output_buffer": ((None,), "weight gradients are computed in backward"),
    "disable_grad_reduce": ((False,), "backward sums the gradient of the input over ranks"),
    "output_dtype": ((None,), "layers compute in params_dtype"),
    "tp_comm_buffer_name": (ANY, "there are no buffers by name"),
    "name": (ANY, "parameters have the names of their modules"),
}
"""Arguments of Megatron-Core's layers: (values that are served, why others are not)."""


class _Linear(InitializedParameters):
    """Base class of the linear layers: y = x A^T + b, with A [o, i] and b [o], of which each rank holds a part.

    Attributes:
        later: may run the computation of an expert's weight gradient later in backward; None: it runs at once.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    later: Later | None = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        stride: int = 1,
        tp_group: ProcessGroup | None = DEFAULT_GROUP,
        pg_collection: ProcessGroupCollection | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config)
        check_arguments(type(self).__name__, others, _NOT_SERVED)
        if pg_collection is not None:
            tp_group = group_of(pg_collection, "expt_tp" if is_expert else "tp")
        tp_group = group_or_default(tp_group, "expt_tp" if is_expert else "tp")
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.is_expert, self.tp_group = is_expert, tp_group
        self.is_split = group_size(tp_group) > 1
        self.communicates = self.is_split and not is_expert
        self.sequence_parallel = config.sequence_parallel and self.communicates
        # Experts are sharded over other data-parallel ranks than dense parameters.
        self._marks: dict[str, Any] = {"allreduce": False} if is_expert else {}
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self._add_weight(init_method, stride)

    def _add_weight(self, init_method: InitMethod, stride: int) -> None:
        raise NotImplementedError

    def _weight(self, given: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise RuntimeError(
                f"{type(self).__name__} must be given a weight since it has none (skip_weight_param_allocation), got"
                " None; pass weight="
            )
        return weight

    def extra_repr(self) -> str:
        split = f", {self.tp_group.size()} ranks" if self.is_split and self.tp_group is not None else ""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{split}"


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features are split over tensor-parallel ranks.

    Args:
        gather_output: gather the features of all ranks.
        skip_bias_add: return the bias beside the output instead of adding it.
        skip_weight_param_allocation: have no weight; ``forward`` must be given one (this rank's part).
        stride: number of matrices that are concatenated in the weight; see [Note: partition stride] in partition.py.
        is_expert: whether the layer is an expert's; ``tp_group`` is then the experts'.

    Raises:
        ValueError: ``output_size`` is not a multiple of stride times ranks.

    Source: Megatron-Core's class of this name (arXiv:1909.08053, section 3); overlap: [Note: what runs beside what] in
    column_function.py.
    """

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool = True, gather_output: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.gather_output = gather_output
        self.output_size_per_partition = part_extent(output_size, kwargs.get("stride", 1), group_size(self.tp_group))
        if bias:
            stride = kwargs.get("stride", 1)
            self._add_part("bias", (output_size,), ConstantInit(0.0), stride)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _add_weight(self, init_method: InitMethod, stride: int) -> None:
        self._add_part("weight", (self.output_size, self.input_size), init_method, stride)

    def _add_part(self, name: str, shape: tuple[int, ...], init_method: InitMethod, stride: int) -> None:
        self.add_parameter(
            name, shape, init_method, partition_dim=0, partition_stride=stride, group=self.tp_group, **self._marks
        )

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute this rank's features of the output.

        Args:
            input_: [s, ..., i]; with sequence parallelism [s/n, ..., i].
            weight: [o/n, i] used instead of the layer's own.
            runtime_gather_output: overrides ``gather_output``.

        Returns:
            [s, ..., o/n], or [s, ..., o] where the output is gathered; and the bias where it was not added, else None.

        Ranks: all of ``tp_group``, unless the layer is an expert's.
        """
        weight, bias = self._weight(weight), None if self.skip_bias_add else self.bias
        fused = self.config.gradient_accumulation_fusion
        if self.communicates:
            assert self.tp_group is not None
            output = column_parallel_linear(
                input_,
                weight,
                bias,
                self.tp_group,
                sequence_parallel=self.sequence_parallel,
                write_main_grad=fused,
            )
            if self.gather_output if runtime_gather_output is None else runtime_gather_output:
                output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        else:
            least = self.config.gradient_accumulation_fusion_min_numel
            output = linear_with_main_grad(
                input_, weight, bias, write_main_grad=fused, min_numel=least, later=self.later
            )
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Linear):
    """A linear layer whose input features are split over tensor-parallel ranks; each rank has the whole bias.

    Args:
        input_is_parallel: whether the input has this rank's features alone; if not, each rank takes its part of them.
        skip_bias_add: return the bias beside the output instead of adding it.
        is_expert: whether the layer is an expert's; its output is then a partial sum.

    Raises:
        ValueError: ``input_size`` is not a multiple of the ranks, or an expert's bias would be added to a partial sum.

    Source: Megatron-Core's class of this name (arXiv:1909.08053, section 3).
    """

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool = True, input_is_parallel: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = part_extent(input_size, 1, group_size(self.tp_group))
        if bias and self.is_split and self.is_expert and not self.skip_bias_add:
            raise ValueError(
                "an expert's RowParallelLinear over several ranks must have skip_bias_add or no bias, got a bias to add:"
                " it would be added on each rank; pass skip_bias_add=True and add it after the sum over ranks"
            )
        if bias:
            marks = self._marks | ({"sequence_parallel": True} if self.sequence_parallel else {})
            self.add_parameter("bias", (output_size,), ConstantInit(0.0), **marks)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _add_weight(self, init_method: InitMethod, stride: int) -> None:
        shape = (self.output_size, self.input_size)
        self.add_parameter(
            "weight",
            shape,
            init_method,
            partition_dim=1,
            partition_stride=stride,
            group=self.tp_group,
            **self._marks,
        )

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute [s, ..., i/n] -> [s, ..., o] ([s/n, ..., o] with sequence parallelism).

        Returns:
            The output, and the bias where it was not added, else None.

        Ranks: all of ``tp_group``, unless the layer is an expert's.
        """
        fused = self.config.gradient_accumulation_fusion
        least = self.config.gradient_accumulation_fusion_min_numel
        bias = None if self.skip_bias_add else self.bias
        if not self.is_split:
            output = linear_with_main_grad(
                input_, self._weight(None), bias, write_main_grad=fused, min_numel=least, later=self.later
            )
            return output, self.bias if self.skip_bias_add else None
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        output = linear_with_main_grad(
            input_, self._weight(None), None, write_main_grad=fused, min_numel=least, later=self.later
        )
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        elif self.communicates:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        if bias is not None:
            output = output + bias
        return output, self.bias if self.skip_bias_add else None


class WholeLinear(_Linear):
    """A linear layer without bias that each tensor-parallel rank has whole and applies to what it has of the sequence.

    Source: ours; in Megatron-Core it is transformer-engine's layer with parallel_mode "duplicated".
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False, **kwargs: Any) -> None:
        if bias:
            raise ValueError("WholeLinear must have bias=False, got True: no layer that uses it has one")
        super().__init__(input_size, output_size, **kwargs | {"tp_group": None})
        self.register_parameter("bias", None)
        self.reset_parameters()

    def _add_weight(self, init_method: InitMethod, stride: int) -> None:
        # With sequence parallelism each rank has a part of the sequence, so gradients are partial sums.
        marks: dict[str, Any] = {"sequence_parallel": True} if self.config.sequence_parallel else {}
        self.add_parameter("weight", (self.output_size, self.input_size), init_method, **marks)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute [s, ..., i] -> [s, ..., o]; return it and None. Ranks: each alone."""
        fused = self.config.gradient_accumulation_fusion
        least = self.config.gradient_accumulation_fusion_min_numel
        return linear_with_main_grad(input_, self._weight(None), None, write_main_grad=fused, min_numel=least), None


class Embedding(InitializedParameters):
    """An embedding table [num_embeddings, embedding_dim], whole on each rank.

    Args:
        attributes: attributes of the weight.
    """

    weight: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: TransformerConfig,
        **attributes: Any,
    ) -> None:
        super().__init__(config)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.add_parameter("weight", (num_embeddings, embedding_dim), init_method, **attributes)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look up the rows of indices [...]: [..., embedding_dim]."""
        return F.embedding(input_, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class VocabParallelEmbedding(Embedding):
    """The word embedding, whose rows are split over tensor-parallel ranks.

    Args:
        reduce_scatter_embeddings: return this rank's part of the sequence alone.

    Raises:
        ValueError: ``num_embeddings`` is not a multiple of the ranks.

    Source: Megatron-Core's class of this name.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: TransformerConfig,
        reduce_scatter_embeddings: bool = False,
        tp_group: ProcessGroup | None = DEFAULT_GROUP,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        tp_group = group_or_default(tp_group, "tp") if pg_collection is None else pg_collection.tp
        super().__init__(
            num_embeddings, embedding_dim, init_method=init_method, config=config, partition_dim=0, group=tp_group
        )
        self.reduce_scatter_embeddings, self.tp_group = reduce_scatter_embeddings, tp_group
        self.num_embeddings_per_partition = part_extent(num_embeddings, 1, group_size(tp_group))
        self.vocab_start_index = group_rank(tp_group) * self.num_embeddings_per_partition

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look up token ids [s, ...]: [s, ..., h], or [s/n, ..., h] with ``reduce_scatter_embeddings``.

        Ranks: all of ``tp_group``.
        """
        if group_size(self.tp_group) == 1:
            return F.embedding(input_, self.weight)
        rows = input_ - self.vocab_start_index
        elsewhere = (rows < 0) | (rows >= self.num_embeddings_per_partition)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(found, self.tp_group)
        return reduce_from_tensor_model_parallel_region(found, self.tp_group)
