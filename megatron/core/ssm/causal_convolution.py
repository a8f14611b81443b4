"""A short causal convolution of each channel, before a layer's recurrence.

Shapes: s sequence, b batch, c channels, k kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange

from megatron.core.transformer.init_methods import UniformInit
from megatron.core.transformer.parameter_init import InitializedParameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.transformer_config import TransformerConfig


class CausalConvolution(InitializedParameters):
    """SiLU of a depthwise convolution over a token and the k - 1 before it, of the same sequence.

    Args:
        channels: of all ranks; each has its part of them.
        tp_group: the ranks that divide the channels.

    Source: the parameters, their names and their initial values are those of torch.nn.Conv1d with as many groups as channels.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, config: TransformerConfig, channels: int, kernel: int, *, bias: bool, tp_group: ProcessGroup | None
    ) -> None:
        super().__init__(config)
        bound = UniformInit(-1.0 / math.sqrt(kernel), 1.0 / math.sqrt(kernel))
        self.add_parameter("weight", (channels, 1, kernel), bound, partition_dim=0, group=tp_group)
        if bias:
            self.add_parameter("bias", (channels,), bound, partition_dim=0, group=tp_group)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve [s, b, c] of this rank's channels."""
        length, (channels, _, kernel) = x.shape[0], self.weight.shape
        # Torch's kernels take [b, c, s]; the zeros that they put behind the sequence are cut off.
        out = F.conv1d(rearrange(x, "s b c -> b c s"), self.weight, self.bias, padding=kernel - 1, groups=channels)
        return rearrange(F.silu(out[..., :length]), "b c s -> s b c")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={self.weight.shape[2]}, bias={self.bias is not None}"
