"""Keywords of PyTorch's ``fully_shard`` in the engine's terms, or an error that names the alternative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements, hybrid_placements, strategy_placements
from megatron.core.distributed.fsdp.fsdp2.methods import Fsdp2ValueError, say_once


def check_offload(policy: Any, device: torch.device) -> None:
    """Refuse to keep shards in the host's memory where the mesh's device is another one.

    Raises:
        TypeError: the policy is none of FSDP2's.
        NotImplementedError: the policy asks for the host's memory, and the mesh is of another device.
    """
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(f"offload_policy must be an OffloadPolicy, got {policy!r}")
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        raise NotImplementedError(
            f"offload_policy must be left out, got {policy}: shards stay on the mesh's device, {device.type}; FlatAdamW(..., "
            "offload_fraction=1.0) keeps optimizer state and fp32 weights in the host's memory, ActivationOffload activations"
        )


def meshes_of_parameters(
    placement_fn: Callable[[nn.Parameter], Any] | None,
    parameters: Iterable[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    placements: Placements | str | None,
    reshard_after_forward: object,
) -> dict[nn.Parameter, tuple[DeviceMesh, Placements]]:
    """Ask FSDP2's ``shard_placement_fn`` of each parameter. A dim other than 0 is logged once.

    Args:
        parameters: (name, parameter) of the unit.
        mesh: the unit's.
        placements, reshard_after_forward: arguments of ``fully_shard``.

    Returns:
        The meshes of parameters for which it names another mesh than the unit's, with the placements of the unit's strategy on them.

    Raises:
        TypeError: it returns something else than None, a ``Shard`` or a ``ShardPlacementResult``.
        ValueError: the parameter lacks the dim, or the unit has placements that name axes of its own mesh.
    """
    found: dict[nn.Parameter, tuple[DeviceMesh, Placements]] = {}
    if placement_fn is None:
        return found
    reshards = None if reshard_after_forward is None else bool(reshard_after_forward)
    for name, parameter in parameters:
        result = placement_fn(parameter)
        own = getattr(getattr(result, "mesh_info", None), "mesh", None)
        _check_placement(result if own is None else result.placement, result, name, parameter.dim())
        if own is None or own == mesh:
            continue
        if isinstance(placements, Placements):
            raise ValueError(
                f"placements next to a shard_placement_fn that names a mesh must be a strategy's name, got {placements}, whose axes "
                f"{own} may lack"
            )
        found[parameter] = own, placements_of(own, None, placements, reshards)
    return found


def _check_placement(placement: Any, result: Any, name: str, ndim: int) -> None:
    """Check what ``shard_placement_fn`` returned for a parameter of ``ndim`` dims."""
    if placement is None:
        return
    if not isinstance(placement, Shard):
        raise TypeError(
            f"shard_placement_fn must return None, a Shard or a ShardPlacementResult, got {result!r} for {name}"
        )
    if not -ndim <= placement.dim < max(ndim, 1):
        raise Fsdp2ValueError(
            f"Shard dim {placement.dim} is invalid for {ndim}D tensor {name}: shard_placement_fn must name one of the "
            f"{ndim} dims of {name}, got {placement}"
        )
    if placement.dim != 0:
        say_once(
            "shard_placement_fn",
            f"ranks own rows, also of {name}, for which it returns {placement}; the attribute fsdp_granule of a parameter says "
            "where it may not be cut",
        )


def policy_of(own: MixedPrecisionPolicy | None, mp_policy: Any) -> MixedPrecisionPolicy:
    """Return the engine's policy: what was given, PyTorch's in the engine's terms, or the default.

    Raises:
        ValueError: both were given.
        TypeError: a policy of another class, or a dtype that is not served.
    """
    if isinstance(own, TorchMixedPrecisionPolicy) and mp_policy is None:
        own, mp_policy = None, own
    if own is not None and mp_policy is not None:
        raise ValueError("mixed_precision_policy and mp_policy mean the same, got both; leave one of them out")
    given = own if mp_policy is None else mp_policy
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given or MixedPrecisionPolicy()
    if not isinstance(given, TorchMixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {given!r}")
    return MixedPrecisionPolicy(
        main_params_dtype=None,
        grad_comm_dtype=given.reduce_dtype,
        param_dtype=given.param_dtype,
        output_dtype=given.output_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
    )


def takes_least_memory(asked: bool | None, policies: Sequence[Any], transport: str) -> bool:
    """Return whether a unit takes the least memory: as asked, or where a policy is FSDP2's and the transport can.

    Raises:
        ValueError: it is asked for, and the transport needs separate buffers.
    """
    if asked and transport != "nccl":
        raise ValueError(
            f"least_memory=True goes with transport 'nccl' alone, got {transport!r}, whose buffers stay all the time; leave one of them out"
        )
    is_fsdp2s = any(isinstance(policy, TorchMixedPrecisionPolicy) for policy in policies)
    return is_fsdp2s and transport == "nccl" if asked is None else asked


def _reshards(value: object, mesh: DeviceMesh) -> bool | None:
    """Return whether weights are resharded after forward; for a number of ranks they are, which is logged once."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward must be a bool, or a number of ranks to reshard to, got {value!r}")
    num_ranks = mesh.size(mesh.ndim - 1)
    if value < 1 or num_ranks % value:
        raise ValueError(f"reshard_after_forward as a number of ranks must be a factor of {num_ranks}, got {value}")
    if 1 < value < num_ranks:
        say_once(f"reshard_after_forward={value}", "weights are resharded to all ranks of the axis")
    return value > 1


