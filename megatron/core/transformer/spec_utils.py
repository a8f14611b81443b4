"""Layer specs: the module to build, its arguments and the specs of its submodules."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """A module to build: its class (or (import path, name)), fixed arguments and the specs of its submodules."""

    module: tuple[str, str] | type
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return build_module(self, *args, **kwargs)


def get_module(spec_or_module: ModuleSpec | type, **_: Any) -> Any:
    """Return the class or function that a spec names."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    if isinstance(module, tuple):
        path, name = module
        return getattr(importlib.import_module(path), name)
    return module


def build_module(spec_or_module: ModuleSpec | type, *args: Any, **kwargs: Any) -> Any:
    """Build the module that a spec names; functions (such as ``get_bias_dropout_add``) are returned as they are.

    Args:
        args, kwargs: constructor arguments, beside ``spec.params``.

    Raises:
        TypeError: the constructor refused its arguments; the message names the module.
    """
    module = get_module(spec_or_module)
    if not isinstance(module, type):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error} (while building {module.__name__} from its spec)") from error
