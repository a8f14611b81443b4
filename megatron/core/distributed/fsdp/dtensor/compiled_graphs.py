"""Keys of torch's cache of compiled graphs, for DTensors of which ranks hold unequal parts.

torch keys a graph with a DTensor among its inputs by the DTensor's own shape and placements, and compiles it for the local tensor's
shape. Ranks of one host share the cache on disk, so a rank would run a graph that was compiled for another rank's part: an error, or
reads behind the part's end. The first that found it was torchao's 8-bit AdamW, which compiles its update.
Delete this file when the key has the local tensor's shape.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard

_NAME = "_stable_hash_for_caching"
_of_torch: Any = getattr(DTensor, _NAME, None)


def _key(self: DTensor) -> str:
    own: str = _of_torch(self)
    if not any(isinstance(placement, UnevenShard) for placement in self.placements):
        return own
    local = self._local_tensor
    return f"{own} {tuple(local.shape)} {tuple(local.stride())}"


if _of_torch is not None:
    setattr(DTensor, _NAME, _key)
