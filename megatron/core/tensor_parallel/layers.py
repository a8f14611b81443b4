"""Linear layers and the vocabulary embedding, under Megatron-Core's names and signatures.

Tensor parallelism has degree 1 here, so column- and row-parallel layers hold whole weights; the names say how a weight
will be cut. Shapes: s sequence, b batch, i input size, o output size, v vocabulary, h hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from megatron.core.transformer.parameter_init import ConstantInit, InitializedParameters, InitMethod

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class _Linear(InitializedParameters):
    """y = x A^T + b, with A [o, i] and b [o]."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool = True,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
    ) -> None:
        super().__init__(config)
        if is_expert:
            raise NotImplementedError("is_expert must be False, got True: mixture of experts is not served yet")
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self.add_parameter("weight", (output_size, input_size), init_method)
        if bias:
            self.add_parameter("bias", (output_size,), ConstantInit(0.0))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if weight is None:
            weight = self.weight
        if weight is None:
            raise RuntimeError(
                f"{type(self).__name__} must be given a weight since it holds none (skip_weight_param_allocation), got"
                " None; pass weight="
            )
        bias = None if self.skip_bias_add else self.bias
        fused = self.config.gradient_accumulation_fusion
        output = linear_with_main_grad(x, weight, bias, write_main_grad=fused)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}"


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features will be split over tensor-parallel ranks.

    Args:
        gather_output: with one tensor-parallel rank, outputs are whole either way.
        skip_bias_add: return the bias beside the output instead of adding it.
        skip_weight_param_allocation: hold no weight; ``forward`` must be given one.
    """

    def __init__(self, input_size: int, output_size: int, *, gather_output: bool = False, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.gather_output = gather_output

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., i] -> [..., o], and the bias where it was not added (else None)."""
        return self._multiply(input_, weight)


class RowParallelLinear(_Linear):
    """A linear layer whose input features will be split over tensor-parallel ranks.

    Args:
        input_is_parallel: with one tensor-parallel rank, inputs are whole either way.
    """

    def __init__(self, input_size: int, output_size: int, *, input_is_parallel: bool = True, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.input_is_parallel = input_is_parallel

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., i] -> [..., o], and the bias where it was not added (else None)."""
        return self._multiply(input_, None)


class Embedding(InitializedParameters):
    """A table of [num_embeddings, embedding_dim] weights, looked up by row."""

    weight: torch.Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, init_method: InitMethod, config: TransformerConfig
    ) -> None:
        super().__init__(config)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.add_parameter("weight", (num_embeddings, embedding_dim), init_method)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[...] row numbers -> [..., embedding_dim]."""
        return F.embedding(input_, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class VocabParallelEmbedding(Embedding):
    """The word embedding, whose rows will be split over tensor-parallel ranks."""
