"""What forward saves for backward rests in the host's memory, where a module's forward asks for it.

[Note: offloaded activations] While the forward of such a module runs, a region is open: tensors that autograd saves are copied to
page-locked memory on a stream of their own, and the region keeps them on the device until compute has waited for these
copies, some regions later. In backward the first tensor of a region that is asked for brings back all of it, and begins to bring
back the region before, which backward comes to next. Memory on the device comes from the compute stream, which waits for each copy,
so no other stream ever owns it. Buffers of the host are used again in the next step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class HostPool:
    """Buffers in the host's memory that are used again; there are as many as were in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[tuple[Tensor, Any]]] = {}
        self.nbytes = 0

    def take(self, nbytes: int, *, pinned: bool) -> tuple[Tensor, Any]:
        """Return a buffer [nbytes] and the event after which it may be written, or None."""
        free = self._free.get((nbytes, pinned))
        if free:
            return free.pop()
        self.nbytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned), None

    def give_back(self, buffer: Tensor, event: Any, *, pinned: bool) -> None:
        """Take a buffer back that is read until ``event``."""
        self._free.setdefault((buffer.numel(), pinned), []).append((buffer, event))


class _Saved:
    """A tensor that forward saved: on the device, in the host's memory, or both."""

    __slots__ = (
        "__weakref__",
        "_pool",
        "_read",
        "_version",
        "buffer",
        "device_tensor",
        "dtype",
        "pinned",
        "region",
        "shape",
        "strides",
    )

    def __init__(self, tensor: Tensor, region: _Region, pool: HostPool) -> None:
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.region, self._pool, self._read = region, pool, None
        self.device_tensor: Tensor | None = tensor
        self._version = tensor._version
        self.buffer: Tensor | None = None
        self.pinned = tensor.is_cuda

    def view(self, buffer: Tensor) -> Tensor:
        """Return the buffer of the host as a tensor like the saved one."""
        return buffer.view(self.dtype).as_strided(self.shape, self.strides)

    def download(self) -> None:
        """Copy the tensor to the host, on the current stream."""
        tensor = self.device_tensor
        assert tensor is not None
        if tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that forward saved must not be modified by an inplace operation "
                "before it is copied to the host, got one that was; do not offload what this module saves"
            )
        self.buffer, event = self._pool.take(tensor.numel() * tensor.element_size(), pinned=self.pinned)
        if event is not None:
            event.wait()
        self.view(self.buffer).copy_(tensor, non_blocking=True)

    def allocate(self, device: torch.device) -> None:
        """Make room on the device for the tensor to come back to."""
        self.device_tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def upload(self) -> None:
        """Copy the tensor back, on the current stream."""
        assert self.buffer is not None and self.device_tensor is not None
        self.device_tensor.copy_(self.view(self.buffer), non_blocking=True)

    def read_until(self, event: Any) -> None:
        """Note the event after which the buffer may be written again."""
        self._read = event

    def __del__(self) -> None:
        if (
            self.region.comes_back is not None
        ):  # nobody asked for it: its memory must not be another's before it is written
            self.region.comes_back.wait()
        if self.buffer is not None:
            self._pool.give_back(self.buffer, self._read, pinned=self.pinned)


