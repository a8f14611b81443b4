"""How DTensors with uneven rows propagate through operations and are redistributed.

DTensor asks a placement how to gather and split, which RowShard answers. DTensor decides two things without asking:

- *Propagation.* Each operation's rule rebuilds the placements of its outputs as ``Shard(dim)``, which would turn
  uneven rows into even ones. Here an operation that works row by row is propagated with ``Shard(0)`` in place of
  RowShard, which is put back into the outputs. Every other operation is propagated with ``Replicate()``, so that its
  inputs are gathered first. What can be neither (a view, a write that would be lost, randomness) is an error. Where rows
  are cut into parts (``row_parts``), only elementwise operations on tensors of one shape work row by row.
- *Redistribution.* From a shard to another shard of the same dim DTensor moves nothing. Here it goes through ``Replicate()``.

The same holds for BlockShard, which splits dim 0 in another way: "RowShard" below means both, each an
``UnevenShard``. Of several axes that cut a dim the leftmost cuts first, as everywhere in DTensor, so the axes further
right are gathered before it.

A copy of torch's propagator does this, which dispatch.py asks for ``UnevenDTensor`` only. Delete this file when DTensor
lets a placement say how it propagates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache, ShardingPropagator
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core.distributed.fsdp.dtensor.placements import (
    REMEDY,
    UnevenShard,
    check_parts,
    cuts_rows,
    has_uneven,
)

# Row by row, but not on parts of rows: their arguments name a shape.
_SHAPED = frozenset(
    {"expand", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "reshape", "_unsafe_view", "view"}
)
# Operations that work row by row although torch does not tag them as pointwise.
_ROW_WISE = (
    _SHAPED
    | {"_to_copy", "alias", "clone", "copy_", "detach", "detach_", "equal", "fill_", "lift_fresh", "masked_fill_"}
    | {"sum", "zero_"}
    # Results that depend only on the shape of the input.
    | {"empty_like", "full_like", "ones_like", "zeros_like"}
    # Views of columns. One of some rows does not keep the split.
    | {"select", "slice", "squeeze", "unsqueeze"}
)
NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})
# Lists of tensors, one operation for each element: all elementwise but for these.
LIST_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")
LIST_REDUCTIONS = frozenset({"_foreach_max", "_foreach_powsum"})


# Why a layer meets a sharded weight.
USE_IN_FORWARD = (
    "weights are whole in their unit's forward alone; call the module that fully_shard was given instead of a part of it or another "
    "method, compute with its weights in its forward (a loss too), register the method "
    '(register_fsdp_forward_method(module, "name")), or unshard() it for that, which lasts until its next forward, and '
    "reshard() it after backward. After forward reshard_after_forward=False shows sharded weights as well"
)

# A split of dim 0: the RowShard, and the shape of the tensor that has it.
_Split = tuple[Placement, torch.Size]
# Tensors that must be split in the same way: (element of a list operation, else 0; mesh axis).
_Place = tuple[int | None, int]


class _NotRowWiseError(Exception):
    """Torch's rule for an operation splits something else than the rows that the inputs share."""


class _Input(NamedTuple):
    """A tensor among an operation's arguments."""

    spec: DTensorSpec
    # Index in the lists of a list operation; None for a tensor that all elements share; 0 in other operations.
    element: int | None
    is_written: bool
    is_keyword: bool


