"""The parameters of a unit that share dtype, placements and a layout.

A group is state without order: its weights are gathered and resharded, its gradients reduced, when it is told to. When, on
which stream and after which event is for the runtime to say.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from megatron.core.distributed.fsdp.buffers.grad_sums import GradSum
from megatron.core.distributed.fsdp.buffers.gradients import Gradients, TrainingSettings
from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter, ModuleParameters, ParamSlots, retire
from megatron.core.distributed.fsdp.buffers.weight_codec import (
    WeightCodec,
    codec_of,
    forget_initial_values,
    plain_parameter,
)
from megatron.core.distributed.fsdp.buffers.weights import PlacedWeights, Weights
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES, GroupDtypes
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor, set_shell
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
from megatron.core.distributed.fsdp.mesh.model_parallel import is_shared_between_stages, part_of

REQUIRES_GRAD = operator.attrgetter("requires_grad")


# All ranks of a mesh make its groups together, so they agree on these numbers.
_num_made: Counter[tuple[int, ...]] = Counter()  # by ranks


class StateBytes(NamedTuple):
    """Bytes of a group's optimizer state on this rank's device and in the host's memory, as far as an optimizer has reported."""

    on_device: int = 0
    on_host: int = 0


class GroupRanges(NamedTuple):
    """Names of NVTX ranges around what is done for a group."""

    gather: str
    sync: str
    reduce: str
    update: str


