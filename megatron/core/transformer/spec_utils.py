"""Layer specs: the module to build, its arguments and the specs of its submodules."""

from __future__ import annotations

import functools
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
    return import_module(module) if isinstance(module, tuple) else module


def import_module(module_path: tuple[str, str]) -> Any:
    """Return what (import path, name) names.

    Raises:
        ImportError: it does not exist.
    """
    path, name = module_path
    module = importlib.import_module(path)
    if not hasattr(module, name):
        raise ImportError(f"a spec names {name!r} of {path!r}, which has no such name")
    return getattr(module, name)


def get_submodules(spec: Any) -> Any:
    """Return the specs of the submodules of a spec, or of a ``functools.partial`` that has them as an argument.

    Raises:
        ValueError: it has none.
    """
    if isinstance(spec, functools.partial) and "submodules" in spec.keywords:
        return spec.keywords["submodules"]
    if not hasattr(spec, "submodules"):
        raise ValueError(f"a spec with submodules is needed, got {spec!r}")
    return spec.submodules


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
