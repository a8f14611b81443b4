"""The class of the engine's DTensors: parameters, gradients, optimizer states, and what operations make of them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.dtensor import dispatch
from megatron.core.distributed.fsdp.dtensor.placements import boxes_of, is_in_boxes, is_uneven, memory_of, pieces_of

_DATA: Any = torch.Tensor.data


class UnevenDTensor(DTensor):
    """A DTensor that may be placed by an ``UnevenShard``, whose rows torch's rules for DTensors would take for even.

    See [Note: class of DTensors].

    Results of operations are of this class too; ``redistribute`` to torch's own placements returns torch's DTensor. Differences from a
    DTensor, all of them about tensors that are views of flat buffers and whose ranks hold unequal parts:

    - Operations run as propagation.py says. Random fills and writes by index are those of the whole tensor, and in-place
      operations on lists count as writes.
    - Copies and pickles have separate memory and the same placements, and belong to no group.
    - Distributed checkpoints (DCP) get each of several boxes of the whole tensor.
    - ``gradient.data = value`` takes the value; ``parameter.data = value`` is an error.

    Make them with ``over``. ``DTensor.from_local``, ``distribute_tensor`` and ``redistribute`` make them for an ``UnevenShard``
    (torch_shims.py).
    """

    __slots__ = ()

    @property
    def megatron_fsdp_slice(self) -> slice:
        """This rank's elements as a slice of the flattened full tensor, which must be split only by rows."""
        (first, *_), start = boxes_of(self), 0
        for offset, size in zip(first.offsets, self.shape, strict=True):
            start = start * size + offset
        return slice(start, start + self._local_tensor.numel())

    __new__ = DTensor.__new__  # torch's, which torch_shims.py wraps for DTensor alone

    @staticmethod
    def over(
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> UnevenDTensor:
        """Make a tensor of this shape with ``local`` as this rank's part. Autograd does not connect the two."""
        spec = DTensorSpec(
            mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
        )
        return UnevenDTensor(local.detach(), spec, requires_grad=False)

    __torch_dispatch__ = classmethod(dispatch.run)

    # ---- copies -----------------------------------------------------------------------------------------------------

    # copy.deepcopy and pickle take a DTensor that begins behind the start of its local tensor's storage for a tensor with memory
    # of its own, and fail. Delete these when copy.deepcopy(DTensor.from_local(flat[8:], ...)) works.

    def __reduce_ex__(self, protocol: Any) -> Any:
        apart = _apart(self) if _is_part(self) else self
        if is_uneven(self):
            return super(UnevenDTensor, apart).__reduce_ex__(protocol)
        plain = DTensor(apart._local_tensor, apart._spec, requires_grad=self.requires_grad)
        vars(plain).update(vars(apart))  # files with even tensors can be read without the engine
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not _is_part(self) or not self.is_leaf:
            return super().__deepcopy__(memo)
        memo[id(self)] = found = _apart(self)
        found.__dict__ = copy.deepcopy(found.__dict__, memo)
        if self.grad is not None:
            found.grad_dtype = None if self.grad.dtype != self.dtype else found.dtype
            found.grad = copy.deepcopy(self.grad, memo)
        return found

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> UnevenDTensor:
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return UnevenDTensor(made._local_tensor, made._spec, requires_grad=made.requires_grad)

    if hasattr(DTensor, "_stable_hash_for_caching"):  # not in torch 2.11

        def _stable_hash_for_caching(self) -> str:
            """Return the key of a compiled graph with the local tensor's shape, for which the graph is compiled.

            Torch's key has only the whole tensor's, and ranks of one host share the cache on disk: a rank would run a graph that was
            compiled for another rank's part.
            """
            local = self._local_tensor
            return f"{super()._stable_hash_for_caching()} {tuple(local.shape)} {tuple(local.stride())}"

    # ---- distributed checkpoints ------------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        if not is_in_boxes(self.placements):
            return super().__create_write_items__(fqn, object)
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.size()),
            )
            for box in boxes_of(self)
            # An empty box would have the offsets of another rank's.
            if box.sizes.numel() > 0 or self.numel() == 0
        ]

    def __create_chunk_list__(self) -> Any:
        return boxes_of(self) if is_in_boxes(self.placements) else super().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if not is_in_boxes(self.placements):
            return super().__get_tensor_shard__(index)
        return next(local for box, local in pieces_of(self, writes=True) if box.offsets == index.offset)

    # ---- data -------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The tensor without its history.

        torch lets ``data`` of a DTensor be set and changes only its shell: the values, in its local tensor, are kept, and some operations on
        it end the process afterwards. A gradient takes the value's local tensor; the engine leaves the memory that it had to
        the user. A parameter's memory is what is gathered. It is not served by a copy either, since a caller that swaps weights
        (averaged ones, for an evaluation) keeps ``parameter.data`` from before, which would be overwritten. It may be given its own
        memory: ``parameter.data += 1`` ends with that.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if getattr(self, "_fsdp_group", lambda: None)() is not None:  # a parameter's; copies of them have none
            if not _is_same(self, value):
                raise NotImplementedError(
                    f"the data of the sharded parameter {_sharded_name(self)} must not be replaced, got an assignment to .data, "
                    "which no forward would see; write to it in place: `with torch.no_grad(): parameter.copy_(value)` with a DTensor, "
                    "load_state_dict with full tensors; to have the old values later, clone() them before"
                )
            return
        main_gradient = (getattr(self, "_fsdp_gradients", None) or (lambda: None))()  # of main gradients alone
        if main_gradient is not None:
            main_gradient.renew()
        _DATA.__set__(self, value)
        if isinstance(value, DTensor):
            self._local_tensor, self._spec = value._local_tensor, value._spec

    # ---- hooks of sharded parameters --------------------------------------------------------------------------------

    # No backward comes to a sharded parameter: autograd accumulates into the unsharded one, and the engine fills ``param.grad``.

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As torch's; the engine calls the hooks of a sharded parameter."""
        if (name := _sharded_name(self)) is not None:
            self._fsdp_group().note_hook(name)  # type: ignore[attr-defined]
        return super().register_post_accumulate_grad_hook(hook)

    def register_hook(self, hook: Any) -> Any:
        """As torch's; refused on a sharded parameter."""
        if (name := _sharded_name(self)) is not None:
            raise NotImplementedError(
                f"register_hook on the sharded parameter {name} is not served: no backward computes a gradient of it, only of "
                "the unsharded one; use register_post_accumulate_grad_hook, which is called once its reduced gradient is in "
                "param.grad"
            )
        return super().register_hook(hook)

    # ``parameter.view_as(parameter).grad_fn.next_functions[0][0]`` is how ``torch.autograd.graph.get_gradient_edge``, optimizers in
    # backward and schedules that compute gradients of weights apart from backward come to its accumulation node.

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """As torch's; refused for the node of a sharded parameter."""
        _refuse_node(self, other)
        return super().view_as(other)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """As torch's; refused for the node of a sharded parameter."""
        _refuse_node(self, other)
        return super().expand_as(other)


