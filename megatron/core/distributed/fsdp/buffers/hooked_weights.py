"""Weights of a group whose parameters have hooks that make what is gathered and what is multiplied (``codec/hooked_tensor.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.codec.hooked_tensor import HookCodec, leaves_of, memory_of
from megatron.core.distributed.fsdp.comm.streams import Role


class HookedWeights(Weights):
    """As ``Weights``; the model weight is what the parameters' ``fsdp_pre_all_gather`` return.

    Hooks run once for each weight version, when main weights have changed, and ``fsdp_post_all_gather`` after each
    all-gather. Both may use collectives, so ranks write weights between steps.
    """

    shares_counter = False  # what hooks make are tensors of their own, each with a counter

    def __init__(self, originals: Sequence[torch.Tensor], **settings: Any) -> None:
        codecs: list[HookCodec] = [original.fsdp_codec for original in originals]  # type: ignore[attr-defined]
        self._shells, self._seen = [codec.shell for codec in codecs], codecs[0].seen
        self._metadata: list[Any] = [None] * len(codecs)
        self._tails: list[torch.Size] = [torch.Size()] * len(codecs)
        self._own: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        super().__init__(originals, **settings)
        self._mesh = self.group_mesh.mesh_of_shards(self.placements)

    def held(self, index: int, local: torch.Tensor) -> torch.Tensor:
        return self._shells[index].over(local)

    # ---- main to model weight -----------------------------------------------------------------------------------

    def sync(self, *, casts: bool = True) -> None:
        """Let the hooks encode the main weight anew. Ranks: all of the mesh."""
        for index, parameter in enumerate(self.sharded):
            self._encode_one(index, parameter._local_tensor)  # type: ignore[attr-defined]
        for all_gather, full, shard in self._sync_gathers:
            all_gather(full, shard)
        if not self.needs_gather:
            self._finish_gather()

    def _encode_one(self, index: int, shard: torch.Tensor) -> None:
        assert self.encoded_piece is not None
        shape = self.layout.slots[index].shape
        made, self._metadata[index] = self._shells[index].before_gather(shard, self._mesh, shape, self.dtypes)
        self._tails[index] = made.shape[1:]
        begin, _ = self.main.place_of(index)
        if made.numel():
            self.encoded_piece[begin : begin + made.numel()].view(made.dtype).copy_(made.flatten())

    @property
    def syncs_jointly(self) -> bool:
        return True

    # ---- the full weight ----------------------------------------------------------------------------------------

    def wrap(self, index: int) -> torch.Tensor:
        shell, shard = self._shells[index], self._shells[index].over(self.main.view(index).detach())
        self._encode_one(index, shard)
        made, inner = self._after_gather(index, shard, None)
        if not isinstance(made, torch.Tensor) or made.shape != self.layout.slots[index].shape:
            raise NotImplementedError(
                f"fsdp_post_all_gather of {shell} must return a tensor of shape {list(self.layout.slots[index].shape)} and those "
                f"that it consists of, got {made!r}"
            )
        gathered = self.full.local.untyped_storage()._cdata
        storages = {tensor.untyped_storage()._cdata: tensor for each in inner for tensor in leaves_of(each)}
        self._own[index] = [
            (tensor.untyped_storage(), tensor.untyped_storage().nbytes())
            for address, tensor in storages.items()
            if address != gathered
        ]
        return made

    def _after_gather(self, index: int, shard: Any, out: torch.Tensor | None) -> Any:
        whole = self.full.view(index).view(self._seen)
        outputs = (whole.view(-1, *self._tails[index]),)
        return shard.fsdp_post_all_gather(outputs, self._metadata[index], self.dtypes.compute, out=out)

    def set_parameters(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]) -> None:
        super().set_parameters(sharded, unsharded)
        memory = [memory_of(parameter._local_tensor) for parameter in sharded]  # type: ignore[attr-defined]
        self.freshness.count_writes_to([*self.freshness.tensors, *memory])
        if self.needs_gather and not self.is_unsharded:
            self._free_own()

    def gather(self) -> None:
        super().gather()
        self._finish_gather()
        self.gathered.record(Role.GATHER)  # compute waits for the hooks too

    def _finish_gather(self) -> None:
        """Let the hooks bring the unsharded parameters up to date with what was gathered."""
        for index, (sharded, unsharded) in enumerate(zip(self.sharded, self.unsharded, strict=True)):
            for storage, nbytes in self._own[index]:
                storage.resize_(nbytes)
            self._after_gather(index, sharded._local_tensor, unsharded)  # type: ignore[attr-defined]

    def release(self, *, poisons: bool) -> None:
        super().release(poisons=poisons)
        self._free_own()

    def _free_own(self) -> None:
        for of_one in self._own.values():
            for storage, _ in of_one:
                storage.resize_(0)

    def move(self, flat: torch.Tensor | None, *, copies: bool = False) -> None:
        self._former = self.full.local
        super().move(flat, copies=copies)
        del self._former

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        former = self._former.untyped_storage()._cdata
        for leaf in leaves_of(parameter):
            if leaf.untyped_storage()._cdata == former:
                full, was = self.full.local.view(leaf.dtype), self._former.view(leaf.dtype)
                begin = full.storage_offset() + leaf.storage_offset() - was.storage_offset()
                leaf.data = full.as_strided(leaf.shape, leaf.stride(), begin)