def placements_of(
    mesh: DeviceMesh, tensor_axis: str | None, placements: Placements | str | None, reshard_after_forward: object
) -> Placements:
    """Return the placements on the mesh's data-parallel axes: those given, of a strategy's name, or as in FSDP2.

    Over one axis the default is ZeRO-3, over two HSDP, sharded over the inner one.

    Raises:
        ValueError: no strategy of this name; ``reshard_after_forward`` is no factor of the number of ranks; the mesh has more than two data-parallel axes; ``reshard_after_forward`` beside
            placements.
        TypeError: neither placements nor a strategy's name.
    """
    reshard_after_forward = _reshards(reshard_after_forward, mesh)
    if placements is not None and reshard_after_forward is not None:
        raise ValueError(
            "placements say whether weights are resharded after forward, got reshard_after_forward too; leave one out"
        )
    if isinstance(placements, Placements):
        return placements
    if placements is not None and not isinstance(placements, str):
        raise TypeError(f"placements must be Placements or a strategy's name, got {placements!r}")
    strategy = placements or ("optim_grads" if reshard_after_forward is False else "optim_grads_params")
    axes = [axis for axis in mesh.mesh_dim_names or range(mesh.ndim) if axis != tensor_axis]
    if len(axes) == 1:
        return strategy_placements(strategy, axes[0])
    if len(axes) == 2:
        return hybrid_placements(strategy, "no_shard", (axes[0], axes[1]))
    raise ValueError(
        f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, whose data-parallel axes are {axes}; pass placements, or the "
        "part of the mesh over which to shard"
    )


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh, or one of all ranks if it is None."""
    if isinstance(mesh, ProcessGroup):
        raise TypeError(
            'mesh must be a DeviceMesh, got a process group; make a mesh of it: DeviceMesh.from_group(group, "cuda")'
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {mesh!r}; make one with init_device_mesh")
    return _default_mesh() if mesh is None else mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised before fully_shard; call torch.distributed.init_process_group() "
            "in a program started with torchrun"
        )
    device_type = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu"
    return _mesh_of_all_ranks(device_type, dist.get_world_size(), dist.get_rank())


@functools.lru_cache(maxsize=1)  # the key holds no process group, which the cache would keep alive
def _mesh_of_all_ranks(device_type: str, world_size: int, rank: int) -> DeviceMesh:
    """Return one mesh for all calls without a mesh, so that their units share its transports."""
    return init_device_mesh(device_type, (world_size,))


def transport_kind(transport: object, use_symm_mem: bool) -> str:
    """Return the transport's name."""
    if use_symm_mem and transport not in (None, "auto", "symm"):
        raise ValueError(
            f"use_symm_mem=True means transport='symm', got transport={transport!r} as well; leave one of them out"
        )
    if transport is not None and not isinstance(transport, str):
        raise TypeError(f"transport must be the name of one, got {transport!r}; try 'nccl'")
    return "symm" if use_symm_mem else "nccl" if transport is None else transport