def placed_like(parameter: DTensor, local: torch.Tensor) -> UnevenDTensor:
    """Make a DTensor of the parameter's shape and placements, with ``local`` as this rank's part; it can be saved and copied.

    Ranks: each on its own. Autograd does not connect the two.
    """
    local, shell = local.detach(), local
    if local.device.type != parameter.device_mesh.device_type:  # a DTensor is on its mesh's kind of devices, or nowhere
        shell = torch.empty_like(local, device="meta")
    placed = UnevenDTensor.over(
        shell, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    placed._local_tensor = local
    return placed


def set_shell(tensor: torch.Tensor, value: DTensor) -> None:
    """Do what torch does for ``tensor.data = value``: take its dtype and shape; the caller replaces the local tensor."""
    _DATA.__set__(tensor, value)


def _apart(tensor: UnevenDTensor) -> UnevenDTensor:
    """Return a copy with memory of its own and the same attributes, but for weak references to what is not copied."""
    # A weight that rests as bytes is read as values, and stays bytes. See [Note: frozen bytes].
    local = memory_of(tensor._local_tensor, writes=False).detach().clone(memory_format=torch.contiguous_format)
    found = UnevenDTensor.over(local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())
    found.requires_grad_(tensor.requires_grad)
    found.__dict__.update(
        (name, value) for name, value in tensor.__dict__.items() if not isinstance(value, weakref.ref)
    )
    return found


def _is_part(tensor: UnevenDTensor) -> bool:
    local = memory_of(tensor._local_tensor, writes=False)
    holds_references = any(isinstance(value, weakref.ref) for value in tensor.__dict__.values())
    return holds_references or local.untyped_storage().nbytes() != local.nbytes


def _is_same(tensor: DTensor, value: Any) -> bool:
    """Return whether ``value`` is the tensor's own memory, seen in the same way. The result is the same on all ranks, also on those without rows."""
    if not isinstance(value, DTensor) or value._spec != tensor._spec:
        return False
    own, other = (
        (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local.dtype)
        for local in (tensor._local_tensor, value._local_tensor)
    )
    return own == other


def _sharded_name(tensor: UnevenDTensor) -> str | None:
    """Return the full name of a sharded parameter; None for other tensors, and for copies, which belong to no group."""
    group = getattr(tensor, "_fsdp_group", lambda: None)()
    return None if group is None else next((group.name_of(i) for i, p in enumerate(group.sharded) if p is tensor), None)


def _refuse_node(tensor: UnevenDTensor, other: torch.Tensor) -> None:
    name = _sharded_name(tensor) if other is tensor and tensor.requires_grad and torch.is_grad_enabled() else None
    if name is not None:
        raise NotImplementedError(
            f"the accumulation node of the sharded parameter {name} must not be asked for (view_as, expand_as, "
            "get_gradient_edge): no backward comes to it, only to that of the unsharded one, so that hooks on it would never be "
            "called. Use register_post_accumulate_grad_hook in place of such hooks and of _apply_optimizer_in_backward, and "
            "pipeline schedules whose backward is whole (Schedule1F1B, ScheduleInterleaved1F1B) in place of zero-bubble ones"
        )


torch.serialization.add_safe_globals([UnevenDTensor])