class FsdpParameterGroup:
    """Parameters in flat buffers: modules hold sharded DTensors of them at rest, and full tensors in use.

    Args:
        parameters: [T] parameters of one dtype and one ``requires_grad``.
        layout: where they lie in the full buffer, whose segments are for the ranks that share it.
        group_mesh: data-parallel mesh and transports.
        placements: where weights, gradients and optimizer state rest.
        dtypes: dtypes of the buffers.
        training: how it is trained, now or once its parameters are unfrozen.
        device: where the buffers live.
        least_memory: no model weight rests next to the main weight, and the reduce-scatter input has memory of its own, from the end
            of its unit's backward to the end of its reduction.

    Attributes:
        weights: main weight, model weight and full weight.
        trainable: its parameters require gradients, or did since they were sharded.
        grads_asked: [T] which of them did when that was last asked.
        parts: [T] the whole tensors that tensor-parallel ranks share.
        grads: reduce-scatter input, partial sums and main gradient; of trainable groups only.
        sharded, unsharded: [T] parameters that modules hold at rest and in use.
        param_slots: the places in modules that hold them.
        index: number in the context's registry.
        number_on_ranks: of the groups of this mesh's ranks, how many were made before; all of these ranks make them together.
        is_shared: other units use these weights too.
        state_nbytes: bytes of optimizer state.
        context: the ``FsdpContext`` of the group's unit; None until the unit has one.

    Ranks: every rank of the mesh must construct; weights are made equal to the first rank's.
    """

    grads: Gradients

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        *,
        layout: FlatLayout,
        group_mesh: GroupMesh,
        placements: Placements,
        dtypes: GroupDtypes,
        training: TrainingSettings,
        device: torch.device,
        least_memory: bool = False,
    ) -> None:
        assert layout.num_ranks == group_mesh.num_shards(placements), "a layout belongs to the ranks that share it"
        self.parameters = list(parameters)
        self.group_mesh, self.placements, self.least_memory = group_mesh, placements, least_memory
        self.training, self.index = training, -1
        self.trainable = self.parameters[0].original.requires_grad
        self.grads_asked = [self.trainable] * len(self.parameters)
        ranks = tuple(group_mesh.mesh.mesh.flatten().tolist())
        self.number_on_ranks = _num_made[ranks]
        _num_made[ranks] += 1
        self.is_shared = False
        self.state_nbytes = StateBytes()
        self.context: weakref.ref[Any] | None = None
        self.set_prefix("")
        self.parts = [part_of(p.original, p.name, group_mesh.tensor_size, p.placed) for p in self.parameters]
        # Parameters of a group have equal codecs, so the first one's speaks for all.
        codec = codec_of(self.parameters[0].original, self.parameters[0].name)
        originals, has_values = [p.original for p in self.parameters], any(p.has_values for p in self.parameters)
        self.weights = self._make_weights(
            originals, codec, layout=layout, dtypes=dtypes, device=device, has_values=has_values
        )
        self.sharded = [self._sharded_parameter(i, p) for i, p in enumerate(originals)]
        self.unsharded = [plain_parameter(p, self.weights.wrap(i), vars(p)) for i, p in enumerate(originals)]
        self.weights.set_parameters(self.sharded, self.unsharded)
        # After the weights are copied, and before gradients take memory: originals and buffers of one group exist together, no more.
        self._replace_originals()
        self.param_slots = ParamSlots()
        for index, parameter in enumerate(self.parameters):
            for place in parameter.param_slots:
                self.param_slots.add(index, self.sharded[index], self.unsharded[index], *place)
        if self.trainable:
            self._make_gradients()

    @property
    def trains(self) -> bool:
        """Whether some of its parameters require gradients now."""
        return any(self.grads_asked)

    @property
    def plans_input(self) -> bool:
        """Whether the plan has a range for its reduce-scatter input."""
        return self.trainable and not (self.least_memory or self.grads.is_direct)

    @property
    def layout(self) -> FlatLayout:
        """Where the parameters lie in the full buffer."""
        return self.weights.layout

    @property
    def dtypes(self) -> GroupDtypes:
        """Dtypes of the buffers."""
        return self.weights.dtypes

    @property
    def device(self) -> torch.device:
        """Where the buffers live."""
        return self.weights.device

    # ---- construction -------------------------------------------------------------------------------------------

    def _make_weights(
        self, originals: Sequence[torch.Tensor], codec: WeightCodec, *, dtypes: GroupDtypes, **settings: Any
    ) -> Weights:
        kind: Callable[..., Weights] = codec.weights_class(trainable=self.trainable) or Weights
        placed = [p.placed for p in self.parameters if p.placed is not None]
        if placed:
            kind = functools.partial(PlacedWeights, placed=placed)
            if not codec.casts:
                raise NotImplementedError(
                    f"parameter {self.parameters[0].name}, which is a DTensor, must have no fsdp_codec, got {codec!r}; leave it out, or "
                    "split the weight by ModelParallel(tensor_axis=...) instead of as a DTensor"
                )
        return kind(
            originals,
            group_mesh=self.group_mesh,
            placements=self.placements,
            dtypes=dtypes,
            name=str(self),
            codec=codec,
            casts_to_gather=self.least_memory,
            **settings,
        )

    def _make_gradients(self) -> None:
        if self.dtypes.main_grads != self.dtypes.main_params:
            for sharded in self.sharded:
                sharded.grad_dtype = None  # whatever main_grads_dtype is; fully_shard_optimizer casts for the step
        self.grads = Gradients(self.weights, self.training, self._make_grad_sums())
        self.grads.train_only(self.grads_asked)
        if self.context is not None:
            self.grads.use_streams(self.context().streams)  # type: ignore[union-attr]
        if self.parameters[0].placed is None:
            self._offer_main_grads()

    def change_training(self, **settings: Any) -> None:
        """Change these ``TrainingSettings`` from now on. Ranks: all of the mesh, with the same arguments; does not communicate."""
        self.training = replace(self.training, **settings)
        if self.trainable:
            self.grads.use_settings(self.training)

    def note_hook(self, name: str) -> None:
        """Take notice of a hook on the sharded parameter of this name, to be called once its reduced gradient is complete.

        Raises:
            NotImplementedError: at the end of a backward its gradient is not complete.
        """
        if is_shared_between_stages(self.sharded[0], self.group_mesh.model):
            raise NotImplementedError(
                f"register_post_accumulate_grad_hook on {name} is not served: two pipeline stages hold it, and their "
                "gradients are summed when the optimizer steps, after the last backward; step after backward"
            )
        if self.trainable:
            self.grads.note_hook()

    def _sharded_parameter(self, index: int, original: nn.Parameter) -> nn.Parameter:
        sharded = plain_parameter(original, self._dtensor(index), vars(original))
        sharded._local_tensor = self.weights.held(index, sharded._local_tensor)  # type: ignore[attr-defined]
        # Attributes of Megatron (``sequence_parallel``, ``allreduce``) and of users; code finds them on either parameter.
        return sharded

    def _dtensor(self, index: int) -> UnevenDTensor:
        """Return the DTensor over this rank's part of a main weight."""
        buffer, part = self.weights.main, self.parts[index]
        stride = torch.empty(part.shape, device="meta").stride()
        placements = [*part.placements, *buffer.row_placements(index)]
        mesh = self.group_mesh.tensor_mesh or self.group_mesh.rows_mesh
        return UnevenDTensor.over(buffer.view(index), mesh, placements, shape=part.shape, stride=stride)

    def _replace_originals(self) -> None:
        """Let whoever meets an original or a sharded parameter find this group, and free the originals' memory."""
        for index, (parameter, *ours) in enumerate(zip(self.parameters, self.sharded, self.unsharded, strict=True)):
            originals = parameter.release_originals()
            for known in (*ours, *originals):
                known._fsdp_group, known._fsdp_index = weakref.ref(self), index  # type: ignore[attr-defined]
            for original in originals:
                # The original may be referenced by a module of another unit, or by an optimizer from before: it must not keep the memory.
                forget_initial_values(original)
                retire(original)

    def _make_grad_sums(self) -> list[GradSum]:
        """Make the sums over ranks of the model besides the data-parallel ones. What is shared is a group's alone."""
        found, tensor_mesh, model = [], self.group_mesh.tensor_mesh, self.group_mesh.model
        held = zip(self.parts, self.sharded, strict=True)
        # Each tensor-parallel rank has seen a part of the sequence only: its gradient is a summand.
        split = [p for part, p in held if part.is_replicated and getattr(p, "sequence_parallel", False)]
        if split and tensor_mesh is not None and tensor_mesh.size(0) > 1:
            found.append(GradSum(split, tensor_mesh.get_group(0), waits_for_use=False))
        if is_shared_between_stages(self.sharded[0], model):
            assert model.embedding_group is not None
            # The first stage's backward ends last, so the sum must not be taken when a backward ends: stages would wait for each other.
            found.append(GradSum(self.sharded, model.embedding_group, waits_for_use=True))
        return found

    def _offer_main_grads(self) -> None:
        """Let layers write weight gradients in place. [Note: gradients written in place]."""
        for index, parameter in enumerate(self.unsharded):
            parameter.get_main_grad = functools.partial(_main_grad_of, weakref.ref(self), index)  # type: ignore[attr-defined]
            # Looked up in backward, after ``get_main_grad``: the answer depends on what was written before.
            parameter.overwrite_main_grad = self.grads.input.overwrites[index]  # type: ignore[attr-defined]
            # transformer-engine's name for a weight whose main gradient is there only once backward asks for it.
            setattr(parameter, "__fsdp_param__", True)  # noqa: B010

    def note_state(self, *, on_device: int = 0, on_host: int = 0) -> None:
        """Note the bytes of the optimizer state."""
        self.state_nbytes = StateBytes(on_device, on_host)

    # ---- names and places ---------------------------------------------------------------------------------------

    def add_slot(self, original: nn.Parameter, module_parameters: ModuleParameters, key: str) -> None:
        """Put the sharded parameter into another module too, whose parameter is tied to one of these."""
        index: int = original._fsdp_index  # type: ignore[attr-defined]
        self.param_slots.add(index, self.sharded[index], self.unsharded[index], module_parameters, key)

    def name_of(self, index: int) -> str:
        """Return the name of parameter ``index``, as seen from the context's root."""
        return self.prefix + self.parameters[index].name

    def join(self, context: Any, index: int) -> None:
        """Be served by this ``FsdpContext``, under this number in its registry."""
        self.context, self.index = weakref.ref(context), index
        if self.trainable:
            self.grads.use_streams(context.streams)

    def share(self) -> None:
        """Note that another unit uses the group's weights too."""
        self.is_shared = True

    def set_prefix(self, prefix: str) -> None:
        """Take the unit's name (with a dot behind it), as seen from the context's root, for messages and NVTX ranges."""
        self.prefix = prefix
        # Made once: a step pushes these ranges without building strings.
        unit = prefix.rstrip(".") or "root"
        self.ranges = GroupRanges(*(f"fsdp.{act} {unit}" for act in GroupRanges._fields))

    def __str__(self) -> str:
        others = len(self.parameters) - 1
        return self.name_of(0) + (f" and {others} more" if others else "")

    @property
    def requires_grad_changed(self) -> bool:
        """True if a parameter was frozen or unfrozen since ``follow_requires_grad``."""
        return list(map(REQUIRES_GRAD, self.sharded)) != self.grads_asked

    def follow_requires_grad(self) -> None:
        """Compute gradients of the parameters that require them now, and of no others.

        A group that was frozen when it was sharded gets main weights and gradients now. They rest where its weights do: its
        optimizer state is not cut further.

        Raises:
            RuntimeError: gradients of earlier microbatches wait for the last one.

        Ranks: all of the mesh, with the same arguments; does not communicate.
        """
        before, self.grads_asked = self.grads_asked, list(map(REQUIRES_GRAD, self.sharded))
        # Sums that wait have no gradient of a parameter that was frozen when they began.
        if self.trainable and self.grads.refresh_pending():
            changed = [a != b for a, b in zip(before, self.grads_asked, strict=True)].index(True)
            self.grads_asked = before
            raise RuntimeError(
                f"requires_grad of {self.name_of(changed)} must not change between the microbatches of a step, got a change "
                "while gradients of earlier ones wait for the last; freeze and unfreeze after the optimizer's step"
            )
        if self.trains and not self.trainable:
            self.trainable = True
            if self.weights.widen_main(self.training.dtypes):
                self._show_main_weights()
            self._make_gradients()
        for parameter, requires_grad in zip(self.unsharded, self.grads_asked, strict=True):
            parameter.requires_grad_(requires_grad)
        if self.trainable:
            self.grads.train_only(self.grads_asked)

    def _show_main_weights(self) -> None:
        """Let the sharded parameters, which users hold, be views of other main weights, in their dtype."""
        for index, parameter in enumerate(self.sharded):
            # Optimizers and users hold these parameters, so they are changed in place. torch has no public way to change a DTensor's dtype.
            wide = self._dtensor(index)
            set_shell(parameter, wide)  # the dtype that autograd sees
            local = self.weights.held(index, wide._local_tensor)
            parameter._local_tensor, parameter._spec = local, wide._spec  # type: ignore[attr-defined]
        self.weights.set_parameters(self.sharded, self.unsharded)

    def can_become(self, dtype: torch.dtype) -> bool:
        """Return whether ``convert`` can make this the parameters' dtype: before the first forward, where main weights follow it."""
        if self.context is not None or not self.weights.codec.casts or dtype not in SERVED_DTYPES:
            return False
        if any(parameter.grad is not None for parameter in self.sharded) or self.state_nbytes.on_device:
            return False
        return self.training.policy.resolve(dtype, trainable=self.trainable).main_params == dtype

    @torch.no_grad()
    def convert(self, dtype: torch.dtype) -> None:
        """Make the parameters' dtype another one, as if they had had it when they were sharded. Ranks: all of the mesh; blocks."""
        policy, whole_rows = self.training.policy, [Replicate()] * len(self.group_mesh.axes)
        replicated = [[*part.placements, *whole_rows] for part in self.parts]
        # Layouts depend on shapes alone, so that of the former dtype serves; values travel once, as at ``fully_shard``.
        whole = [p.redistribute(placements=r).to_local() for p, r in zip(self.sharded, replicated, strict=True)]  # type: ignore[attr-defined]
        self.training = replace(self.training, dtypes=policy.resolve(dtype, trainable=True))
        self.weights = self._make_weights(
            [tensor.to(dtype) for tensor in whole],
            self.weights.codec,
            layout=self.layout,
            dtypes=policy.resolve(dtype, trainable=self.trainable),
            device=self.device,
            has_values=True,
        )
        self.unsharded = [plain_parameter(p, self.weights.wrap(i), vars(p)) for i, p in enumerate(self.unsharded)]
        self._show_main_weights()
        self.param_slots.hold_unsharded(self.unsharded)
        if self.trainable:
            self._make_gradients()

    # ---- what backward calls ------------------------------------------------------------------------------------

    def watch_gradients(self) -> None:
        """Tell the context of gradients of the group, also in a backward that no output announced."""
        if not self.grads.is_watched and self.trains:
            self.grads.watch(functools.partial(_open_late, weakref.ref(self)))

    def refuse_gradient_of_earlier_weights(self) -> None:
        """Refuse a gradient that no output of the unit announced, if weights were written where that graph reads them.

        Raises:
            RuntimeError: they were. The fence tells autograd only where a unit's backward begins.
        """
        # Resharded weights need no such check: the version fence and the observer see to them. See [Note: version fence].
        if not self.weights.needs_gather and not self.weights.freshness.is_followed:
            raise RuntimeError(
                f"backward must not come to {self.name_of(0)} by another way than its unit's outputs after its weights were written "
                "(optimizer.step(), a load): gradients would be those of no weights at all; go through it before the optimizer's "
                "step, or run forward again"
            )


