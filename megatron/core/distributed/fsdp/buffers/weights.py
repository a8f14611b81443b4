"""The weights of a parameter group: main and model weight at rest, the full weight in use, and what guards them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage, Gather
from megatron.core.distributed.fsdp.buffers.materialize import mark_unfilled
from megatron.core.distributed.fsdp.buffers.param_slots import ParamSlots
from megatron.core.distributed.fsdp.buffers.weight_codec import CAST, WeightCodec
from megatron.core.distributed.fsdp.buffers.weight_state import (
    FENCE_BITS,
    RESHARDED,
    VERSION,
    Freshness,
    Holders,
    WeightState,
)
from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport, unfinished
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
from megatron.core.distributed.fsdp.mesh.model_parallel import PlacedParameter, local_gradient


@dataclass(frozen=True)
class _ToModel:
    """How the model weight follows the main weight.

    Attributes:
        piece: see ``Weights.encoded_piece``.
        gathers: bring the pieces of other ranks.
        publishes: let all-gathers see what ranks have written to their shards, where transports ask for it. Ranks: all of the mesh.
    """

    piece: torch.Tensor | None
    gathers: list[Gather]
    publishes: list[Callable[[], object]]


class Weights:
    """Flat buffers of a group's weights, and the events and claims that say when they may be read or overwritten.

    Args:
        originals: [T] parameters as the user made them; made equal to the mesh's first rank's.
        layout: where they lie in the full buffer.
        group_mesh: data-parallel mesh and transports.
        placements: where weights and optimizer state rest.
        dtypes: dtypes of the buffers.
        device: where the buffers live.
        name: of the group, for errors.
        codec: makes the model weight from the main weight.
        has_values: this rank's originals do not all wait for values. Where no rank's has any, none are sent.
        casts_to_gather: no model weight rests next to the main weight: each all-gather casts the main weight to this rank's part of
            the full weight, where process groups gather it from. Elsewhere, and with codecs that do not cast, one rests.

    Attributes:
        main: what the optimizer and checkpoints see.
        model: what the codec makes, and what is all-gathered; the same buffer as ``main`` where dtypes and placements match, or
            where ``casts_to_gather``. Whole where no other rank holds a part of it, but in the latter case: nothing is gathered then.
        full: the whole model weight, of which ``unsharded`` are views; complete once ``use`` has been called.
        full_storage: memory of ``full``; None where the model weight is not sharded and ``full`` is ``model``.
        sharded, unsharded: [T] parameters that modules hold at rest and in use.
        state: where the full weight is.
        holders: who needs it now.
        freshness: which writes it and the model weight have followed.
        gathered: mark of the all-gather, for which compute waits.
        updated: mark of an optimizer update that runs concurrently with compute, for which the gather stream waits.
        version: what ``use`` sets the version counters of ``unsharded`` to; writes in place move them on.

    Ranks: every rank of the mesh must construct.
    """

    shares_counter = True  # of versions, which unsharded parameters have in common
    gradient_of: ClassVar[Any] = attrgetter("grad")  # of an unsharded parameter: this rank's part, or None

    def __init__(
        self,
        originals: Sequence[torch.Tensor],
        *,
        layout: FlatLayout,
        group_mesh: GroupMesh,
        placements: Placements,
        dtypes: GroupDtypes,
        device: torch.device,
        name: str,
        codec: WeightCodec = CAST,
        has_values: bool = True,
        casts_to_gather: bool = False,
    ) -> None:
        self.codec, self.layout, self.group_mesh = codec, layout, group_mesh
        self.placements, self.dtypes = placements, dtypes
        casts_to_gather = casts_to_gather and self._can_cast_to_gather()
        if not casts_to_gather:
            # The model weight is the full one where no other rank holds a part of it: nothing is copied, and no arena is needed.
            placed = zip(placements.parameter, group_mesh.axes, strict=True)
            whole = tuple(Replicate() if axis.size == 1 else placement for placement, axis in placed)
            self.placements = replace(placements, parameter=whole)
        self.freshness = Freshness()
        full = self._original_weights(originals, name, device, has_values=has_values)
        self._make_buffers(full, casts_to_gather=casts_to_gather)
        self.sharded: list[nn.Parameter] = []
        self.unsharded: list[nn.Parameter] = []
        self.state = WeightState.SHARDED if self.needs_gather else WeightState.WHOLE
        self.holders = Holders()
        self.version = 0
        self.use_streams(Streams())

    @property
    def rest_dtype(self) -> torch.dtype:
        """The dtype of the model weight and the full weight."""
        return self.codec.rest_dtype(self.dtypes.compute)

    @property
    def device(self) -> torch.device:
        """Where the buffers live."""
        return self.full.local.device

    @property
    def needs_gather(self) -> bool:
        """True if other ranks hold parts of the model weight."""
        return any(isinstance(placement, Shard) for placement in self.placements.parameter)

    @property
    def encoded_piece(self) -> torch.Tensor | None:
        """[main weight's elements] the part of the model weight that the main weight is encoded into; None where they are one."""
        return self._to_model.piece

    @property
    def piece_of_update(self) -> torch.Tensor | None:
        """What an optimizer writes together with the main weight, which saves the encoding.

        None where there is nothing to write: they are one, or the codec must see all main weights first.
        """
        return self._to_model.piece if self.codec.casts else None

    @property
    def _casts_to_gather(self) -> bool:
        return self.main is self.model and self.main.local.dtype != self.rest_dtype

    # ---- construction -------------------------------------------------------------------------------------------

    def _original_weights(
        self, originals: Sequence[torch.Tensor], name: str, device: torch.device, *, has_values: bool
    ) -> FlatBuffer:
        """Return the full weight with the first rank's values, in their own dtype; with none, if no rank has any."""
        some_values = torch.tensor([float(has_values)], device=device)
        # All ranks must agree whether values are sent: some may have loaded theirs, and others wait for them (a meta device).
        self._run_on_axes(name, lambda axis: axis.maximum(some_values))
        is_filled = bool(some_values.item())
        if not is_filled:
            for original in originals:
                # Before the flat buffer is allocated: one copy of the unit at a time, not two.
                original.untyped_storage().resize_(0)
        # Zeros: norms and comparisons of whole buffers read the padding too.
        flat = torch.zeros(self.layout.total_numel, dtype=originals[0].dtype, device=device)
        full = self._buffer(self._whole, flat)
        for index, original in enumerate(originals):
            if is_filled:
                full.view(index).copy_(original.data)
            else:
                mark_unfilled(full.view(index))
        if is_filled:
            # Ranks may have drawn other random numbers. Axis by axis, the mesh's first rank's come to all.
            self._run_on_axes(name, lambda axis: axis.broadcast(full.local))
        return full

    def _can_cast_to_gather(self) -> bool:
        is_sharded = any(isinstance(p, Shard) for p in self.placements.parameter)
        rests_together = tuple(self.placements.parameter) == tuple(self.placements.optimizer)
        # A transport with memory of its own kind sends from a shard that it has allocated; a cast into the full weight would not be there.
        gathers_anywhere = not any(axis.is_symmetric for axis in self.group_mesh.axes)
        is_cast = self.codec.casts and self.dtypes.main_params != self.rest_dtype
        return is_sharded and rests_together and gathers_anywhere and is_cast

    def _run_on_axes(self, name: str, collective: Callable[[Transport], None]) -> None:
        for axis in self.group_mesh.axes:
            try:
                collective(axis)
            except RuntimeError as error:
                raise unfinished(f"broadcast of the initial weights of {name}", [axis], error) from error

    @property
    def _whole(self) -> list[Placement]:
        return [Replicate()] * len(self.group_mesh.axes)

    def _buffer(self, placements: Sequence[Placement], local: torch.Tensor) -> FlatBuffer:
        return FlatBuffer(self.layout, placements, self.group_mesh.axes, local)

    def _make_buffers(self, full: FlatBuffer, *, casts_to_gather: bool) -> None:
        """Make model and main weight from the full one, and the memory into which the model weight is gathered."""
        placements, dtypes, device = self.placements, self.dtypes, full.local.device
        if casts_to_gather:
            own = full.piece(placements.optimizer).to(dtypes.main_params, copy=True)
            self.main = self.model = self._buffer(placements.optimizer, own)
        else:
            self.model = self._make_model_weight(full)
            self.main = self._main_weight_of(full)
        self.full_storage: FlatStorage | None = None
        if self.needs_gather:
            self.full_storage = FlatStorage(self.layout.total_numel, self.rest_dtype, device)
            self.group_mesh.reserve(self.layout.total_numel, self.rest_dtype, device, MemoryKind.UNSHARDED)
        # Weights that are not gathered need a separate alias. Its version counter must not change with writes to the sharded
        # parameters, nor with syncs, which may run for the next forward while a backward uses the weights.
        self.full = self._buffer(self._whole, self.full_storage.flat if self.full_storage else self.model.local.data)
        self._follow_full()
        self._follow_main()

    def _main_weight_of(self, full: FlatBuffer) -> FlatBuffer:
        """Return the main weight, which is the model weight, or lies in it, where they have one dtype."""
        placements, dtype = self.placements, self.dtypes.main_params
        if not self.codec.casts or dtype != self.rest_dtype:
            return self._buffer(placements.optimizer, full.piece(placements.optimizer).to(dtype, copy=True))
        if tuple(placements.parameter) == tuple(placements.optimizer):
            return self.model
        # One memory, so an update of the main weight is one of this rank's part of the model weight; others still need it.
        return self._buffer(placements.optimizer, self.model.piece(placements.optimizer))

    def _follow_full(self) -> None:
        """List what fills the full weight where it is now: a cast, where there is one to do, and all-gathers."""
        if self._casts_to_gather:
            own = self.full.piece(self.placements.parameter)
            cast: Gather = (torch.Tensor.copy_, own, self.main.local)
            self._gathers = [cast, *self._buffer(self.placements.parameter, own).gathers(self.full)]
        else:
            self._gathers = self.model.gathers(self.full)

    def _follow_main(self) -> None:
        """Say how the model weight is brought up to date with the main weight."""
        placements = self.placements
        # Writes go through aliases with version counters of their own: what autograd saved is not "modified" by them.
        model = self._buffer(placements.parameter, self.model.local.data)
        piece = model.piece(placements.optimizer)
        has_piece = self.main is not self.model and piece.data_ptr() != self.main.local.data_ptr()
        self.freshness.count_casts(has_piece)
        own = self._buffer(placements.optimizer, piece)
        published = self.group_mesh.axes if self.needs_gather else ()
        self._to_model = _ToModel(
            piece=piece if has_piece else None,
            gathers=own.gathers(model) if piece.numel() != model.local.numel() else [],
            publishes=[axis.publish for axis in published if type(axis).publish is not Transport.publish],
        )

    def widen_main(self, dtypes: GroupDtypes) -> bool:
        """Take these dtypes; if weights are trained in another dtype than they compute in, make main weights and return True."""
        self.dtypes = dtypes
        if self.main.local.dtype == dtypes.main_params:
            return False
        # Weights that were frozen when they were sharded rest as their main weights do: nothing is cut further.
        assert self.main.local.numel() == self.model.local.numel(), "placements of frozen parameters"
        casts_to_gather = self._casts_to_gather
        self.main = self._buffer(self.placements.optimizer, self.main.local.to(dtypes.main_params))
        if casts_to_gather:
            self.model = self.main
            self._follow_full()
        self._follow_main()
        self.freshness.outdate()
        return True

    def _make_model_weight(self, full: FlatBuffer) -> FlatBuffer:
        # What a codec makes is written by the first sync; it is no copy of the values.
        is_coded = not self.codec.casts
        if not self.needs_gather:
            rest = self.rest_dtype
            flat = torch.zeros_like(full.local, dtype=rest) if is_coded else full.local.to(rest)
            return self._buffer(self._whole, flat)
        piece = full.piece(self.placements.parameter)
        # Memory that transports can send from, such as symmetric memory, where they ask for it.
        shard = self.group_mesh.empty(piece.numel(), self.rest_dtype, full.local.device, MemoryKind.SHARD)
        shard.zero_() if is_coded else shard.copy_(piece)
        return self._buffer(self.placements.parameter, shard)

    def wrap(self, index: int) -> torch.Tensor:
        """Return the full weight of parameter ``index`` as its module multiplies it."""
        return self.full.view(index)

    def held(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Return what the DTensor of parameter ``index`` holds, for this rank's part of its main weight."""
        return local

    def use_streams(self, streams: Streams) -> None:
        """Be ordered by these streams from now on. Nothing is pending: the former context has waited for it."""
        self.gathered, self.updated = streams.mark(), streams.mark()

    def set_parameters(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]) -> None:
        """Keep the [T] parameters over these buffers, and give back the full weight's memory."""
        self.sharded, self.unsharded = list(sharded), list(unsharded)
        self.freshness.count_writes_to([*self.sharded, *(p._local_tensor for p in self.sharded)])  # type: ignore[attr-defined]
        # Made once: each step sets all these versions in one call.
        self._fenced = self._counting()
        if self.full_storage is not None and self.state is WeightState.SHARDED:
            self.full_storage.free()

    def _counting(self) -> tuple[torch.Tensor, ...]:
        """Return the unsharded tensors that have a version counter each."""
        return tuple(self.unsharded[:1] if self.shares_counter else self.unsharded)

    # ---- main to model weight -----------------------------------------------------------------------------------

    def note_load(self) -> None:
        """Note that the main weights are others now, also if they were read straight into memory, which no count sees."""
        self.freshness.note_load()

    def begin_update(self, *, is_whole: bool) -> Any:
        """Return what an update is to do for the codec; None where ``sync`` does it, or ``piece_of_update`` says it.

        Args:
            is_whole: it updates all main weights of the group.
        """
        return None

    def end_partial_update(self) -> None:
        """Write ``piece_of_update`` after an update that left some of the main weights out."""
        if self.piece_of_update is not None:
            self.piece_of_update.copy_(self.main.local)

    def sync(self, *, casts: bool = True) -> None:
        """Bring the model weight up to date with the main weight. Ranks: all, where the model weight is replicated.

        Args:
            casts: False if this rank's piece of the model weight was written with the main weight.
        """
        if casts and self._to_model.piece is not None:
            self._to_model.piece.copy_(self.main.local)
        for all_gather, full, shard in self._to_model.gathers:
            all_gather(full, shard)

    def received_nbytes(self, *, syncs: bool) -> int:
        """Return the bytes that other ranks send to this one in a sync, or else in an all-gather."""
        gathers = self._to_model.gathers if syncs else self._gathers
        return sum(target.nbytes - source.nbytes for move, target, source in gathers if move is not torch.Tensor.copy_)

    @property
    def syncs_at_gather(self) -> bool:
        """True if each all-gather brings this rank's writes along, without a sync of all ranks before it, or if there is no sync."""
        return self.main is self.model or (self.needs_gather and not self.syncs_jointly)

    @property
    def syncs_jointly(self) -> bool:
        """True if the model weight follows the main weight by collectives of its own; else a rank does it without the others."""
        return bool(self._to_model.gathers)

    @property
    def loses_writes(self) -> bool:
        """True if what is written to the full weight does not come to the main weight."""
        return self.codec.casts and (self.needs_gather or self.encoded_piece is not None)

    def broadcast_replicas(self) -> None:
        """Copy the first rank's main weight along each axis that replicates it. Ranks: all of the mesh."""
        for placement, axis in zip(self.main.placements, self.group_mesh.axes, strict=True):
            if isinstance(placement, Replicate):
                axis.broadcast(self.main.local)

    @property
    def can_detect_writes(self) -> bool:
        """True if ``differs`` sees each write to the main weight that other ranks must learn of.

        It cannot where the main weight is a part of the full weight, of which other ranks keep a copy (fp32 in ``optim`` and
        ``optim_grads``): both change together. Nor does it for codecs that do more than cast.
        """
        return self.loses_writes or (self.codec.casts and not self.syncs_jointly)

    def differs(self) -> torch.Tensor:
        """Return a bool tensor [] on the device: whether this rank's part of the full weight differs from its cast main weight."""
        # Values, since writes through ``.data`` and by kernels move no version counter. See [Note: sibling roots].
        own = self.full.piece(self.placements.optimizer)
        return (own != self.main.local.to(own.dtype)).any()

    def follow_main(self, version: int) -> None:
        """Cast for a new weight version, on the gather stream, before the all-gather. Ranks: all of the mesh.

        What every rank must take part in depends on the weight version alone, which is the same on all of them.
        """
        # Before the cast: a write meanwhile must not count as cast. Without a call: each unit comes here in each step.
        write_count = sum(map(VERSION, self.freshness.tensors))
        if self.main is not self.model:
            self.sync(casts=write_count != self.freshness.updated_count)
        # On every rank, whether or not it has written anything: publishing is collective, and ranks know only their own writes.
        for publish in self._to_model.publishes:
            publish()
        self.freshness.note_cast(version, write_count, gathers=True)

    def follow_late_write(self, version: int, *, gathers: bool) -> None:
        """Cast again within a weight version, where this rank can do that without the others."""
        # As in ``follow_main``: before the cast.
        write_count = self.freshness.write_count
        self.sync()
        self.freshness.note_cast(version, write_count, gathers=gathers)

    # ---- the full weight ----------------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """True if the full weight is complete, or its all-gather is under way."""
        return self.state is not WeightState.SHARDED

    def gather(self) -> None:
        """All-gather the model weight into the full one, which ``use`` waits for. Runs on the gather stream. Ranks: all of the mesh.

        Weights that rest whole gather nothing; ``use`` waits for their sync.
        """
        for all_gather, full, shard in self._gathers:
            all_gather(full, shard)
        # Also where nothing was gathered: compute must not read weights that a sync still writes.
        self.gathered.record(Role.GATHER)
        self.state = WeightState.GATHERING

    def wait(self, edge: Edge) -> None:
        """Make compute wait for the all-gather, if it is under way."""
        self.gathered.wait(edge)
        if self.state is WeightState.GATHERING:
            self.state = WeightState.WHOLE

    def use(self, slots: ParamSlots) -> None:
        """Put the unsharded parameters into the modules, and let autograd use what it saved of them since they were last written.

        Args:
            slots: the places in modules.
        """
        if self.gathered.is_pending:
            self.gathered.wait(Edge.WEIGHTS_GATHERED)
        self.state = WeightState.WHOLE
        # See [Note: version fence]: a write to the weights gives them a version that autograd has not saved.
        self.version = version = 1 + (self.freshness.followed & FENCE_BITS)
        torch._C._autograd._unsafe_set_version_counter(self._fenced, (version,) * len(self._fenced))
        deque(map(dict.__setitem__, slots.holders, slots.keys, slots.unsharded), maxlen=0)  # each, without a call

    def release(self, *, poisons: bool) -> None:
        """Let autograd use nothing that it saved of the full weight, and free its memory unless that is an arena's.

        Compute has waited for the all-gather: memory that a gather still writes must not be given to others.

        Args:
            poisons: fill it with NaN first.
        """
        self.version = RESHARDED
        torch._C._autograd._unsafe_set_version_counter(self._fenced, (RESHARDED,) * len(self._fenced))
        if poisons:
            # Through ``data``, which has a version counter of its own: the fence must keep its number.
            self.full.local.data.fill_(self.codec.nan)
        if not self.full_storage.in_arena:  # type: ignore[union-attr]
            self.full_storage.free()  # type: ignore[union-attr]
        self.state = WeightState.SHARDED

    def end_use(self) -> None:
        """Act where a reshard has nothing to release: the weights are whole at rest, or were not gathered."""

    def move(self, flat: torch.Tensor | None, *, copies: bool = False) -> None:
        """Put the full weight into ``flat`` [total_numel], or into memory of its own if None.

        The caller makes sure that no graph will look for it at the old address.

        Args:
            copies: the content moves along.
        """
        assert self.full_storage is not None
        former = self.full_storage.flat
        self.full_storage.move(flat)
        if copies:
            self.full_storage.flat.copy_(former)
        # The parameters stay the same objects: graphs and modules refer to them. See [Note: the generation of a graph].
        self.full.rebind(self.full_storage.flat)
        self._follow_full()
        for index, parameter in enumerate(self.unsharded):
            self._rebind(index, parameter)

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        parameter.data = self.full.view(index)


class PlacedWeights(Weights):
    """Weights of parameters that are DTensors over tensor-parallel ranks (``mesh/model_parallel.py``).

    Flat buffers hold their local tensors; modules multiply DTensors around views of the full weight.

    Args:
        placed: [T] how each parameter is split over tensor-parallel ranks.
    """

    shares_counter = False  # each DTensor counts its own versions

    def __init__(
        self, originals: Sequence[torch.Tensor], *, placed: Sequence[PlacedParameter], **settings: Any
    ) -> None:
        self._placed = placed
        super().__init__(originals, **settings)

    gradient_of = staticmethod(local_gradient)

    def wrap(self, index: int) -> torch.Tensor:
        return self._placed[index].over(self.full.view(index))

    def _counting(self) -> tuple[torch.Tensor, ...]:
        # Local tensors, which modules may have taken out, share one counter.
        return (*super()._counting(), self.unsharded[0]._local_tensor)  # type: ignore[attr-defined]

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        parameter._local_tensor.data = self.full.view(index)  # type: ignore[attr-defined]
