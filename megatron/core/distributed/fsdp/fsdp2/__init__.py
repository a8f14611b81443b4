"""PyTorch's FSDP2 by its own names: code with ``fully_shard`` calls changes ``torch.distributed.fsdp`` to this module.

The names, arguments and numbers are FSDP2's: without a policy the optimizer's weights are in the parameters' dtype. ``docs/fsdp2.md`` has
the table of what is the same and what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from megatron.core.distributed.fsdp.fsdp2.forward_methods import register_fsdp_forward_method
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard as _fully_shard
from megatron.core.distributed.fsdp.fsdp2.methods import FSDPModule, UnshardHandle, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleT:
    """Shard a module with FSDP2's arguments, as ``megatron.core.distributed.fsdp.fully_shard`` does with more of them.

    What is on the meta device gets no values, but memory at once. Fill it after ``to_empty``, or load it; the next forward names what
    has none.

    Raises:
        NotImplementedError: ``dp_mesh_dims`` is given.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"dp_mesh_dims must be left out, got {dp_mesh_dims}: pass the data-parallel part of the mesh, mesh[names], and parameters "
            "that are plain, or DTensors over other axes of the same mesh (parallelize_module(model, mesh['tp'], plan))"
        )
    return _fully_shard(
        module,
        mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        init_fn=_leave_to_user,
    )


def _leave_to_user(module: nn.Module) -> None:
    """Draw no initial values: with FSDP2 users fill what was on the meta device after ``to_empty``, or load it."""
