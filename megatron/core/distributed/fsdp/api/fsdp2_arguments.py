"""Keywords of PyTorch's ``fully_shard`` in the engine's terms, or an error that says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy

from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements, hybrid_placements, strategy_placements


def check_unserved(arguments: Mapping[str, Any]) -> None:
    """Refuse what has no counterpart here.

    Args:
        arguments: ``offload_policy``, ``shard_placement_fn`` and ``ignored_params``, as they were given.

    Raises:
        NotImplementedError: one of them asks for something.
    """
    offload = arguments["offload_policy"]
    if offload is not None and type(offload) is not OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy must be left out, got {offload}: shards stay on the mesh's device; shard over more ranks instead"
        )
    if arguments["shard_placement_fn"] is not None:
        raise NotImplementedError(
            "shard_placement_fn must be left out, got one: parameters are cut along dim 0; the attribute fsdp_granule of a "
            "parameter says where they may not be cut"
        )
    if arguments["ignored_params"]:
        raise NotImplementedError(
            f"ignored_params must be left out, got {len(arguments['ignored_params'])} parameters: a unit manages all that are in "
            "it; put them into a module outside, or freeze them"
        )


def policy_of(own: MixedPrecisionPolicy | None, mp_policy: Any) -> MixedPrecisionPolicy:
    """Return the engine's policy: what was given, PyTorch's in the engine's terms, or the default.

    Raises:
        ValueError: both were given.
        TypeError: a policy of another class.
        NotImplementedError: PyTorch's policy casts parameters, inputs or outputs.
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
    casts = {name: value for name in ("param_dtype", "output_dtype") if (value := getattr(given, name)) is not None}
    if casts:
        raise NotImplementedError(
            f"mp_policy must leave parameters, inputs and outputs in their dtype, got {casts}: a model computes in the dtype of "
            "its parameters. Convert it before fully_shard (module.to(torch.bfloat16)); main weights are fp32 by default"
        )
    return MixedPrecisionPolicy(main_params_dtype=None, grad_comm_dtype=given.reduce_dtype)


def placements_of(
    mesh: DeviceMesh, tensor_axis: str | None, placements: Placements | str | None, reshard_after_forward: object
) -> Placements:
    """Return the placements on the mesh's data-parallel axes: those given, of a strategy's name, or as in FSDP2.

    Over one axis the default is ZeRO-3, over two HSDP, sharded over the inner one.

    Raises:
        ValueError: no strategy of this name; the mesh has more than two data-parallel axes; ``reshard_after_forward`` beside
            placements.
        TypeError: neither placements nor a strategy's name.
        NotImplementedError: ``reshard_after_forward`` is a number of ranks.
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"reshard_after_forward must be True or False, got {reshard_after_forward!r}: weights are resharded to all ranks of "
            "the axis, or not at all; for something between pass a mesh of two axes"
        )
    if placements is not None and reshard_after_forward is not None:
        raise ValueError(
            "placements say whether weights are resharded after forward, got reshard_after_forward besides; leave one out"
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
        f"a mesh without placements must have one or two data-parallel axes, got {axes} of {mesh}; pass placements, or the "
        "part of the mesh over which to shard"
    )
