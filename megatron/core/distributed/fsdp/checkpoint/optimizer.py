"""The optimizer's part of a checkpoint: state and hyperparameters under the names of their parameters.

Nothing is stored by position, so param groups may have another order when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.checkpoint.description import Entries, StoredTensor, StoredValue
from megatron.core.distributed.fsdp.checkpoint.state import OPTIMIZER, NamedTensor, Problems, plain_copy
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import split
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import REMAINDER
from megatron.core.distributed.fsdp.foreign_optimizers import state_decoder_of

STATE = f"{OPTIMIZER}state."
PARAM_GROUPS = f"{OPTIMIZER}param_groups"
KIND = f"{OPTIMIZER}kind"
EXECUTION = ("capturable", "differentiable", "foreach", "fused")
"""Hyperparameters that are not saved: they say how a process computes an update, and a checkpoint of a GPU run must load on a CPU."""


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer`` if it is a ``torch.optim`` optimizer, else the one that it holds as ``.optimizer``.

    Raises:
        TypeError: it neither is nor holds one.
    """
    found = optimizer
    while not isinstance(found, torch.optim.Optimizer):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise TypeError(
                f"optimizer must be a torch.optim optimizer or hold one as .optimizer, got {type(optimizer).__name__}"
            )
    return found


def optimizer_entries(
    optimizer: torch.optim.Optimizer, model: Sequence[NamedTensor]
) -> tuple[list[NamedTensor], dict[str, Any]]:
    """Return the optimizer's state and hyperparameters as entries of a checkpoint: tensors, and plain values by name.

    Args:
        model: the model's tensors.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
        TypeError: state is neither a tensor nor plain.
    """
    if isinstance(optimizer, FlatAdamW):
        optimizer.complete_state()
    names = _names_of_parameters(optimizer, model)
    copies = {id(entry.tensor) for entry in model if entry.is_copy}
    tensors: list[NamedTensor] = []
    values: dict[str, Any] = {}
    scalars: dict[str, None] = {}
    decoder = state_decoder_of(optimizer)
    for parameter, (name, *_) in names.items():
        state = optimizer.state.get(parameter, {}) if decoder is None else decoder.decoded_state(parameter)
        for key, value in state.items():
            if not isinstance(key, str) or "." in key:
                raise TypeError(f"the optimizer's state of {name} must have keys without a dot, got {key!r}")
            full = f"{STATE}{name}.{key}"
            if not isinstance(value, torch.Tensor):
                if id(parameter) not in copies:
                    values[full] = plain_copy(value, full)
                continue
            tensors.append(NamedTensor((full,), value, is_copy=id(parameter) in copies))
            if _is_scalar(parameter, key, value):
                scalars[key] = None
    values[PARAM_GROUPS] = [
        {"params": [names[p][0] for p in group["params"] if id(p) not in copies], **_hyperparameters(group)}
        for group in optimizer.param_groups
    ]
    values[KIND] = {
        "class": type(optimizer).__name__,
        "hyperparameters": hyperparameter_names(optimizer),
        "scalar_state": list(scalars),
    }
    return tensors, values


