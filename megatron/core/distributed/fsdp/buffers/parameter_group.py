"""The parameters of a unit that share dtype, placements and a layout: their buffers, and what is done to them.

A group is state without order: it gathers, releases and reduces when told to. When, on which stream and after which
event is the context's business.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.dbuffer import DBuffer, Gather
from megatron.core.distributed.fsdp.buffers.grad_sums import GradSum
from megatron.core.distributed.fsdp.buffers.hsdp_grad_accumulator import HsdpGradAccumulator
from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter, ModuleParameters, ParamSlots, each
from megatron.core.distributed.fsdp.buffers.retired_parameter import retire
from megatron.core.distributed.fsdp.buffers.storage import FlatStorage
from megatron.core.distributed.fsdp.comm import MemoryKind, unfinished
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
from megatron.core.distributed.fsdp.mesh.model_parallel import is_shared_between_stages, part_of

_GRAD, _VERSION, _REQUIRES_GRAD = (operator.attrgetter(name) for name in ("grad", "_version", "requires_grad"))

# Version counters of gathered and of released weights. [Note: version fence] in DESIGN.md.
_GATHERED, _RELEASED = 0, 1


class FsdpParameterGroup:
    """Shards parameters into flat buffers and stands in for them: sharded DTensors at rest, full views in use.

    Args:
        parameters: [T] parameters of one dtype and one ``requires_grad``.
        layout: where they lie in the full buffer, whose segments are for the ranks that share it.
        group_mesh: data-parallel mesh and transports.
        placements: where weights, gradients and optimizer state rest.
        dtypes: dtypes of the buffers.
        grad_divisor: what reduced gradients are divided by, besides the averaging that placements ask for.
        device: where the buffers live.

    Ranks: every rank of the mesh must construct; weights are made equal to the first rank's.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        *,
        layout: FlatLayout,
        group_mesh: GroupMesh,
        placements: Placements,
        dtypes: GroupDtypes,
        grad_divisor: float | Fraction,
        device: torch.device,
    ) -> None:
        self.parameters = list(parameters)
        self.group_mesh, self.placements, self.dtypes, self.device = group_mesh, placements, dtypes, device
        self.index = -1  # place among the context's groups
        self.trainable = self.parameters[0].original.requires_grad
        self.grad_scale = group_mesh.grad_scale(placements, grad_divisor)
        self.parts = [part_of(p.original, p.name, group_mesh.tensor_size) for p in self.parameters]
        self.layout = layout
        assert layout.num_ranks == group_mesh.num_shards(placements), "a layout belongs to the ranks that share it"
        self.needs_gather = any(isinstance(p, Shard) for p in placements.parameter)
        self._make_weights()
        self.sharded = [self._sharded_parameter(i, p) for i, p in enumerate(self.parameters)]
        self.unsharded = [self._unsharded_parameter(i, p) for i, p in enumerate(self.parameters)]
        self._versioned = [*self.sharded, *(p._local_tensor for p in self.sharded)]  # type: ignore[attr-defined]
        for parameter, sharded in zip(self.parameters, self.sharded, strict=True):
            # Read by group_of: a module with a tied weight, or an optimizer, finds this group.
            sharded._fsdp_group = weakref.ref(self)  # type: ignore[attr-defined]
            for original in (parameter.original, parameter.made_from):
                if original is not None:
                    original._fsdp_group = weakref.ref(self)  # type: ignore[attr-defined]
                    parameter.original_ids += (id(original),)
                    retire(original)
            parameter.original = parameter.made_from = None  # type: ignore[assignment]  # whose memory is not needed any more
        self.param_slots = ParamSlots(
            [parameter.param_slots for parameter in self.parameters], self.sharded, self.unsharded
        )
        self.grad_sums: list[GradSum] = []
        if self.trainable:
            self._make_gradients()
        if self.weight_storage is not None:
            self.weight_storage.free()
        self._nodes: list[Any] = []
        # State that the context keeps here, so that it finds it without a look-up.
        self.num_users = 0  # forwards that are running on the gathered weights
        self.num_claims = 0  # units whose backward needs the gathered weights
        self.stays_unsharded = False  # the plan keeps the gathered weights throughout a step
        self.optimizer_state_nbytes = 0  # as far as an optimizer has told
        self.held_by_user = False  # the user asked for the gathered weights
        self.gathered: Any = None  # event of the gather; None at rest, and once compute has waited for it
        self.gathered_event: Any = None  # the same, kept to be recorded anew
        self.updated: Any = None  # event of an update beside compute; None once the gather stream has waited for it
        self.updated_event: Any = None  # the same, kept to be recorded anew
        self.is_updating = False  # such an update reads the main gradient, and compute has not waited for it
        self.updated_write_count = -1  # of the main weights, as an optimizer left them that wrote model weights too
        self.is_gathered = not self.needs_gather
        self.synced_weight_version = -1
        self.synced_write_count = -1
        self.context: weakref.ref[Any] | None = None
        self.is_shared = False  # other units use its weights too
        self.is_owed = False  # the backward under way owes the gradient
        self.staging_held = False  # backward may write to the staging buffer
        self.reduced: Any = None  # event of the last reduction that read the staging buffer
        self.reduced_event: Any = None  # the same, kept to be recorded anew
        self.set_prefix("")

    # ---- construction -------------------------------------------------------------------------------------------

    def _buffer(
        self, placements: Sequence[Placement], dtype: torch.dtype, local: torch.Tensor | None = None
    ) -> DBuffer:
        return DBuffer(self.layout, placements, self.group_mesh.axes, dtype=dtype, device=self.device, local=local)

    def _make_weights(self) -> None:
        """Afterwards model and main weight hold the first rank's original values."""
        replicas = [Replicate()] * len(self.group_mesh.axes)
        full = self._buffer(
            replicas,
            self.dtypes.compute,
            torch.zeros(self.layout.total_numel, dtype=self.dtypes.compute, device=self.device),
        )
        for index, parameter in enumerate(self.parameters):
            full.view(index).copy_(parameter.original.data)
        for axis in self.group_mesh.axes:
            try:
                axis.broadcast(full.local)
            except RuntimeError as error:
                raise unfinished(f"broadcast of the initial weights of {self}", [axis], error) from error
        if self.needs_gather:
            piece = full.piece(self.placements.parameter)
            shard = self.group_mesh.empty(piece.numel(), self.dtypes.compute, self.device, MemoryKind.SHARD)
            self.model_weight = self._buffer(self.placements.parameter, self.dtypes.compute, shard)
            self.model_weight.local.copy_(piece)
        else:
            self.model_weight = full
        main_piece = full.piece(self.placements.optimizer)
        same_dtype = self.dtypes.main_params == self.dtypes.compute
        if same_dtype and tuple(self.placements.parameter) == tuple(self.placements.optimizer):
            self.main_weight = self.model_weight
        elif same_dtype:
            main_piece = self.model_weight.piece(self.placements.optimizer)
            self.main_weight = self._buffer(self.placements.optimizer, self.dtypes.main_params, main_piece)
        else:
            self.main_weight = self._buffer(self.placements.optimizer, self.dtypes.main_params)
            self.main_weight.local.copy_(main_piece)
        # Writes go through an alias with a version counter of its own: what autograd saved is not "modified" by it.
        self._model_alias = self.model_weight.local.data
        self.weight_storage: FlatStorage | None = None
        if self.needs_gather:
            self.weight_storage = FlatStorage(self.layout.total_numel, self.dtypes.compute, self.device)
            full = self._buffer(replicas, self.dtypes.compute, self.weight_storage.flat)
        self.full_weight = full
        self._gathers = self.model_weight.gathers(full) if self.needs_gather else []
        piece = self.model_weight.piece(self.placements.optimizer).data
        has_piece = self.main_weight is not self.model_weight and piece.data_ptr() != self.main_weight.local.data_ptr()
        self._model_piece = piece if has_piece else None
        self._sync_gathers: list[Gather] = []
        own = self._buffer(self.placements.optimizer, self.dtypes.compute, piece)
        if own.local.numel() != self._model_alias.numel():
            model = self._buffer(self.placements.parameter, self.dtypes.compute, self._model_alias)
            self._sync_gathers = own.gathers(model)

    def _sharded_parameter(self, index: int, parameter: ManagedParameter) -> nn.Parameter:
        sharded = nn.Parameter(self._dtensor(self.main_weight, index), requires_grad=self.trainable)
        sharded.__dict__.update(parameter.original.__dict__)
        if self.dtypes.main_grads != self.dtypes.main_params and self.trainable:
            sharded.grad_dtype = None  # whatever main_grads_dtype is; fully_shard_optimizer casts for the step
        return sharded

    def _dtensor(self, buffer: DBuffer, index: int) -> DTensor:
        part = self.parts[index]
        stride = torch.empty(part.shape, device="meta").stride()
        placements = [*part.placements, *buffer.row_placements(index)]
        mesh = self.group_mesh.tensor_mesh or self.group_mesh.rows_mesh
        return DTensor.from_local(
            buffer.view(index), mesh, placements, run_check=False, shape=part.shape, stride=stride
        )

    def _unsharded_parameter(self, index: int, parameter: ManagedParameter) -> nn.Parameter:
        unsharded = nn.Parameter(self.full_weight.view(index), requires_grad=self.trainable)
        unsharded.__dict__.update(parameter.original.__dict__)
        return unsharded

    def _make_gradients(self) -> None:
        """Afterwards buffers for gradients exist, none of which takes memory before it is written."""
        # What it would reduce over the inner axis in each microbatch, it does not where gradients rest partial there.
        self.accumulates_partial = isinstance(self.placements.gradient[-1], Partial)
        total = self.layout.total_numel
        self.staging_storage = FlatStorage(total, self.dtypes.grad_comm, self.device)
        partial = [Partial()] * len(self.group_mesh.axes)
        self._staging = self._buffer(partial, self.dtypes.grad_comm, self.staging_storage.flat)
        self._hsdp_accumulator: HsdpGradAccumulator | None = None
        if len(partial) > 1:
            self._hsdp_accumulator = HsdpGradAccumulator(
                self._staging, self.placements.optimizer, self.dtypes.main_grads
            )
        self._follow_staging()
        self._staging_home: torch.Tensor | None = None
        self._written = [False] * len(self.parameters)
        self.main_grad_storage = FlatStorage(self.main_weight.local.numel(), self.dtypes.main_grads, self.device)
        main_grad = self._buffer(self.placements.optimizer, self.dtypes.main_grads, self.main_grad_storage.flat)
        self._grads = [self._dtensor(main_grad, i) for i in range(len(self.parameters))]
        self._partial_storage = FlatStorage(total, self.dtypes.main_grads, self.device)
        self._holds_partial = False
        self.grad_sums = self._make_grad_sums()
        for storage in (self.staging_storage, self.main_grad_storage, self._partial_storage):
            storage.free()
        self._offer_main_grads()

    def _make_grad_sums(self) -> list[GradSum]:
        """Sums of gradients over other ranks of the model than the data-parallel ones. What is shared is a group's alone."""
        found, tensor_mesh, model = [], self.group_mesh.tensor_mesh, self.group_mesh.model
        held = zip(self.parts, self.sharded, strict=True)
        split = [p for part, p in held if part.is_replicated and getattr(p, "sequence_parallel", False)]
        if split and tensor_mesh is not None and tensor_mesh.size(0) > 1:
            found.append(GradSum(split, tensor_mesh.get_group(0), waits_for_use=False))
        if is_shared_between_stages(self.sharded[0], model):
            assert model.embedding_group is not None
            found.append(GradSum(self.sharded, model.embedding_group, waits_for_use=True))
        return found

    def _offer_main_grads(self) -> None:
        """Afterwards layers may write weight gradients in place. [Note: gradients written in place] in DESIGN.md."""
        group = weakref.ref(self)
        for index, parameter in enumerate(self.unsharded):
            parameter.get_main_grad = _main_grad_getter(group, index)  # type: ignore[attr-defined]
            parameter.overwrite_main_grad = True  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def watch_gradients(self) -> None:
        """Afterwards the context hears of gradients of the group, also in a backward that no output announced.

        Gradient accumulation remembers the stream on which its node is made, so this runs on the first forward's.
        The node's hook runs when all uses in one backward are differentiated, also if the gradient was written in place.
        """
        if self._nodes or not self.trainable:
            return
        on_accumulated = _arrival_hook(weakref.ref(self))
        for parameter in self.unsharded:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_hook(on_accumulated)
            self._nodes.append(node)

    def add_slot(self, original: nn.Parameter, holder: ModuleParameters, key: str) -> None:
        """Afterwards another module, which is tied to one of these weights, holds the sharded parameter too."""
        index = next(
            i for i, p in enumerate(self.parameters) if original is self.sharded[i] or id(original) in p.original_ids
        )
        self.param_slots.add(index, holder, key)

    def name_of(self, index: int) -> str:
        """The name of parameter ``index``, seen from the context's root."""
        return self.prefix + self.parameters[index].name

    def set_prefix(self, prefix: str) -> None:
        """Afterwards the group knows its unit's name (with a dot behind it), as seen from the context's root."""
        self.prefix = prefix
        unit = prefix.rstrip(".") or "root"
        self.gather_range, self.sync_range, self.reduce_range, self.update_range = (
            f"fsdp.{act} {unit}" for act in ("gather", "sync", "reduce", "update")
        )

    def forget_events(self) -> None:
        """As ``Unsharder.forget_events``."""
        self.gathered_event = self.reduced_event = self.updated_event = self.updated = None
        self.end_update()

    @property
    def use_symm_mem(self) -> bool:
        """True if buffers lie in NCCL symmetric memory."""
        return any(axis.name == "symm" for axis in self.group_mesh.axes)

    def __str__(self) -> str:
        others = len(self.parameters) - 1
        return self.name_of(0) + (f" and {others} more" if others else "")

    def with_other_requires_grad(self) -> str | None:
        """The name of a parameter that was frozen or unfrozen after sharding; None if there is none."""
        flags = list(map(_REQUIRES_GRAD, self.sharded))
        if flags.count(self.trainable) == len(flags):
            return None
        return self.name_of(flags.index(not self.trainable))

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def model_piece(self) -> torch.Tensor | None:
        """[main weight's elements] the model weight that this rank's optimizer owns; None where it is the main weight.

        An optimizer that writes it together with the main weight (``FsdpContext.update_weights``) saves the cast.
        """
        return self._model_piece

    def sync(self, *, casts: bool = True) -> None:
        """Afterwards the model weight equals the main weight. Ranks: all, where the model weight is replicated.

        Args:
            casts: False if this rank's piece of the model weight equals the main weight already.
        """
        if self.main_weight is self.model_weight:
            return
        if casts and self._model_piece is not None:
            self._model_piece.copy_(self.main_weight.local)
        for all_gather, full, shard in self._sync_gathers:
            all_gather(full, shard)

    @property
    def syncs_alone(self) -> bool:
        """True if a rank can bring its part of the model weight up to date without the others."""
        return self.needs_gather and not self._sync_gathers

    def sync_within_step(self) -> None:
        """Afterwards a write to main weights of this rank, after the step's weights were gathered first, is in effect.

        Raises:
            RuntimeError: other ranks read this rank's weights without asking, and may have read them by half.
        """
        if any(axis.reads_peers for axis in self.group_mesh.axes):
            raise RuntimeError(
                f"weights of {self} must not be written between the forwards of a step: other ranks read them where they rest; "
                "write before the first microbatch (is_first=True)"
            )
        self.sync()

    def publish(self) -> None:
        """Afterwards gathers see what ranks have written to their shards. Ranks: all of the mesh."""
        if self.needs_gather:
            for axis in self.group_mesh.axes:
                axis.publish()

    def begin_update(self, event: Any) -> None:
        """Afterwards an update beside compute, which is over when ``event`` fires, reads the main gradient."""
        self.updated = self.updated_event = event
        self.is_updating = True

    def end_update(self) -> None:
        """Afterwards, compute having waited for the update, a gradient that was cleared takes no memory."""
        if self.is_updating:
            self.is_updating = False
            self.free_main_grad_if_cleared()

    @property
    def main_write_count(self) -> int:
        """Grows with each in-place write to the sharded parameters, or to their local tensors, that autograd counts."""
        return sum(map(_VERSION, self._versioned))

    def broadcast_replicas(self) -> None:
        """Afterwards main weights that are replicated over an axis equal its first rank's. Ranks: all of the mesh."""
        for placement, axis in zip(self.main_weight.placements, self.group_mesh.axes, strict=True):
            if isinstance(placement, Replicate):
                axis.broadcast(self.main_weight.local)

    def gather(self) -> None:
        """Afterwards the full weights are whole. Ranks: all of the mesh."""
        for all_gather, full, shard in self._gathers:
            all_gather(full, shard)

    def set_fence(self, gathered: bool) -> None:
        """Afterwards autograd refuses (or, gathered, accepts) to use what it saved of these weights."""
        fence = self.unsharded[0]
        torch._C._autograd._unsafe_set_version_counter((fence,), (_GATHERED if gathered else _RELEASED,))

    def move_weights(self, flat: torch.Tensor | None) -> None:
        """Afterwards the full weights live in ``flat`` [total_numel], or in memory of their own if None.

        The caller makes sure that no graph will look for them at the old address.
        """
        assert self.weight_storage is not None
        self.weight_storage.move(flat)
        self.full_weight.local = self.weight_storage.flat
        self._gathers = self.model_weight.gathers(self.full_weight)
        for index, parameter in enumerate(self.unsharded):
            parameter.data = self.full_weight.view(index)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def move_staging(self, flat: torch.Tensor | None) -> None:
        """Afterwards gradients are staged in ``flat`` [total_numel], or in memory of their own if None."""
        self._staging_home = None
        self.staging_storage.move(flat)
        self._staging.local = self.staging_storage.flat
        self._follow_staging()

    def _follow_staging(self) -> None:
        """Afterwards gradients are written to, and reduced from, where staging is now."""
        self._staging_views = [self._staging.view(i) for i in range(len(self.parameters))]
        if self._hsdp_accumulator is None:
            self._reduction = self._staging.reduction(self.placements.optimizer)
        else:
            self._hsdp_accumulator.follow(self._staging)

    def set_staging_aside(self, *, copies: bool) -> None:
        """Afterwards gradients are staged outside of the arena until ``bring_staging_home``.

        Args:
            copies: what is staged already moves along.
        """
        home = self.staging_storage.flat
        self.move_staging(None)
        self._staging_home = home
        if copies:
            self._staging.local.copy_(home)

    def bring_staging_home(self, *, copies: bool) -> None:
        """Afterwards gradients are staged where the plan says, which nobody else uses."""
        assert self._staging_home is not None
        aside = self._staging.local
        self.move_staging(self._staging_home)
        if copies:
            self._staging.local.copy_(aside)

    @property
    def staging_is_aside(self) -> bool:
        """True if gradients are staged outside of the arena for now."""
        return self._staging_home is not None

    def hold_staging(self) -> None:
        """Afterwards backward may write to the staging buffer."""
        if not self.staging_held:
            assert self.context is not None
            self.context().acquire_staging(self)  # type: ignore[union-attr]

    def write_target(self, index: int) -> torch.Tensor:
        """The staged gradient of parameter ``index``, full shape, to be written or, if it was before, added to."""
        self.unsharded[index].overwrite_main_grad = not self._written[index]  # type: ignore[attr-defined]
        self._written[index] = True
        return self._staging_views[index]

    def stage_grads(self) -> None:
        """Afterwards the staging buffer holds this backward's whole local gradient; what got none counts as zero."""
        targets, parameters, written = self._staging_views, self.unsharded, self._written
        grads = list(map(_GRAD, parameters))
        given = [index for index, grad in enumerate(grads) if grad is not None]
        added = [index for index in given if written[index]]
        copied = [index for index in given if not written[index]] if added else given
        with torch.no_grad():
            if copied:
                torch._foreach_copy_([targets[i] for i in copied], [grads[i] for i in copied])
            if added:
                torch._foreach_add_([targets[i] for i in added], [grads[i] for i in added])
            if len(copied) + written.count(True) < len(targets):
                torch._foreach_zero_([t for i, t in enumerate(targets) if not written[i] and grads[i] is None])
        if given:
            each(setattr, parameters, repeat("grad"), repeat(None))
        self._written = [False] * len(targets)

    def drop_grads(self) -> None:
        """Afterwards nothing is left of a backward that did not finish."""
        for parameter in self.unsharded:
            parameter.grad = None
        self.is_owed = False
        self._written = [False] * len(self.parameters)

    def accumulate_partial(self) -> None:
        """Afterwards the staged gradient is part of this rank's own sum over microbatches, in ``main_grads_dtype``."""
        if self._holds_partial:
            self._partial_storage.flat.add_(self._staging.local)
        else:
            self._partial_storage.allocate()
            self._partial_storage.flat.copy_(self._staging.local)
            self._holds_partial = True

    @property
    def has_partial(self) -> bool:
        """True if sums over microbatches are not reduced over all ranks yet."""
        return self._holds_partial or (self._hsdp_accumulator is not None and self._hsdp_accumulator.is_held)

    @property
    def has_outer_partial(self) -> bool:
        """True if sums over microbatches are reduced over the inner axis, and not over the outer one yet."""
        return self._hsdp_accumulator is not None and self._hsdp_accumulator.is_held

    @property
    def holds_own_memory(self) -> bool:
        """True if a reduction reads memory outside of the arena that is to be freed then."""
        waits = self._hsdp_accumulator is not None and self._hsdp_accumulator.waits_to_be_freed
        return self._partial_storage.allocated or waits or not self.staging_storage.in_arena

    def free_own_memory(self) -> None:
        """Afterwards gradients that have been reduced take no memory outside of the arena."""
        self.staging_storage.free()
        if not self._holds_partial:
            self._partial_storage.free()
        if self._hsdp_accumulator is not None and self._hsdp_accumulator.waits_to_be_freed:
            self._hsdp_accumulator.drop()

    @property
    def partial_nbytes(self) -> int:
        """Bytes of sums over microbatches that are not reduced over all ranks, where the strategy keeps them."""
        if self.accumulates_partial:
            return self._partial_storage.nbytes
        return 0 if self._hsdp_accumulator is None else self._hsdp_accumulator.storage.nbytes

    def drop_partial(self) -> None:
        """Afterwards there are no sums over microbatches that are not reduced over all ranks. No reduction is under way."""
        self._holds_partial = False
        self._partial_storage.free()
        if self._hsdp_accumulator is not None:
            self._hsdp_accumulator.drop()

    def prepare_sum(self) -> bool:
        """As ``prepare_main_grad``, for what a reduction writes that is not a step's last."""
        if self._hsdp_accumulator is None:
            return self.prepare_main_grad()
        self._hsdp_accumulator.storage.allocate()
        return not self._hsdp_accumulator.is_held

    def prepare_main_grad(self) -> bool:
        """Afterwards ``param.grad`` is the main gradient; True if it holds nothing yet, to be overwritten."""
        self.main_grad_storage.allocate()
        held = list(map(_GRAD, self.sharded))
        overwrite = held.count(None) == len(held)
        if not overwrite:
            self._take_over(held)
        each(setattr, self.sharded, repeat("grad"), self._grads)
        return overwrite

    def _take_over(self, held: list[Any]) -> None:
        """Afterwards the main gradient holds what ``param.grad`` held, zeros where there was none."""
        for grad, own in zip(held, self._grads, strict=True):
            if grad is None:
                own._local_tensor.zero_()
            elif grad is not own:
                own._local_tensor.copy_(grad._local_tensor if isinstance(grad, DTensor) else grad)

    def reduce(self, *, overwrite: bool, is_last: bool, is_staged: bool = True) -> None:
        """Afterwards the main gradient holds (``overwrite``) or has grown by the mean of the ranks' gradients.

        Args:
            is_last: also over the outer axis; else, where there is one, the sum over the inner axis waits for it.
            is_staged: gradients are staged; else there are only sums of earlier microbatches that wait.

        Ranks: all of the mesh, or (not ``is_last``) of the inner axis.
        """
        if self._holds_partial:
            self._partial_storage.flat.add_(self._staging.local)
            self._staging.local.copy_(self._partial_storage.flat)
            self._holds_partial = False
        out, scale = self.main_grad_storage.flat, self.grad_scale
        if is_last or self._hsdp_accumulator is None:
            for grad_sum in self.grad_sums:
                grad_sum.before_reduction(overwrite=overwrite)
        if self._hsdp_accumulator is None:
            reduce, full = self._reduction
            reduce(out, full, scale=scale, accumulate=not overwrite)
        elif is_last:
            self._hsdp_accumulator.finish(out, scale=scale, accumulate=not overwrite, is_staged=is_staged)
        else:
            self._hsdp_accumulator.keep()

    @property
    def has_main_grad(self) -> bool:
        """True if the main gradient holds anything."""
        return self.trainable and list(map(_GRAD, self.sharded)).count(None) < len(self.sharded)

    def clear_grads(self) -> None:
        """Afterwards there is no gradient of the group, and none takes memory."""
        if self.trainable:
            for parameter in self.sharded:
                parameter.grad = None
            self.free_main_grad_if_cleared()
            self.drop_partial()

    def free_main_grad_if_cleared(self) -> None:
        """Afterwards the main gradient takes no memory if the user has set ``param.grad`` to None."""
        if self.is_updating or not self.main_grad_storage.allocated:
            return  # an update beside compute reads it: the next gather's wait comes after that
        if list(map(_GRAD, self.sharded)).count(None) == len(self.sharded):
            self.main_grad_storage.free()


def group_of(parameter: torch.Tensor) -> FsdpParameterGroup | None:
    """The group that a parameter belongs to, also one that was sharded since; None for parameters of no group."""
    reference: weakref.ref[FsdpParameterGroup] | None = getattr(parameter, "_fsdp_group", None)
    return None if reference is None else reference()


def _arrival_hook(group: weakref.ref[FsdpParameterGroup]) -> Callable[..., None]:
    def on_accumulated(*_: Any) -> None:
        owner = group()
        if owner is not None and owner.context is not None and not owner.is_owed:
            owner.context().open_group(owner)  # type: ignore[union-attr]

    return on_accumulated


def _main_grad_getter(group: weakref.ref[FsdpParameterGroup], index: int) -> Callable[[], torch.Tensor]:
    def get_main_grad() -> torch.Tensor:
        owner = group()
        if owner is None:
            raise RuntimeError("the weight's FSDP group is gone: its model was deleted before this backward")
        owner.hold_staging()
        return owner.write_target(index)

    return get_main_grad
