"""The optimizer's state in Megatron-LM's archives of ``--ckpt-format torch``, without ``--use-distributed-optimizer``.

[Note: numbered weights] Each rank's optimizer numbers its weights, group by group, and in a group in the order of its modules. No name
says which is which. A group with ``wd_mult`` 0 has the biases and all else of one dim. Weights of 16 bits have main weights, a list for
each group. So names follow from the order of the tensors in the rank's model; shapes are compared, and main weights with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import ArchivedTensor

MAIN = "main"
STEP = "step"
WITHOUT = "load it with --no-load-optim, or --finetune to begin at iteration 0"
_HALVES = (torch.bfloat16, torch.float16)

_Named = tuple[str, ArchivedTensor]


def numbered_state(own: Sequence[_Named], saved: Any, where: Path) -> Iterator[tuple[str, str, ArchivedTensor]]:
    """Yield (key, name of the weight, tensor) of the state of a rank's optimizer; the key of main weights is ``MAIN``.

    Args:
        own: the rank's weights, in the order of its modules.
        saved: what its archive has under ``optimizer``.

    Raises:
        ValueError: it is of another optimizer or of other weights; says what.
    """
    inner = saved.get("optimizer", saved) if isinstance(saved, Mapping) else None
    state, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, Mapping) else (None, None)
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not state:
        raise ValueError(
            f"{where} must hold the state of one optimizer per rank, numbered by weights, got {_got(saved)} (with "
            "--use-distributed-optimizer it is in distrib_optim.pt beside the model's archive, which is not there): restore that file, "
            f"save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable, or {WITHOUT}"
        )
    main = saved.get("fp32_from_fp16_params")
    filled = [(group, list(group["params"])) for group in groups]
    mains = main if isinstance(main, list) and len(main) == len(filled) else [[]] * len(filled)
    kinds = [group.get("wd_mult", 1.0) != 0 for group, numbers in filled if numbers]
    if len(set(kinds)) != len(kinds):
        raise ValueError(
            f"{where} must have two groups of weights, with and without weight decay, got {len(kinds)} that are not told apart by "
            f"wd_mult: {WITHOUT}"
        )
    for (group, numbers), copies in zip(filled, mains, strict=True):
        decays = group.get("wd_mult", 1.0) != 0
        members = [one for one in own if len(kinds) == 1 or _decays(*one) is decays]
        if numbers:
            yield from _of_group(members, [state.get(number) for number in numbers], copies, where)


def _of_group(
    members: Sequence[_Named], states: Sequence[Any], copies: Sequence[Any], where: Path
) -> Iterator[tuple[str, str, ArchivedTensor]]:
    if len(members) != len(states):
        raise of_other_weights(where, f"{len(states)} weights in a group where the model has {len(members)}")
    for (name, weight), values in zip(members, states, strict=True):
        for key, tensor in values.items() if isinstance(values, Mapping) else ():
            if isinstance(tensor, ArchivedTensor):
                yield key, name, _of_size(tensor, torch.Size(()) if key == STEP else weight.size, key, name, where)
    halves = [member for member in members if member[1].dtype in _HALVES] if copies else []
    if copies and len(halves) != len(copies):
        raise of_other_weights(where, f"{len(copies)} main weights in a group where the model has {len(halves)}")
    for (name, weight), tensor in zip(halves, copies, strict=True) if copies else ():
        yield MAIN, name, _of_size(tensor, weight.size, MAIN, name, where)


def _of_size(tensor: Any, size: torch.Size, key: str, name: str, where: Path) -> ArchivedTensor:
    numel_is_one = isinstance(tensor, ArchivedTensor) and key == STEP and tensor.size.numel() == 1
    if not isinstance(tensor, ArchivedTensor) or not (tensor.size == size or numel_is_one):
        got = list(tensor.size) if isinstance(tensor, ArchivedTensor) else type(tensor).__name__
        raise of_other_weights(where, f"{got} as {key} of {name}, which has {list(size)}")
    if not tensor.is_contiguous:
        raise of_other_weights(where, f"a view of other elements as {key} of {name}")
    return tensor


def _decays(name: str, weight: ArchivedTensor) -> bool:
    return not (name.endswith(".bias") or len(weight.size) == 1)


def _got(saved: Any) -> str:
    if isinstance(saved, Mapping):
        return f"a dict of {', '.join(map(str, list(saved)[:6]))}"
    return "nothing" if saved is None else f"a {type(saved).__name__}"


def of_other_weights(where: Path, got: str) -> ValueError:
    """Return the error for state whose weights are not those of the model."""
    return ValueError(
        f"{where} must hold the optimizer's state of this model, in the order of its modules, got {got}: {WITHOUT}"
    )
