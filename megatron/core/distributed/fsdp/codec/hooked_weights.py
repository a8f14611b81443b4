"""Parameters whose class defines how they are gathered, by FSDP2's protocol for tensor subclasses.

A tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, such as the weights of torchao's float8 linears,
makes what is gathered of its shard, and what is multiplied of what was gathered. Its sharded parameter is a DTensor whose
local tensor is of the same subclass, over this rank's part of the main weight, so that code which sets attributes on the
shards, such as torchao's ``precompute_float8_dynamic_scale_for_fsdp``, works.

Source: the extension protocol of ``torch.distributed.fsdp.fully_shard`` (its ``_fsdp_param.py`` and torchao's
``float8/fsdp_utils.py``).

See [Note: parameters with hooks].
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

from megatron.core.distributed.fsdp.buffers.weight_codec import ParameterKind, WeightCodec, plain_parameter
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.codec.float8 import NAN_BYTE
from megatron.core.distributed.fsdp.comm.streams import Role
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.dtensor.placements import leaves_of, looks_like, memory_of

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Shell:
    """A subclass without its values: makes tensors of it over other memory.

    Args:
        parameter: of the subclass, which must wrap one tensor of its own shape and dtype, and must be made again by
            ``__tensor_flatten__`` and ``__tensor_unflatten__``.
        name: of the parameter, for errors.
        module: that holds it.

    Raises:
        NotImplementedError: the subclass is no such wrapper, or lacks a hook.
    """

    def __init__(self, parameter: Any, name: str, module: nn.Module) -> None:
        kind: Any = type(parameter)
        self.name, self._kind, self._module = name, kind, weakref.ref(module)
        missing = [hook for hook in _HOOKS if not hasattr(kind, hook)]
        if missing:
            raise NotImplementedError(f"{self} must have both {' and '.join(_HOOKS)}, got no {missing[0]}")
        if not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
            raise NotImplementedError(
                f"{self} must have __tensor_flatten__ and __tensor_unflatten__, by which its shards are made, got none; add them"
            )
        inner, self._context = parameter.__tensor_flatten__()
        same = [key for key in inner if looks_like(getattr(parameter, key), parameter)]
        if len(same) != 1 or parameter.dim() == 0:
            raise NotImplementedError(
                f"{self} must hold one tensor of its own shape and dtype, whose rows ranks share, got {inner} in a tensor of shape "
                f"{list(parameter.shape)}; convert the parameter after training, or leave this module unsharded"
            )
        self._key = same[0]
        self._others = {key: getattr(parameter, key) for key in inner if key != self._key}
        self._takes_all = len(inspect.signature(kind.fsdp_pre_all_gather).parameters) > 2
        self._own = {*vars(self.over(self.memory_of(parameter))), "_is_param"}

    def __str__(self) -> str:
        return f"the {self._kind.__name__} {self.name}"

    def own_attributes(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's attributes that are not its class's."""
        return {key: value for key, value in vars(parameter).items() if key not in self._own}

    def over(self, memory: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor of the subclass over ``memory``, with the other attributes of ``like``."""
        inner = {self._key: memory, **self._others}
        made: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, memory.shape, memory.stride())
        if like is not None:
            vars(made).update((key, value) for key, value in vars(like).items() if key != self._key)
        return made

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor in one of the subclass."""
        memory: torch.Tensor = getattr(tensor, self._key)
        return memory.detach()

    # ---- the hooks ----------------------------------------------------------------------------------------------

    def before_gather(
        self, shard: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, dtypes: GroupDtypes
    ) -> tuple[torch.Tensor, Any]:
        """Return what is gathered of a shard, of its shape, and what else the unsharded tensor is made of.

        A shard without rows shows the hook one row of zeros, as FSDP2 pads, since maxima of nothing are errors.

        Ranks: all of the mesh.
        """
        is_empty = shard.numel() == 0
        if is_empty:
            row = self.memory_of(shard).new_zeros((1, *shape[1:]))
            shard = self.over(row, shard)
        hook = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if self._takes_all:
            stride = torch.empty(shape, device="meta").stride()
            policy = Fsdp2Policy(param_dtype=dtypes.compute, reduce_dtype=dtypes.grad_comm)
            inputs, metadata = hook(mesh, shape, stride, self._module(), policy)
        else:
            inputs, metadata = hook(mesh)
        shapes = [list(tensor.shape) for tensor in inputs]
        if len(inputs) != 1 or inputs[0].numel() != shard.numel():
            raise NotImplementedError(
                f"fsdp_pre_all_gather of {self} must return one tensor with an element for each of the shard's, got "
                f"{shapes} of a shard of {list(shard.shape)}; ranks hold unequal parts, which other tensors would not follow"
            )
        return (inputs[0][:0] if is_empty else inputs[0]), metadata

    def make_codec(
        self, parameter: torch.Tensor, mesh: DeviceMesh, dtypes: GroupDtypes, device: torch.device
    ) -> HookCodec:
        """Find out what the hooks make, by a row of zeros in the main weight's dtype. Ranks: all of the mesh."""
        shard = self.over(torch.zeros((0, *parameter.shape[1:]), dtype=dtypes.main_params, device=device))
        return HookCodec(seen=self.before_gather(shard, mesh, parameter.shape, dtypes)[0].dtype, shell=self)


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
        """Let the hooks encode the main weight again. Ranks: all of the mesh."""
        for index, parameter in enumerate(self.sharded):
            self._encode_one(index, parameter._local_tensor)  # type: ignore[attr-defined]
        super().sync(casts=False)
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
        if self.needs_gather:
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

    def move(self, flat: torch.Tensor | None, **options: Any) -> None:
        self._former = self.full.local
        super().move(flat, **options)
        del self._former

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        former = self._former.untyped_storage()._cdata
        for leaf in leaves_of(parameter):
            if leaf.untyped_storage()._cdata == former:
                full, was = self.full.local.view(leaf.dtype), self._former.view(leaf.dtype)
                begin = full.storage_offset() + leaf.storage_offset() - was.storage_offset()
                leaf.data = full.as_strided(leaf.shape, leaf.stride(), begin)


@dataclass(frozen=True, kw_only=True)
class HookCodec(WeightCodec):
    """What a parameter's own hooks make: bytes for each element, or another dtype.

    Args:
        seen: the dtype in which the hooks made it. What rests and travels is of this dtype, or bytes.
        shell: of this parameter.
    """

    seen: torch.dtype
    shell: Shell = field(compare=False)

    casts = False

    @property
    def nan(self) -> float:  # type: ignore[override]
        return super().nan if self.rest_dtype(self.seen).is_floating_point else NAN_BYTE

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        return torch.uint8 if self.seen.itemsize == 1 else self.seen

    def weights_class(self, *, trainable: bool) -> type[HookedWeights]:
        return HookedWeights


class HookedParameters(ParameterKind):
    """Parameters whose class follows the protocol, or tries to."""

    def takes(self, parameter: torch.Tensor) -> bool:
        kind = type(parameter)
        return kind not in (torch.Tensor, nn.Parameter) and any(hasattr(kind, hook) for hook in _HOOKS)

    def plain(self, parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
        """Return what the tensor wraps, with an attribute ``fsdp_make_codec``."""
        shell = Shell(parameter, name, module)
        own = {**shell.own_attributes(parameter), "fsdp_make_codec": shell.make_codec}
        return plain_parameter(parameter, shell.memory_of(parameter), own)
