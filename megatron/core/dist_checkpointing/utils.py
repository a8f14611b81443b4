"""Functions of sharded state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)

Split = tuple[Any, Any]


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> Split:
    """Split into sharded tensors and the rest."""
    return extract_matching_values(sharded_state_dict, lambda x: isinstance(x, ShardedTensor))


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> Split:
    """Split into sharded tensors and factories, and the rest."""
    return extract_matching_values(sharded_state_dict, lambda x: isinstance(x, ShardedTensor | ShardedTensorFactory))


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> Split:
    """Split into what is sharded and the rest."""
    return extract_matching_values(sharded_state_dict, lambda x: isinstance(x, ShardedBase))


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """Split into what is not saved and the rest."""
    return extract_matching_values(sharded_state_dict, lambda x: isinstance(x, LocalNonpersistentObject))


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put ``prefix`` before the keys of all that is sharded, in place; names in the dict stay."""
    apply_prefix_mapping(sharded_state_dict, {"": prefix})


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the start of the keys of all that is sharded, in place; names in the dict stay.

    Raises:
        ValueError: a key begins otherwise.
    """

    def replaced(x: Any) -> Any:
        if isinstance(x, ShardedBase):
            if not x.key.startswith(old_prefix):
                raise ValueError(f"a key must begin with {old_prefix!r} to get another prefix, got {x.key!r}")
            x.key = new_prefix + x.key[len(old_prefix) :]
        return x

    dict_list_map_inplace(replaced, sharded_state_dict)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace the starts of keys by the first pair (old, new) that fits, in place; names in the dict stay."""

    def replaced(x: Any) -> Any:
        if isinstance(x, ShardedBase):
            for old, new in prefix_map.items():
                if x.key.startswith(old):
                    x.key = new + x.key[len(old) :]
                    break
        return x

    dict_list_map_inplace(replaced, sharded_state_dict)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of a caller's metadata without process groups, which cannot be saved."""
    return None if metadata is None else {key: value for key, value in metadata.items() if key != "dp_cp_group"}