def with_whole_weights(optimizer: torch.optim.Optimizer, tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return entries in fp32, in new memory, where the optimizer keeps main weights in two halves, or moments in bf16."""
    if not isinstance(optimizer, FlatAdamW):
        return list(tensors)
    halved = {id(p): p for p, state in optimizer.state.items() if REMAINDER in state}

    def whole(entry: NamedTensor) -> torch.Tensor:
        if entry.name.startswith(STATE):
            return entry.tensor.float()
        return optimizer.main_weights(halved[id(entry.tensor)]) if id(entry.tensor) in halved else entry.tensor

    return [replace(entry, tensor=whole(entry)) for entry in tensors if not entry.name.endswith(f".{REMAINDER}")]


def merged_values(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the values ``param_groups`` and ``kind`` of ranks that hold parts of the model.

    Parameters of other ranks are added to the first param group with equal hyperparameters, or else to a new one.

    Raises:
        ValueError: the optimizers are of different kinds.
    """
    first = ranks[0]
    groups = [{**group, "params": list(group["params"])} for group in first[PARAM_GROUPS]]
    known = {name for group in groups for name in group["params"]}
    scalars = dict.fromkeys(first[KIND]["scalar_state"])
    for other in ranks[1:]:
        for key in ("class", "hyperparameters"):
            if other[KIND][key] != first[KIND][key]:
                raise ValueError(
                    f"all ranks must save one kind of optimizer, got {key} {first[KIND][key]} and {other[KIND][key]}"
                )
        scalars.update(dict.fromkeys(other[KIND]["scalar_state"]))
        for group in other[PARAM_GROUPS]:
            added = [name for name in group["params"] if name not in known]
            known.update(added)
            same = next((own for own in groups if _same_hyperparameters(own, group)), None)
            if same is None:
                groups.append({**group, "params": added})
            else:
                same["params"] += added
    return {PARAM_GROUPS: groups, KIND: {**first[KIND], "scalar_state": list(scalars)}}


def _same_hyperparameters(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    keys = [key for key in left if key != "params"]
    return keys == [key for key in right if key != "params"] and all(_equal(left[key], right[key]) for key in keys)


@dataclass
class OptimizerLoad:
    """A checkpoint's optimizer state, matched with an optimizer that does not have it yet.

    Args:
        optimizer: the optimizer to load.
        groups: [P] hyperparameters of its param groups.
        tensors: tensors to read into, under their names in the checkpoint.
        state: the new state: ``tensors`` and plain values.
        whole: fp32 main weights to read into, by name in the checkpoint, where the parameters are only their upper
            halves.
        conversions: run after reading, where main weights were saved whole and are kept in two halves, or the reverse.

    Attributes:
        param_group_of: the param group that holds a parameter.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[NamedTensor] = field(default_factory=list)
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    conversions: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.param_group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}

    def install(self) -> None:
        """Replace the optimizer's state and hyperparameters."""
        for convert in self.conversions:
            convert()
        decoder = state_decoder_of(self.optimizer)
        for parameter in self.param_group_of:
            if decoder is None or parameter not in self.state:
                self.optimizer.state.pop(parameter, None)
        if decoder is None:
            self.optimizer.state.update(self.state)
        else:
            for parameter, state in self.state.items():
                decoder.set_decoded_state(parameter, state)
        if isinstance(self.optimizer, FlatAdamW):
            self.optimizer.adopt_state()
        for group, hyperparameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, value in hyperparameters.items():
                own = group.get(key)
                if isinstance(own, torch.Tensor):
                    own.copy_(torch.as_tensor(value))  # in place: a captured graph reads this address
                else:
                    group[key] = value


def prepare_load(
    optimizer: torch.optim.Optimizer,
    model: Sequence[NamedTensor],
    saved: Entries,
    values: Mapping[str, Any],
    problems: Problems,
) -> OptimizerLoad:
    """Match a checkpoint's optimizer with this one by name, and add what does not match to ``problems``.

    The optimizer does not change. State that it does not have yet is allocated, as zeros.

    Args:
        model: the model's tensors.
        saved: all entries of the checkpoint.
        values: the optimizer's plain values in the checkpoint.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
    """
    if isinstance(optimizer, FlatAdamW):
        optimizer.complete_state()
    load = OptimizerLoad(optimizer)
    parameters = _match_parameters(optimizer, model, values, problems)
    if problems:
        return load
    of_name = {name: group for group in values[PARAM_GROUPS] for name in group["params"]}
    saved_name = {parameter: name for name, parameter in parameters.items()}
    for index, group in enumerate(optimizer.param_groups):
        members = [of_name[saved_name[parameter]] for parameter in group["params"]]
        load.groups.append(_shared_hyperparameters(index, members, problems))
    for full, stored in saved.items():
        if full.startswith(STATE):
            _match_state(load, full, stored, parameters, values, problems)
    problems.missing += [
        f"{STATE}{saved_name[parameter]}.{key}"
        for parameter, state in load.state.items()
        for key in _keys_of_state(optimizer, parameter)
        if key not in state
    ]
    for name, parameter in parameters.items():
        _match_main_weight(load, name, parameter, saved)
    return load


def _match_parameters(
    optimizer: torch.optim.Optimizer, model: Sequence[NamedTensor], values: Mapping[str, Any], problems: Problems
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters under their names in the checkpoint."""
    in_checkpoint = {name: None for group in values[PARAM_GROUPS] for name in group["params"]}
    parameters: dict[str, torch.Tensor] = {}
    for parameter, names in _names_of_parameters(optimizer, model).items():
        found = next((name for name in names if name in in_checkpoint), None)
        if found is None:
            problems.missing.append(names[0])
        else:
            parameters[found] = parameter
    problems.extra += [name for name in in_checkpoint if name not in parameters]
    own, saved = hyperparameter_names(optimizer), values[KIND]["hyperparameters"]
    problems.missing += [f"hyperparameter {key}" for key in own if key not in saved]
    if values[KIND]["class"]:  # else nothing says which keys of its groups are hyperparameters of its class
        problems.extra += [f"hyperparameter {key}" for key in saved if key not in own]
    return parameters


def _match_state(
    load: OptimizerLoad,
    full: str,
    stored: StoredTensor | StoredValue,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    problems: Problems,
) -> None:
    """Add the checkpoint's state ``full`` (its whole name) to ``load``, or to ``problems``."""
    name, _, key = full.removeprefix(STATE).rpartition(".")
    parameter = parameters.get(name)
    if parameter is None:
        problems.extra.append(full)
        return
    state = load.state.setdefault(parameter, {})
    if not isinstance(stored, StoredTensor):
        state[key] = values[full]
        return
    is_scalar = key in values[KIND]["scalar_state"]
    if not is_scalar and stored.size != parameter.shape:
        problems.misshaped.append(f"{full} (saved {list(stored.size)}, parameter {list(parameter.shape)})")
        return
    decoder = state_decoder_of(load.optimizer)
    own = load.optimizer.state.get(parameter, {}).get(key)
    # FlatAdamW's parameters share step counts, which may differ in the checkpoint.
    is_shared = is_scalar and isinstance(load.optimizer, FlatAdamW)
    is_floating = stored.dtype.is_floating_point and parameter.dtype.is_floating_point
    dtype: torch.dtype | None = parameter.dtype if is_floating else stored.dtype
    if decoder is not None:
        dtype = decoder.decoded_dtypes(parameter).get(key)
        if dtype is None:
            problems.mistyped.append(f"{full} (saved {stored.dtype}, none here)")
            return
    elif isinstance(own, torch.Tensor) and own.shape == stored.size and not is_shared:
        state[key] = own
    elif is_scalar:
        state[key] = _new_scalar(parameter, stored.size, stored.dtype, load.param_group_of[parameter])
    if key not in state:
        with torch.no_grad():
            state[key] = torch.zeros_like(parameter, dtype=dtype)
    load.tensors.append(NamedTensor((full,), state[key]))


def _keys_of_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[str]:
    """Return the keys that a parameter's state must have if it is not empty; none for optimizers whose keys are unknown."""
    if (decoder := state_decoder_of(optimizer)) is not None:
        return list(decoder.decoded_dtypes(parameter))
    if isinstance(optimizer, FlatAdamW):
        return [key for key in optimizer.state.get(parameter, {}) if key != REMAINDER]  # a load computes the remainder
    return ["step", "exp_avg", "exp_avg_sq"] if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else []


def _match_main_weight(load: OptimizerLoad, name: str, parameter: torch.Tensor, saved: Entries) -> None:
    """Plan a conversion if main weights were saved whole and this optimizer keeps two halves, or the reverse."""
    is_split_here = REMAINDER in load.optimizer.state.get(parameter, {})
    remainder = load.state.get(parameter, {}).get(REMAINDER)
    if remainder is not None and not is_split_here:
        del load.state[parameter][REMAINDER]
        if parameter.dtype == torch.float32:
            load.conversions.append(partial(_add_lower_half, parameter, remainder))
        return
    stored = saved.get(name)
    is_whole = isinstance(stored, StoredTensor) and stored.dtype == torch.float32
    if is_whole and is_split_here and remainder is None:
        load.whole[name] = whole = torch.zeros_like(parameter, dtype=torch.float32)
        own = load.state.setdefault(parameter, {})[REMAINDER] = load.optimizer.state[parameter][REMAINDER]
        load.conversions.append(partial(_split_main_weight, parameter, whole, own))


def _add_lower_half(parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Add the lower halves to fp32 main weights that were read from their upper halves."""
    local = _local_of(parameter)
    local.view(torch.int32).add_(_local_of(remainder))


def _split_main_weight(parameter: torch.Tensor, whole: torch.Tensor, remainder: torch.Tensor) -> None:
    split(_local_of(whole), _local_of(parameter), _local_of(remainder))


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, to read and write."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def _names_of_parameters(
    optimizer: torch.optim.Optimizer, model: Sequence[NamedTensor]
) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return the names of each of the optimizer's parameters, in the order of its param groups."""
    names = {id(entry.tensor): entry.names for entry in model}
    found: dict[torch.Tensor, tuple[str, ...]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"each parameter of the optimizer must be one of the model's, got one of shape "
                    f"{list(parameter.shape)} (group {index}, position {position}) that is not; build the optimizer over "
                    "model.parameters() after fully_shard, and pass that model"
                )
            found[parameter] = names[id(parameter)]
    return found


def _is_scalar(parameter: torch.Tensor, key: str, value: torch.Tensor) -> bool:
    """Return whether the state is one number for the whole parameter, such as ``step``."""
    if value.dim() > 0:
        return False
    return not isinstance(value, DTensor) if isinstance(parameter, DTensor) else parameter.dim() > 0 or key == "step"


def _new_scalar(
    parameter: torch.Tensor, size: torch.Size, dtype: torch.dtype, group: Mapping[str, Any]
) -> torch.Tensor:
    # On the same device as torch.optim: there for kernels that must not synchronise with the host.
    on_device = bool(group.get("capturable") or group.get("fused"))
    return torch.zeros(size, dtype=dtype, device=parameter.device if on_device else "cpu")


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    skipped = ("params", "param_names", *EXECUTION)
    return {key: plain_copy(value, f"{PARAM_GROUPS}.{key}") for key, value in group.items() if key not in skipped}


def hyperparameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names by which a checkpoint distinguishes kinds of optimizers: those of the hyperparameters it saves."""
    return [key for key in optimizer.defaults if key not in EXECUTION]


def _shared_hyperparameters(index: int, members: Sequence[Mapping[str, Any]], problems: Problems) -> dict[str, Any]:
    """Return the hyperparameters with which the parameters of a param group were saved; a problem where they differ."""
    shared: dict[str, Any] = {}
    for member in {id(member): member for member in members}.values():
        for key, value in member.items():
            if key == "params":
                continue
            if key in shared and not _equal(shared[key], value):
                problems.other.append(
                    f"parameters of group {index} must have been saved with one {key}, got {shared[key]} and {value}; "
                    "group them as they were"
                )
            shared.setdefault(key, value)
    return shared


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def make_initial_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give parameters without state the state that they have before the first step: zeros, and no steps.

    ``torch.distributed.checkpoint`` and Megatron-Core's ``dist_checkpointing`` fill the tensors of a state dict, and torch's
    optimizers make theirs in the first step alone.

    Returns:
        Whether the state of such an optimizer is known: of torch's Adam and AdamW, and of SGD without dampening.

    Ranks: local.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    if kind is torch.optim.SGD and any(group["dampening"] for group in optimizer.param_groups):
        return False  # the first step takes the gradient as it is
    for group in optimizer.param_groups:
        if kind is torch.optim.SGD:
            keys = ["momentum_buffer"] if group["momentum"] else []
        else:
            keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for parameter in group["params"] if keys else ():
            if parameter.requires_grad and not optimizer.state.get(parameter):
                with torch.no_grad():
                    steps = (
                        {}
                        if kind is torch.optim.SGD
                        else {"step": _new_scalar(parameter, torch.Size(), torch.float32, group)}
                    )
                    optimizer.state[parameter] = {**steps, **{key: torch.zeros_like(parameter) for key in keys}}
    return True
