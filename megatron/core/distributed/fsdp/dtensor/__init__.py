"""DTensors whose ranks hold unequal parts. Importing this package installs the few shims of torch that they need."""

from megatron.core.distributed.fsdp.dtensor import torch_shims

torch_shims.install()
