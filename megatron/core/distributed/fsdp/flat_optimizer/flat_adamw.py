"""AdamW on this rank's flat shards: one kernel per parameter group, which also casts to the model weight.

See [Note: the flat optimizer].
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module_state import copy_into
from megatron.core.distributed.fsdp.api.optimizer import check_step, contexts_of_groups, groups_of
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.buffers.sharded_grad import set_grads
from megatron.core.distributed.fsdp.buffers.weight_codec import CAST
from megatron.core.distributed.fsdp.comm.streams import HostWork
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import make_update
from megatron.core.distributed.fsdp.flat_optimizer.flat_norm import FlatGradNorm, has_gradient
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import REMAINDER, STEP, FlatState, HostState
from megatron.core.distributed.fsdp.flat_optimizer.host_updates import HostUpdates
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable
from megatron.core.distributed.fsdp.flat_optimizer.moments import MOMENT_DTYPES
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

_GRAD, _VALUES = operator.attrgetter("grad"), operator.methodcaller("values")
_MAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FlatAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` for the parameters of a model after ``fully_shard``, in one kernel per parameter group.

    The kernel reads the gradient in its own dtype, clips it, updates state and main weight in fp32, and writes the
    model weight, each element once. State is allocated at once, in fp32 unless other dtypes are given. ``state`` has it by parameter
    under torch's names, as DTensors that are views of flat buffers, so checkpoints are exchanged with ``torch.optim.AdamW``.

    Args:
        params: all trainable parameters of sharded units, or param groups, which may differ in ``lr``, ``betas``,
            ``eps`` and ``weight_decay``, which may change between steps, and the parameters of each group may not.
        store_param_remainders: keep bf16 main weights as the upper halves of fp32 ones, whose lower halves (int16) are
            optimizer state. Saves 2 bytes per parameter compared with fp32 main weights next to bf16 model weights, and
            the cast. Training is that of fp32 main weights except for ties: the bf16 weight is the fp32 one rounded
            with ties away from zero, where a cast rounds ties to even. Needs bf16 parameters and
            ``MixedPrecisionPolicy(main_params_dtype=None)``. A write to weights between steps zeroes the remainders of
            their group (writes through ``.data`` are not noticed), so load weights before the state of this optimizer.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments: fp32, bf16, fp16 or ``torch.uint8``, which is FP8 (E4M3). The update is
            computed in fp32, and its moments are rounded to the nearest number when they are stored. fp16 and FP8 have scales, one
            for each 1,024 elements or less ([Note: moments in fewer bits]); such moments are in ``state_dict()`` and in
            checkpoints, in fp32, but not in ``state``. Checkpoints and state dicts of all dtypes load into each other.
        offload_fraction: fraction of the parameters, by whole units, whose state and fp32 main weights are in the host's
            memory, where torch's fused AdamW updates them; the last units are taken first. A write to their weights through
            ``.data`` is lost.
        pins_gradients, pins_weights: gradients are copied to the host, and weights from it, through page-locked memory, which
            overlaps other work.
        overlaps_host_updates: with ``overlaps_forward``, updates on the host overlap the next forward too.
        overlaps_forward: return from ``step`` while updates still overlap the next forward, whose units each wait
            for their own update. Until that forward, or ``synchronize()``, parameters, state and gradients must not be
            read or written; ``state_dict``, ``load_state_dict`` (also the model's) and checkpoints synchronise
            themselves.

    Raises:
        ValueError: a parameter is not sharded, not all of a unit's are given, or they have a dtype that is not served;
            ``store_param_remainders`` with main weights that are not bf16; a rate is out of range; a dtype of moments is none of
            those above, or is not fp32 with ``offload_fraction``.

    ``step`` makes the checks of ``fully_shard_optimizer``, which this optimizer does not need. A parameter without a
    gradient is not updated; when other ones have none than in the step before, the host waits for the device once. Two runs are bitwise equal. On the CPU and for fp32 main weights a step is bitwise that of
    ``torch.optim.AdamW(foreach=True)``.

    Ranks: all that hold the parameters build it, with the same parameters in the same order.
    Source: Loshchilov and Hutter (arXiv:1711.05101), algorithm 2; the split of fp32 in two halves as in apex's
    ``DistributedFusedAdam(store_param_remainders=True)``.
    """

    checks_its_steps = True  # fully_shard_optimizer has nothing to add
    _more_defaults: Mapping[str, Any] = {}  # further hyperparameters, of an optimizer that extends this one

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store_param_remainders: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        overlaps_forward: bool = False,
        offload_fraction: float = 0.0,
        pins_gradients: bool = True,
        pins_weights: bool = True,
        overlaps_host_updates: bool = False,
    ) -> None:
        _check_rates(lr, betas, eps, weight_decay)
        self._moment_dtypes = (exp_avg_dtype, exp_avg_sq_dtype)
        _check_moment_dtypes(self._moment_dtypes, offload_fraction)
        rates = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self._is_built = False
        # With the other defaults of torch.optim.AdamW, so that each loads the other's state_dict.
        defaults = torch.optim.AdamW([torch.zeros(1, device="cpu")]).defaults
        super().__init__(params, {**defaults, **rates, **self._more_defaults})
        self.overlaps_forward = overlaps_forward
        groups = groups_of(self)
        # Some may have been unfrozen since the last forward, or before the first one. See [Note: freezing].
        for context in contexts_of_groups(groups):
            context.follow_requires_grad()
        for group in groups:
            if group.requires_grad_changed:
                group.follow_requires_grad()
        self._frozen = [weakref.ref(group) for group in groups if not group.trainable]
        groups = [group for group in groups if group.trainable]
        _check_parameters(self.param_groups, groups)
        device = groups[0].device
        self._update = make_update(device)
        offloaded = _offloaded(groups, offload_fraction)
        self._states: list[FlatState] = []
        for group in groups:
            keeps_remainder = _keeps_remainder(group, store_param_remainders)
            if group in offloaded:
                self._states.append(HostState(group, keeps_remainder=keeps_remainder, pin_memory=pins_weights))
            else:
                self._states.append(self._make_state(group, keeps_remainder=keeps_remainder))
        self._overlaps_host = overlaps_host_updates and overlaps_forward
        self._host: HostUpdates | None = None
        self._is_complete = False
        self._state_of = {id(group): state for group, state in zip(groups, self._states, strict=True)}
        self._parameters = [parameter for group in groups for parameter in group.sharded]
        self._idle: set[torch.Tensor] = set()
        members = [group["params"] for group in self.param_groups]
        self._num_members, self._members = list(map(len, members)), list(chain.from_iterable(members))
        # On the device and, for updates there, on the host: each has rows of all groups, so that indices are the same.
        self._tables = [HyperparameterTable(self.param_groups, groups, device)]
        if offloaded:
            largest = max(group.weights.main.local.numel() for group in offloaded)
            self._host = HostUpdates(device, pin_memory=pins_gradients, largest_numel=largest)
            offloaded[0].note_state(on_host=offloaded[0].state_nbytes.on_host + self._host.nbytes)
            self._tables.append(HyperparameterTable(self.param_groups, groups, torch.device("cpu")))
        self._grad_norm = FlatGradNorm(groups)
        self._no_factor = torch.ones(1, dtype=torch.float32, device=device)
        self._lay_out()
        self.refresh_hyperparameters()
        self._is_built = True

    def _refuse_unfrozen(self) -> None:
        """Raise if a unit that was frozen when the optimizer was built is trained now: there is no optimizer state for it."""
        for ref in self._frozen:
            group = ref()
            if group is not None and group.trains:
                raise RuntimeError(
                    f"{type(self).__name__} must be built when its parameters require gradients, got {group}, which was frozen then and "
                    "is trained now; build the optimizer again, or use torch.optim.AdamW"
                )

    def _make_state(self, group: FsdpParameterGroup, *, keeps_remainder: bool) -> FlatState:
        return FlatState(group, keeps_remainder=keeps_remainder, dtypes=self._moment_dtypes)

    @staticmethod
    def serves(parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether ``FlatAdamW`` can train these parameters: all are sharded, in dtypes that fp32 can hold."""
        return all(group_of(parameter) is not None and parameter.dtype in _MAIN_DTYPES for parameter in parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_built", False):
            raise NotImplementedError(
                "FlatAdamW must be built over all parameters, got another param group later; pass it to the constructor"
            )
        super().add_param_group(param_group)

    # ---- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_factor: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Any:
        """Update main and model weights; with ``overlaps_forward``, updates may still run when this returns.

        Args:
            closure: runs forward and backward; its result is returned.
            grad_factor: [] or [1] fp32 on the device, by which the update multiplies gradients. ``param.grad`` is not
                changed.
            found_inf: [1] fp32 on the device; where it is not 0, nothing is updated and no step is counted. None: all is.

        Raises:
            RuntimeError: a forward or backward is running, or has failed, or was not that of the step's last
                microbatch.

        Ranks: all that hold the parameters; does not block the host.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.groups
        self._refuse_unfrozen()
        check_step(groups)
        self.synchronize()  # updates of the last step read the tables that are written now
        self.refresh_hyperparameters()
        active = [has_gradient(group) for group in groups]
        self._find_idle(groups, active)
        stepping = [group for group, is_active in zip(groups, active, strict=True) if is_active]
        for table in self._tables:
            table.set_active({index for index, is_active in enumerate(active) if is_active})
        factor = self._no_factor if grad_factor is None else grad_factor
        self._update.write_coefficients(self._tables[0], factor, found_inf)
        self._tables[0].show_steps()
        if self._host is not None:
            self._host.begin_step(self._tables[-1], factor, found_inf)
        self.shrink_state()
        for group in stepping:
            self._state_of[id(group)].drop_stale_remainder(group)
        self._begin_updates(stepping, factor)
        contexts = contexts_of_groups(groups)
        overlaps = self._overlaps(contexts)
        for context in contexts:
            mine = [group for group in stepping if group.context is not None and group.context() is context]
            context.update_weights(mine, self._update_group, overlaps=overlaps)
        if self._host is not None:
            self._host.start()
            if not self._overlaps_host:
                self._host.drain()
        return loss

    def _overlaps(self, contexts: Sequence[FsdpContext]) -> bool:
        """Return whether updates of these contexts' groups may overlap the next forward."""
        return self.overlaps_forward

    def _begin_updates(self, groups: Sequence[FsdpParameterGroup], factor: torch.Tensor) -> None:
        """Prepare the updates of these groups, before the first of them."""

    def _find_idle(self, groups: Sequence[FsdpParameterGroup], active: Sequence[bool]) -> None:
        """Leave parameters out of the update that have no gradient where others of their group have one."""
        if not self._idle and all(map(operator.is_not, map(_GRAD, self._parameters), repeat(None))):
            return
        with_some = [group for group, is_active in zip(groups, active, strict=True) if is_active]
        idle: set[torch.Tensor] = {
            parameter for group in with_some for parameter in group.sharded if parameter.grad is None
        }
        if idle != self._idle:
            self._idle = idle
            for table in self._tables:
                table.set_idle(idle)
            self._lay_out()

    def _update_group(self, group: FsdpParameterGroup) -> HostWork | None:
        state, weights = self._state_of[id(group)], group.weights
        if isinstance(state, HostState):
            assert self._host is not None
            return self._host.add(group, state)
        shard = state.shard(group)
        leaves_some = bool(self._idle) and not self._idle.isdisjoint(group.sharded)
        encoding = weights.begin_update(is_whole=not leaves_some)
        self._update.update(shard, group.grads.main.storage.flat, self._tables[0].coefficients, encoding)
        if leaves_some:
            weights.end_partial_update()  # the update says that the model weight is up to date
        return None

    def _table_of(self, state: FlatState) -> HyperparameterTable:
        return self._tables[-1] if isinstance(state, HostState) else self._tables[0]

    def refresh_hyperparameters(self) -> None:
        """Take over changed hyperparameters and state: ``step`` does; before a replay of a captured ``step``, the caller.

        Raises:
            NotImplementedError: a param group asks for a variant of AdamW that is not served, or has other parameters.
            RuntimeError: a hyperparameter or state changed while a graph is captured.
            ValueError: what was put into ``state`` is of another optimizer, or of another shape than its parameter.

        Ranks: all that hold the parameters.
        """
        self._check_param_groups()
        self._follow_state()
        for table in self._tables:
            table.refresh(self.param_groups)

    def grad_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients, [] fp32 on the device.

        Ranks: all that hold the parameters, and all of the model where it is split; does not block the host.
        """
        return self._grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero with ``set_to_none=False``."""
        if not set_to_none:
            self.synchronize()
            super().zero_grad(set_to_none=False)
            return
        set_grads(self._parameters, repeat(None))
        for group in self.groups:
            group.grads.free_main_if_cleared()

    def synchronize(self) -> None:
        """Make the current stream wait for updates that still run. Does not block the host."""
        if self._host is not None:
            self._host.drain()
        for context in contexts_of_groups(self.groups):
            context.finish_updates()

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The parameter groups that still exist."""
        return [group for group, _ in self._living()]

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def state_buffers(self) -> list[torch.Tensor]:
        """The flat buffers of the state, with the scales of moments."""
        return [buffer for _, state in self._living() for buffer in state.buffers]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "FlatAdamW must not be copied or pickled: its state lies in buffers next to the model's; build another one over the "
            "copy's parameters and give it this one's state_dict(), or save both with save_checkpoint"
        )

    def main_weights(self, parameter: torch.Tensor) -> DTensor:
        """Return the parameter's main weights in fp32, as a DTensor placed like it; a copy if they are not fp32."""
        self.synchronize()
        group: Any = group_of(parameter)  # the constructor has checked it
        index = next(at for at, own in enumerate(group.sharded) if own is parameter)
        return self._state_of[id(group)].main_weights(group, index)

    def complete_state(self) -> None:
        """Make ``state`` hold all that a checkpoint needs, until ``shrink_state`` or the next step.

        Blocks the host where state is offloaded.
        """
        self.synchronize()
        self._follow_state()
        self._complete()

    def shrink_state(self) -> None:
        """Give back the memory of what ``complete_state`` has made."""
        if self._is_complete:
            for _, state in self._living():
                state.shrink()
            self._show_state()
            self._is_complete = False

    def _complete(self) -> None:
        for group, state in self._living():
            if state.completed_keys:
                state.complete(group)
                self._is_complete = True
        if self._is_complete:
            self._show_state()

    def state_dict(self) -> dict[str, Any]:
        self.complete_state()
        found = super().state_dict()
        found["state"] = {number: dict(own) for number, own in found["state"].items()}
        self.shrink_state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a ``FlatAdamW`` or a ``torch.optim.AdamW``.

        Raises:
            ValueError: it is of other parameters, or of another optimizer.
        """
        # torch would cast the state to the parameter's dtype, so it loads the param groups only.
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameter_of = dict(zip(numbers, self._members, strict=True))
        self.state.update({parameter_of[number]: dict(own) for number, own in state_dict["state"].items()})
        self.adopt_state()

    @torch.no_grad()
    def adopt_state(self, *, keeps_remainders: bool = False) -> None:
        """Copy what was put into ``state`` to the flat buffers, zeros where it has nothing, and show those there.

        Args:
            keeps_remainders: where ``state`` has no remainders, those of the flat buffers are kept. So are other values that
                ``state`` does not show, where it has a step count.

        Raises:
            ValueError: state of another optimizer, or of another shape than its parameter.
        """
        given_state = {parameter: dict(state) for parameter, state in self.state.items()}
        self.synchronize()
        self._complete()
        living = self._living()
        own = {id(view) for _, state in living for views in state.views for view in views.values()}
        steps: dict[torch.Tensor, float] = {}
        for group, state in living:
            for parameter, views in zip(group.sharded, state.views, strict=True):
                given = given_state.setdefault(parameter, {})
                _check_state(given, views, parameter)
                steps[parameter] = float(given.get(STEP, 0.0))
                if keeps_remainders:
                    kept = {REMAINDER, *(state.completed_keys if STEP in given else ())}
                    given.update({key: views[key] for key in kept if key in views and key not in given})
                for key, value in given.items():
                    if id(value) in own and value is not views.get(key):
                        given[key] = value.clone()  # of another place, which is filled too
        for group, state in living:
            for parameter, views in zip(group.sharded, state.views, strict=True):
                for key, view in views.items():
                    _fill(view, given_state[parameter].get(key), parameter)
            state.adopt(group)
        self._is_complete = False
        if any([table.set_steps(steps) for table in self._tables]):
            self._lay_out()
        self._show_state()

    def _living(self) -> list[tuple[FsdpParameterGroup, FlatState]]:
        return [(group, state) for state in self._states if (group := state.group()) is not None]

    def _lay_out(self) -> None:
        """Prepare the updates of all groups after parameters have got other rows in the table."""
        for group, state in self._living():
            table = self._table_of(state)
            rows, only = [table.row_of[p] for p in group.sharded], [p not in self._idle for p in group.sharded]
            state.lay_out(group, rows, only, self._update)
        self._show_state()

    def _show_state(self) -> None:
        used: set[int] = set()
        for group, state in self._living():
            for parameter, views in zip(group.sharded, state.views, strict=True):
                table = self._table_of(state)
                shown = self.state.get(parameter)  # whoever has it finds there what is put there
                if type(shown) is not dict or id(shown) in used:
                    shown = self.state[parameter] = {}
                used.add(id(shown))
                shown.clear()
                shown.update(self._shown_state(parameter, views, table))
        self._shown = _flattened(self.state)

    def _shown_state(
        self, parameter: torch.Tensor, views: Mapping[str, DTensor], table: HyperparameterTable
    ) -> dict[str, torch.Tensor]:
        return {STEP: table.step_of(parameter), **views}

    def _follow_state(self) -> None:
        """Take over what was put into ``state``, or written to a step count, since it was shown."""
        now = _flattened(self.state)
        is_shown = len(now) == len(self._shown) and all(map(operator.is_, now, self._shown))
        if is_shown and all(table.steps_are_shown for table in self._tables):
            return
        if self._tables[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "state must not change within a graph capture, got a change; call refresh_hyperparameters() before the capture "
                "and before each replay"
            )
        for group, state in self._living():
            state.drop_stale_remainder(group)
        self.adopt_state(keeps_remainders=True)

    def _check_param_groups(self) -> None:
        """Refuse param groups that hold other parameters than those of the constructor, which the flat buffers are laid out for."""
        members = [group["params"] for group in self.param_groups]
        if list(map(len, members)) == self._num_members and all(
            map(operator.is_, chain.from_iterable(members), self._members)
        ):
            return
        raise NotImplementedError(
            f"{type(self).__name__} needs the parameters that its param groups had when it was built, got others in "
            "param_groups; build another one over these groups and give it this one's state, or use torch.optim.AdamW"
        )


def _flattened(state: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Any]:
    """Return what a change of the state would change, without a line of Python for each parameter."""
    entries = state.values()
    return [*state, *chain.from_iterable(entries), *chain.from_iterable(map(_VALUES, entries))]


def _check_rates(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not isinstance(value, torch.Tensor) and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")


def _check_moment_dtypes(dtypes: tuple[torch.dtype, torch.dtype], offload_fraction: float) -> None:
    for name, dtype in zip(("exp_avg_dtype", "exp_avg_sq_dtype"), dtypes, strict=True):
        if dtype not in MOMENT_DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(map(str, MOMENT_DTYPES))}, got {dtype}")
        if offload_fraction and dtype != torch.float32:
            raise ValueError(
                f"{name} must be torch.float32 with offload_fraction, got {dtype}: the update in the host's memory is torch's, in fp32"
            )


def _check_parameters(param_groups: Sequence[dict[str, Any]], groups: Sequence[FsdpParameterGroup]) -> None:
    given = {parameter for group in param_groups for parameter in group["params"]}
    foreign = [list(parameter.shape) for parameter in given if group_of(parameter) is None]
    if foreign or not groups:
        raise ValueError(
            f"FlatAdamW must be given trainable parameters of sharded modules, got {len(foreign)} others of shapes "
            f"{foreign[:4]}; call fully_shard first, or use torch.optim.AdamW"
        )
    for group in groups:
        left_out = [group.name_of(i) for i, parameter in enumerate(group.sharded) if parameter not in given]
        if left_out:
            raise ValueError(
                f"FlatAdamW must be given all trainable parameters of a unit, got {group} without {', '.join(left_out[:4])}; "
                "freeze them before fully_shard, or use torch.optim.AdamW"
            )
        if group.dtypes.main_params not in _MAIN_DTYPES:
            raise ValueError(
                f"FlatAdamW computes in fp32, got main weights of {group} in {group.dtypes.main_params}; use torch.optim.AdamW"
            )


def _keeps_remainder(group: FsdpParameterGroup, asked: bool) -> bool:
    if not asked or group.dtypes.main_params == group.dtypes.compute == torch.float32:
        return False
    if group.dtypes.main_params != torch.bfloat16 or group.dtypes.compute != torch.bfloat16:
        raise ValueError(
            f"store_param_remainders needs bf16 main weights of a bf16 model, got {group.dtypes.main_params} of "
            f"{group.dtypes.compute} for {group}; use MixedPrecisionPolicy(main_params_dtype=None)"
        )
    return True


def _offloaded(groups: Sequence[FsdpParameterGroup], fraction: float) -> list[FsdpParameterGroup]:
    """Choose the groups whose state is in the host's memory: the last ones, which are updated last and needed last."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"offload_fraction must be from 0 to 1, got {fraction}")
    wanted = fraction * sum(group.layout.used_numel for group in groups)
    chosen: list[FsdpParameterGroup] = []
    for group in reversed(groups):
        if sum(one.layout.used_numel for one in chosen) >= wanted:
            break
        chosen.append(group)
    for group in chosen:
        if group.weights.codec is not CAST:
            raise NotImplementedError(
                f"offload_fraction needs weights that are cast from the main weights, got others for {group}; leave it at 0"
            )
    return chosen


def _check_state(given: dict[str, Any], views: dict[str, DTensor], parameter: torch.Tensor) -> None:
    unknown = [key for key in given if key not in views and key != STEP]
    if REMAINDER in unknown:
        raise ValueError(
            f"state of a parameter of shape {list(parameter.shape)} must not hold {REMAINDER}, the lower halves of main "
            "weights that this optimizer keeps whole; build it with store_param_remainders=True, or load a checkpoint of "
            "the model and the optimizer with load_checkpoint, which joins the halves"
        )
    if unknown:
        raise ValueError(f"the state of AdamW must be {[STEP, *views]}, got also {unknown}; use torch.optim.AdamW")


def _fill(view: DTensor, value: Any, parameter: torch.Tensor) -> None:
    """Copy ``value``, a DTensor of any placement, a whole tensor, or None for zeros, into ``view``."""
    if value is None:
        view._local_tensor.zero_()
    elif value is not view:
        if value.shape != parameter.shape:
            raise ValueError(f"state must have the parameter's shape {list(parameter.shape)}, got {list(value.shape)}")
        copy_into(view, value)