class _Region:
    """What one forward of a module saved. The graph holds it by its tensors; it holds these weakly but for a while."""

    def __init__(self, offload: ActivationOffload, weights: set[int], before: _Region | None) -> None:
        self.offload, self.weights = offload, weights
        self.before = None if before is None else weakref.ref(before)
        self.saved: list[weakref.ref[_Saved]] = []
        self._kept: dict[tuple[Any, ...], _Saved] = {}  # on the device until compute has waited for the copies
        self._copied: Any = None
        self.comes_back: Any = None
        self._is_there = False

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Take a tensor that autograd saves; return what it keeps instead."""
        if not self._is_worth_it(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        saved = self._kept.get(key)
        if saved is None:
            saved = self._kept[key] = _Saved(tensor, self, self.offload.pool)
            self.saved.append(weakref.ref(saved))
        return saved

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self.offload.device
            and tensor.is_floating_point()
            and tensor.numel() >= max(1, self.offload.min_numel)
            and _is_dense(tensor)
            and tensor.untyped_storage().data_ptr() not in self.weights
        )

    def close(self) -> None:
        """Begin to copy what was saved."""
        self._copied = self.offload.copy(self.offload.downloads, [saved.download for saved in self._kept.values()])

    def let_go(self) -> None:
        """Make compute wait for the copies, and give the device's memory back."""
        if self._copied is not None:
            self._copied.wait()
        for saved in self._kept.values():
            saved.device_tensor = None
        self._kept.clear()

    def keep(self) -> None:
        """Leave on the device what has not left it yet."""
        if self._copied is not None:
            self._copied.wait()  # so that nobody reads memory that backward frees
        self._kept.clear()
        self._is_there = True

    def bring_back(self) -> None:
        """Begin to copy to the device what is not there."""
        if self._is_there:
            return
        self._is_there = True
        missing = [saved for one in self.saved if (saved := one()) is not None and saved.device_tensor is None]
        for saved in missing:
            saved.allocate(self.offload.device)
        self.comes_back = self.offload.copy(self.offload.uploads, [saved.upload for saved in missing])
        for saved in missing:
            saved.read_until(self.comes_back)

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a tensor to backward, and begin to bring back what it will ask for next."""
        self.offload.forget(self)
        self.bring_back()
        before = None if self.before is None else self.before()
        if before is not None:
            self.offload.forget(before)
            before.bring_back()
        if self.comes_back is not None:
            self.comes_back.wait()
            self.comes_back = None
        assert saved.device_tensor is not None
        return saved.device_tensor


class ActivationOffload:
    """Keeps what the forwards of modules save in the host's memory.

    Args:
        min_numel: smaller tensors stay on the device.
        max_regions: so many regions' tensors are on the device while they are copied; the next one's end waits.

    Attributes:
        pool: the host's memory.
    """

    def __init__(self, *, min_numel: int = 0, max_regions: int = 1) -> None:
        self.min_numel, self.max_regions = min_numel, max_regions
        self.pool = HostPool()
        self.device = torch.device("cpu")
        self.downloads: Any = None
        self.uploads: Any = None
        self._open: list[tuple[_Region, saved_tensors_hooks] | None] = []
        self._on_device: deque[_Region] = deque()
        self._latest: weakref.ref[_Region] | None = None

    def attach(self, module: nn.Module) -> None:
        """Offload what the module's forward saves, in training."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        # In a recomputation backward asks for the tensors at once.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            self._open.append(None)
            return
        self._follow_device((*inputs, *named.values()))
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        region = _Region(self, weights, None if self._latest is None else self._latest())
        hooks = saved_tensors_hooks(region.pack, _unpack)
        hooks.__enter__()
        self._open.append((region, hooks))
        self._latest = weakref.ref(region)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        opened = self._open.pop()
        if opened is None:
            return
        region, hooks = opened
        hooks.__exit__(None, None, None)
        region.close()
        self._on_device.append(region)
        while len(self._on_device) > self.max_regions:
            self._on_device.popleft().let_go()

    def forget(self, region: _Region) -> None:
        """Let backward have the region's tensors if they are still on the device."""
        if region in self._on_device:
            self._on_device.remove(region)
            region.keep()

    def _follow_device(self, inputs: Iterable[Any]) -> None:
        tensor = next((x for x in inputs if isinstance(x, Tensor)), None)
        if tensor is not None and tensor.device != self.device:
            self.device = tensor.device
            if tensor.is_cuda:
                self.downloads, self.uploads = (torch.cuda.Stream(tensor.device) for _ in range(2))

    def copy(self, stream: Any, copies: Iterable[Any]) -> Any:
        """Copy on the stream, behind what compute has done so far; return the event of the end, None without streams."""
        if stream is None:
            for copy in copies:
                copy()
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for copy in copies:
                copy()
            return stream.record_event()


def _unpack(packed: Tensor | _Saved) -> Tensor:
    return packed.region.unpack(packed) if isinstance(packed, _Saved) else packed


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element of a piece of memory is one of the tensor's."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