def group_of(parameter: torch.Tensor) -> FsdpParameterGroup | None:
    """Return the group of a parameter, also of one from before sharding; None for parameters of no group."""
    reference: weakref.ref[FsdpParameterGroup] | None = getattr(parameter, "_fsdp_group", None)
    return None if reference is None else reference()


def is_ignored(parameter: nn.Parameter) -> bool:
    """Return whether ``fully_shard`` was told to leave the parameter as it is (``ignored_params``)."""
    return getattr(parameter, "_fsdp_ignored", False)


# Autograd's nodes and the group's own parameters refer to these functions, so they must not keep the group: a cycle would keep
# its buffers until a collection.


def _open_late(reference: weakref.ref[FsdpParameterGroup], *_: Any) -> None:
    """Report a gradient that no output of the unit announced to the context."""
    group = reference()
    if group is not None and group.context is not None and not group.grads.is_expected:
        group.context().open_group_late(group)  # type: ignore[union-attr]


def _main_grad_of(reference: weakref.ref[FsdpParameterGroup], index: int) -> torch.Tensor:
    """Return where the gradient of unsharded parameter ``index`` is to be written: its ``get_main_grad``."""
    group = reference()
    if group is None:
        raise RuntimeError("the weight's FSDP group is gone: its model was deleted before this backward")
    if not group.grads.input.is_acquired:
        group.context().acquire_input(group)  # type: ignore[union-attr,misc]
    return group.grads.input.write_target(index)