class UnevenPropagator(ShardingPropagator):
    """Torch's propagator, with the same tables of rules, that knows uneven rows."""

    def __init__(self, propagator: Any) -> None:
        vars(self).update(vars(propagator))
        self.propagate_op_sharding = LocalLRUCache(self.propagate_op_sharding_non_cached)

    def propagate_op_sharding_non_cached(self, schema: OpSchema) -> OutputSharding:
        """Propagate the placements of an operation's inputs to its outputs, RowShard as uneven rows.

        Raises:
            NotImplementedError: the operation would be wrong on uneven rows, and gathering its inputs does not help.
        """
        inputs = _inputs(schema)
        _check_one_mesh(schema, inputs)
        if not any(has_uneven(found.spec.placements) for found in inputs):
            return super().propagate_op_sharding_non_cached(schema)
        if torch.Tag.nondeterministic_seeded in schema.op.tags:
            raise NotImplementedError(f"{schema.op} would draw other numbers on unevenly split rows; {REMEDY}")
        is_view, failure = schema.op._schema._is_view_op(), None
        if _is_row_wise(schema, inputs):
            try:
                return self._propagate_with(schema, inputs, _splits(inputs))
            except (_NotRowWiseError, RuntimeError) as error:
                # Torch's rule raises where it finds no even split of a view's shape. Its errors about other operations are right.
                if not is_view and not isinstance(error, _NotRowWiseError):
                    raise
                failure = error
        if is_view:
            raise NotImplementedError(
                f"{schema.op} cannot be a view of unevenly split rows (RowShard); {REMEDY}. If it is for the weight of a layer: "
                f"{USE_IN_FORWARD}. If it is for a step of torch.optim.Muon: fully_shard_optimizer(optimizer) brings whole matrices together"
            ) from failure
        return self._propagate_with(schema, inputs, {})

    def _propagate_with(self, schema: OpSchema, inputs: list[_Input], splits: dict[_Place, _Split]) -> OutputSharding:
        """Propagate with these splits as ``Shard(0)`` and others as ``Replicate()``, then put them back."""
        stand_ins = _replace_specs(schema, [_stand_in(found, splits) for found in inputs])
        result = super().propagate_op_sharding_non_cached(stand_ins)
        moved_to = result.redistribute_schema or stand_ins
        specs = [
            _put_back(spec, found.element, splits)
            for spec, found in zip(_specs_in((moved_to.args_schema, moved_to.kwargs_schema)), inputs, strict=True)
        ]
        output_spec = _put_back_output(result.output_spec, name_of(schema.op).startswith(LIST_PREFIXES), splits)
        is_moved = [found.spec.placements != spec.placements for found, spec in zip(inputs, specs, strict=True)]
        if schema.op._schema._is_view_op() and not has_uneven(output_spec.placements):
            raise _NotRowWiseError  # a view of some rows, which are gathered
        _refuse_lost_writes(schema, inputs, is_moved, output_spec)
        moved_to = _replace_specs(moved_to, specs)
        if result.use_val_from_redistribute_schema and schema.op in self.op_to_shape_and_stride_idx:
            moved_to = self._adjust_shape_and_stride_args(output_spec.tensor_meta, moved_to, output_spec)
        result.output_spec = output_spec
        result.needs_redistribute = any(is_moved) or result.use_val_from_redistribute_schema
        result.redistribute_schema = moved_to if result.needs_redistribute else None
        return result


def plan_through_replicate(
    plan: Callable[..., list[Any]],
    src_spec: DTensorSpec,
    dst_spec: DTensorSpec,
    use_graph_based_transform: bool | None = None,
) -> list[Any]:
    """Plan torch's transforms from one spec to another, through ``Replicate()`` where RowShard meets another split."""

    def meet(src: Placement, dst: Placement) -> bool:
        if isinstance(src, UnevenShard) and dst.is_partial():  # torch cannot redistribute this
            return True
        is_split = isinstance(src, Shard | _StridedShard) and isinstance(dst, Shard | _StridedShard)
        return is_split and src != dst and (isinstance(src, UnevenShard) or isinstance(dst, UnevenShard))

    check_parts(src_spec)
    check_parts(dst_spec)
    pairs = list(zip(src_spec.placements, dst_spec.placements, strict=True))
    meeting = [axis for axis, (src, dst) in enumerate(pairs) if meet(src, dst)]
    if not meeting:
        return plan(src_spec, dst_spec, use_graph_based_transform)
    # Axes further right cut what this axis leaves, so they are gathered with it. See [Note: cuts go inside out].
    between = [Replicate() if axis >= meeting[0] and src.is_shard() else src for axis, (src, _) in enumerate(pairs)]
    spec = _with_placements(src_spec, between)
    steps = [*plan(src_spec, spec), *plan(spec, dst_spec)]
    if any(meet(*step.src_dst_placements) for step in steps):
        raise NotImplementedError(
            f"cannot plan a redistribution from {src_spec.placements} to {dst_spec.placements}; "
            "redistribute to Replicate() on all axes first"
        )
    return steps


def _check_one_mesh(schema: OpSchema, inputs: list[_Input]) -> None:
    """Refuse to stack what lies on several meshes, as ``torch.nn.utils.clip_grad_norm_`` does with norms."""
    meshes = list(dict.fromkeys(found.spec.mesh for found in inputs))
    # Torch takes the first one's mesh for all: a norm over part of the model, or a hang of ranks outside of that mesh.
    if name_of(schema.op) == "stack" and len(meshes) > 1:
        raise NotImplementedError(
            f"DTensors that are stacked must lie on one mesh, got {meshes}; if this is torch.nn.utils.clip_grad_norm_, clip by "
            "get_grad_norm(model.parameters()) and clip_grad_by_total_norm() of megatron.core.optimizer.clip_grads, which sum the "
            "norm over all meshes"
        )


def _is_row_wise(schema: OpSchema, inputs: list[_Input]) -> bool:
    """Return whether the operation works on each row by itself, or reduces over rows to DTensor's Partial."""
    name = name_of(schema.op)
    if name in _SHAPED and any(cuts_rows(placement) for found in inputs for placement in found.spec.placements):
        return False
    if name in NORMS:
        order = schema.args_schema[1] if len(schema.args_schema) > 1 else 2
        # The largest or the smallest element of a rank without rows is not defined.
        return isinstance(order, int | float) and 0 < order < math.inf
    if name == "squeeze" and len(schema.args_schema) == 1:
        return False  # torch 2.11 would squeeze the rows of a rank with one row
    if name.startswith(LIST_PREFIXES):
        return name not in LIST_REDUCTIONS
    return torch.Tag.pointwise in schema.op.tags or name in _ROW_WISE


