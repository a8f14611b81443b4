"""Histories and scales of delayed scaling, as state of transformer-engine's modules in checkpoints.

transformer-engine itself keeps them as a pickle, which it refuses to load again unless it is told that the source can be
trusted. Here they are tensors and plain values. Importing this file needs no transformer-engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SCALES = {"scale_fwd": "scaling_fwd", "scale_bwd": "scaling_bwd"}
_RECIPE = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "fp8_dpa", "fp8_mha")
"""Fields of the recipe that are plain values."""


def histories_of(module: Any) -> dict[str, Any] | None:
    """Return a module's histories and scales by name, or None where it has none."""
    meta: dict[str, Any] = getattr(module, "fp8_meta", {})
    found = {name: meta[key] for name, key in _SCALES.items() if hasattr(meta.get(key), "amax_history")}
    if not found:
        return None
    state: dict[str, Any] = {"num_gemms": meta["num_gemms"]}
    for name, scaling in found.items():
        state[name] = scaling.scale
        state[name.replace("scale", "amax_history")] = scaling.amax_history
    return state


def restore_histories(module: Any, state: Mapping[str, Any], recipe: Any) -> None:
    """Write what ``histories_of`` returned into a module that scales by ``recipe``; of a longer history the latest steps."""
    meta: dict[str, Any] = module.fp8_meta
    meta["recipe"], meta["num_gemms"] = recipe, state["num_gemms"]
    module.init_fp8_meta_tensors(recipe)
    for name, key in _SCALES.items():
        if name not in state:
            continue
        saved, own = state[name.replace("scale", "amax_history")], meta[key].amax_history
        kept = min(len(saved), len(own))
        meta[key].scale.copy_(state[name])
        own.zero_()
        own[:kept].copy_(saved[:kept])


@dataclass(frozen=True)
class Histories:
    """A module's histories as optional state of checkpoints: with the recipe, since the module learns it in its first forward."""

    module: Any

    def get_optional_state(self) -> dict[str, Any] | None:
        """Return histories, scales and recipe, or None where the module has none.

        Raises:
            NotImplementedError: the recipe computes scales by a function of the user's.
        """
        state = histories_of(self.module)
        if state is None:
            return None
        recipe = self.module.fp8_meta["recipe"]
        if callable(recipe.amax_compute_algo) or getattr(recipe, "scaling_factor_compute_algo", None) is not None:
            raise NotImplementedError(
                "a checkpoint of delayed scaling must have a recipe of plain values, got functions for amax_compute_algo or"
                " scaling_factor_compute_algo; use 'max' or 'most_recent'"
            )
        fields = {name: getattr(recipe, name) for name in _RECIPE}
        return {**state, "recipe": {**fields, "fp8_format": recipe.fp8_format.name}}

    def set_optional_state(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``get_optional_state`` returned; a module that trains in another recipe afterwards drops it."""
        if state is None:
            return
        from megatron.core.extensions.transformer_engine_layers import recipes

        fields = dict(state["recipe"])
        fields["fp8_format"] = recipes.Format[fields["fp8_format"]]
        restore_histories(self.module, state, recipes.DelayedScaling(**fields))
