"""What becomes of each public call of PyTorch's FSDP2 here: the table of ``docs/fsdp2.md``, and the calls that show it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import _fully_shard
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp import fsdp2 as ours
from megatron.core.distributed.fsdp.fsdp2.arguments import placements_of


class Fate(Enum):
    """What happens to a call."""

    SAME = "the same"
    SAID = "the same numbers, said once"
    REFUSED = "refused"


Call = Callable[[Any], object]
"""Does something with a sharded ``Sequential`` of two linear layers, each a unit."""


def _shard(**settings: Any) -> Call:
    return lambda _: ours.fully_shard(nn.Linear(4, 4), **settings)


def _set(name: str, *arguments: Any) -> Call:
    return lambda model: getattr(model, name)(*arguments)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def _reshard_to_two_of_four(_: Any) -> None:
    # Four ranks are not started for this row: the mesh says that there are so many while the argument is looked at.
    with mock.patch.object(DeviceMesh, "size", lambda *_: 4):
        placements_of(_mesh(), None, None, 2)


def _is_unit(model: Any) -> None:
    assert isinstance(model, ours.FSDPModule) and not isinstance(model[0].weight, ours.FSDPModule)


# By entry: (fate, what a user should know, a call that asks for it).
TABLE: dict[str, tuple[Fate, str, Call]] = {
    "fully_shard([a, b])": (Fate.SAME, "", lambda _: ours.fully_shard([nn.Linear(4, 4), nn.LayerNorm(4)])),
    "fully_shard(mesh)": (
        Fate.SAME,
        "one axis, or two for HSDP",
        lambda _: ours.fully_shard(nn.Linear(4, 4), mesh=_mesh()),
    ),
    "fully_shard(reshard_after_forward)": (
        Fate.SAID,
        "True, False and None are the same: False lets weights rest whole (ZeRO-2), None means True on the root too. A number of ranks "
        "means True, which is said once",
        _reshard_to_two_of_four,
    ),
    "fully_shard(shard_placement_fn)": (
        Fate.SAID,
        "ranks own rows, whatever dim a `Shard` names; a mesh for a parameter (`ShardPlacementResult`) is served",
        _shard(shard_placement_fn=lambda p: Shard(p.dim() - 1)),
    ),
    "fully_shard(mp_policy)": (
        Fate.SAME,
        "gradients of synchronised backwards are added up in the dtype of the optimizer's weights, those of `set_requires_gradient_sync(False)` in `reduce_dtype` if that is wider",
        _shard(mp_policy=ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ),
    "fully_shard(offload_policy)": (Fate.SAME, "see `CPUOffloadPolicy`", _shard(offload_policy=ours.OffloadPolicy())),
    "fully_shard(ignored_params)": (Fate.SAME, "", _shard(ignored_params={nn.Parameter(torch.ones(1))})),
    "fully_shard(dp_mesh_dims)": (
        Fate.REFUSED,
        'pass the data-parallel part of the mesh, `mesh["dp"]`; parameters that are DTensors over its other axes are sharded further',
        _shard(dp_mesh_dims=object()),
    ),
    "FSDPModule": (
        Fate.SAME,
        "`isinstance` with the name from `fsdp2`; with torch's class it is False",
        _is_unit,
    ),
    "FSDPModule.unshard": (
        Fate.SAME,
        "with `async_op` too",
        lambda model: [model._set_unshard_async_op(True), model.unshard(async_op=True).wait()],
    ),
    "FSDPModule.reshard": (Fate.SAME, "", _set("reshard")),
    "FSDPModule.reset_iter_state": (Fate.SAME, "not needed: the next forward does it", _set("reset_iter_state")),
    "FSDPModule.set_is_last_backward": (
        Fate.SAME,
        "means nothing: gradients are complete when a backward returns",
        _set("set_is_last_backward", False),
    ),
    "FSDPModule.set_requires_gradient_sync": (
        Fate.SAME,
        "sharded gradients are reduced in each microbatch all the same, and added up; `microbatch(model, is_last=)` is the same for a scope",
        _set("set_requires_gradient_sync", False),
    ),
    "FSDPModule.set_requires_all_reduce": (Fate.SAME, "", _set("set_requires_all_reduce", False)),
    "FSDPModule.set_reshard_after_forward": (
        Fate.SAME,
        "from the next step on; modules show sharded parameters between forward and backward in any case",
        _set("set_reshard_after_forward", False),
    ),
    "FSDPModule.set_reshard_after_backward": (
        Fate.SAID,
        "weights are resharded, and prefetched for the next microbatch; `set_reshard_after_forward(False)` keeps them throughout a step",
        _set("set_reshard_after_backward", False),
    ),
    "FSDPModule.set_modules_to_forward_prefetch": (
        Fate.SAME,
        "as many units as are listed, in the order in which units ran",
        lambda model: model[0].set_modules_to_forward_prefetch([model[1]]),
    ),
    "FSDPModule.set_modules_to_backward_prefetch": (
        Fate.SAME,
        "as many units as are listed, in the order in which units ran",
        lambda model: model[1].set_modules_to_backward_prefetch([model[0]]),
    ),
    "FSDPModule.set_all_reduce_hook": (
        Fate.SAME,
        "called for each flat buffer of the unit: parameters of another dtype have one of their own",
        _set("set_all_reduce_hook", print),
    ),
    "FSDPModule.set_post_optim_event": (
        Fate.SAME,
        "all-gathers wait for it besides what compute has been given",
        lambda model: [model.set_post_optim_event(event) for event in (None, _Event())],
    ),
    "FSDPModule.set_gradient_divide_factor": (Fate.SAME, "", _set("set_gradient_divide_factor", 3)),
    "FSDPModule.set_reduce_scatter_divide_factor": (Fate.SAME, "", _set("set_reduce_scatter_divide_factor", 3)),
    "FSDPModule.set_force_sum_reduction_for_comms": (
        Fate.SAME,
        "always so: reductions are sums, scaled afterwards",
        _set("set_force_sum_reduction_for_comms", True),
    ),
    "FSDPModule.set_reduce_scatter_unused_params": (
        Fate.SAME,
        "always so: what a rank lacks counts as zero where another rank has it",
        _set("set_reduce_scatter_unused_params", True),
    ),
    "FSDPModule.set_unshard_in_backward": (
        Fate.SAID,
        "weights are gathered for backward as for any unit",
        _set("set_unshard_in_backward", False),
    ),
    "FSDPModule.set_reduce_scatter_max_input_buffers": (
        Fate.SAID,
        "the plan lays these buffers out",
        _set("set_reduce_scatter_max_input_buffers", 2),
    ),
    "FSDPModule.set_separate_reduce_scatter_group": (
        Fate.REFUSED,
        "`fully_shard(..., fsdp_group_ag=group)` gives all-gathers a group of their own",
        _set("set_separate_reduce_scatter_group"),
    ),
    "FSDPModule.set_symm_mem_for_comm": (
        Fate.REFUSED,
        '`fully_shard(..., transport="symm")`',
        _set("set_symm_mem_for_comm"),
    ),
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": (
        Fate.REFUSED,
        '`fully_shard(..., transport="symm")`',
        _set("set_allocate_memory_from_process_group_for_comm", True),
    ),
    "FSDPModule.set_custom_all_gather": (
        Fate.REFUSED,
        "`fully_shard(..., transport=)`, or a transport of your own",
        _set("set_custom_all_gather", None),
    ),
    "FSDPModule.set_custom_reduce_scatter": (
        Fate.REFUSED,
        "`fully_shard(..., transport=)`, or a transport of your own",
        _set("set_custom_reduce_scatter", None),
    ),
    "UnshardHandle.wait": (Fate.SAME, "", lambda model: model.unshard(async_op=True).wait()),
    "MixedPrecisionPolicy.param_dtype": (
        Fate.SAME,
        "",
        _shard(mp_policy=ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    ),
    "MixedPrecisionPolicy.reduce_dtype": (
        Fate.SAME,
        "",
        _shard(mp_policy=ours.MixedPrecisionPolicy(reduce_dtype=torch.float32)),
    ),
    "MixedPrecisionPolicy.output_dtype": (
        Fate.SAME,
        "",
        _shard(mp_policy=ours.MixedPrecisionPolicy(output_dtype=torch.float32)),
    ),
    "MixedPrecisionPolicy.cast_forward_inputs": (
        Fate.SAME,
        "",
        _shard(mp_policy=ours.MixedPrecisionPolicy(cast_forward_inputs=False)),
    ),
    "OffloadPolicy": (Fate.SAME, "asks for nothing", _shard(offload_policy=ours.OffloadPolicy())),
    "CPUOffloadPolicy.pin_memory": (
        Fate.SAME,
        "on ranks of the CPU, where shards are in the host's memory already. On GPUs the policy is refused: `FlatAdamW(..., offload_fraction=1.0)` "
        "keeps optimizer state and fp32 weights on the host, `ActivationOffload` activations",
        _shard(offload_policy=ours.CPUOffloadPolicy(pin_memory=False)),
    ),
    "DataParallelMeshDims.shard": (Fate.REFUSED, "as `dp_mesh_dims`", _shard(dp_mesh_dims=object())),
    "DataParallelMeshDims.replicate": (Fate.REFUSED, "as `dp_mesh_dims`", _shard(dp_mesh_dims=object())),
    "register_fsdp_forward_method": (
        Fate.SAME,
        "methods by names that libraries of the field use (`encode`, `decode`, `forward_features`, `get_text_features`, ...) need no call",
        lambda model: ours.register_fsdp_forward_method(model, "forward"),
    ),
    "share_comm_ctx": (Fate.SAME, "", lambda model: ours.share_comm_ctx([model])),
}


class _Event:
    """An event that has happened."""

    def wait(self) -> None:
        """Return at once."""


def entries_of_torch() -> list[str]:
    """Return what the installed PyTorch has: arguments, methods, fields of policies and functions."""
    found = [f"fully_shard({name})" for name in inspect.signature(theirs.fully_shard).parameters if name != "module"]
    found[:0] = ["fully_shard([a, b])"]
    for name in _fully_shard.__all__:
        own = getattr(theirs, name)
        if dataclasses.is_dataclass(own):
            inherited = {
                f.name for base in own.__mro__[1:] if dataclasses.is_dataclass(base) for f in dataclasses.fields(base)
            }
            fields = [f.name for f in dataclasses.fields(own) if f.name not in inherited]
            found += [f"{name}.{field}" for field in fields] or [name]
        elif isinstance(own, type):
            found += [name] * (name == "FSDPModule")
            found += [f"{name}.{key}" for key, value in vars(own).items() if key[0] != "_" and callable(value)]
        elif name != "fully_shard":
            found.append(name)
    return found


def rows() -> str:
    """Return the table in Markdown."""
    lines = ["| FSDP2 | here | |", "|---|---|---|"]
    lines += [f"| `{entry}` | {fate.value} | {words} |" for entry, (fate, words, _) in TABLE.items()]
    return "\n".join(lines)


def fates() -> Mapping[str, tuple[Fate, Call]]:
    """Return what should happen to each entry, and the call that shows it."""
    return {entry: (fate, call) for entry, (fate, _, call) in TABLE.items()}