@functools.cache
def name_of(op: Any) -> str:
    """Return an operation's name without namespace and overload: ``add_`` for ``aten.add_.Tensor``."""
    return str(op._schema.name).split("::")[-1]


def _inputs(schema: OpSchema) -> list[_Input]:
    """Find the tensors among an operation's arguments, in order."""
    is_list_operation = name_of(schema.op).startswith(LIST_PREFIXES)
    arguments = {argument.name: argument for argument in schema.op._schema.arguments}
    found: list[_Input] = []
    for name, value in {**dict(zip(arguments, schema.args_schema, strict=False)), **schema.kwargs_schema}.items():
        alias = arguments[name].alias_info
        items = value if isinstance(value, list | tuple) else [value]
        for index, spec in enumerate(items):
            element = (index if items is value else None) if is_list_operation else 0
            if isinstance(spec, DTensorSpec):
                is_written = alias is not None and alias.is_write
                found.append(_Input(spec, element, is_written, is_keyword=name in schema.kwargs_schema))
    return found


def _splits(inputs: list[_Input]) -> dict[_Place, _Split]:
    """Return the split that each place works in: that of what is written there, which cannot move, else the first."""
    splits: dict[_Place, _Split | None] = {}
    for found in sorted(inputs, key=lambda found: not found.is_written):
        for axis, placement in enumerate(found.spec.placements):
            is_split = isinstance(placement, UnevenShard) and found.element is not None
            if is_split or found.is_written:
                splits.setdefault((found.element, axis), (placement, found.spec.shape) if is_split else None)
    return {place: split for place, split in splits.items() if split is not None}


def _stand_in(found: _Input, splits: dict[_Place, _Split]) -> DTensorSpec:
    placements: list[Placement] = []
    for axis, placement in enumerate(found.spec.placements):
        split, shape = splits.get((found.element, axis), (None, torch.Size()))
        is_row_shard = isinstance(placement, UnevenShard)
        is_split = is_row_shard or placement == Shard(0)
        # Broadcasting pairs equal rows.
        is_whole = placement.is_replicate() and not found.is_written and found.spec.ndim == len(shape)
        if split is not None and (is_split or is_whole) and found.spec.shape[:1] == shape[:1]:
            # Rows that are split otherwise, or not at all, are redistributed to what is put back for them.
            placements.append(Shard(0))
        else:
            placements.append(Replicate() if is_row_shard else placement)
    return _with_placements(found.spec, placements)


def _specs_in(tree: Any) -> list[DTensorSpec]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, DTensorSpec)]


def _replace_specs(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpSchema:
    """Return the schema with its tensors' specs, in order, replaced by these."""
    remaining = iter(specs)
    args, kwargs = tree_map_only(DTensorSpec, lambda _: next(remaining), (schema.args_schema, schema.kwargs_schema))
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _put_back(spec: DTensorSpec, element: int | None, splits: dict[_Place, _Split]) -> DTensorSpec:
    """Return the spec with RowShard in place of its ``Shard(0)``; raise ``_NotRowWiseError`` where other rows are split."""
    placements = list(spec.placements)
    for axis, placement in enumerate(placements):
        split = splits.get((element, axis))
        if split is None:
            continue
        row_shard, shape = split
        own, is_split = spec.shape, isinstance(placement, Shard | _StridedShard)
        if cuts_rows(row_shard) and own != shape and (is_split or own.numel() != 1):
            raise _NotRowWiseError  # sums over rows, or over columns
        if not is_split:
            continue
        if placement != Shard(0) or own[:1] != shape[:1]:
            raise _NotRowWiseError
        placements[axis] = row_shard
    return _with_placements(spec, placements)


def _put_back_output(output: Any, is_list_operation: bool, splits: dict[_Place, _Split]) -> Any:
    if output is None or isinstance(output, DTensorSpec):
        return output and _put_back(output, 0, splits)
    places = (index if is_list_operation else 0 for index in range(len(output)))
    return type(output)(spec and _put_back(spec, place, splits) for spec, place in zip(output, places, strict=True))


def _refuse_lost_writes(schema: OpSchema, inputs: list[_Input], is_moved: list[bool], output: Any) -> None:
    """Refuse operations that would write to a copy, or to another placement than the written tensor has."""
    # Torch drops the copy after the operation and reports nothing, and the weight would keep its old values.
    for found, moves in zip(inputs, is_moved, strict=True):
        is_replaced = isinstance(output, DTensorSpec) and output.placements != found.spec.placements
        if (moves and found.is_keyword) or (found.is_written and (moves or is_replaced)):
            raise NotImplementedError(
                f"{schema.op} would write to a redistributed copy of a tensor placed by {found.spec.placements}, and "
                f"what it writes would be lost; {REMEDY}"
            )


def _with_placements(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
