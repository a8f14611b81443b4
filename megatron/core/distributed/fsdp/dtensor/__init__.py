"""DTensors of which ranks hold unequal parts, and the few shims of torch that they need, which importing this installs."""

from megatron.core.distributed.fsdp.dtensor import torch_shims

torch_shims.install()
