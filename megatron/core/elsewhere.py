"""Names of Megatron-Core that have no counterpart here. Importing one works; using it raises an error that names the replacement."""

from __future__ import annotations

from typing import Any


class _Elsewhere(type):
    """Metaclass of placeholder classes for missing names: they can be subclassed and compared with, but not built."""

    _instead: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise cls._refusal()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    def _refusal(cls) -> Exception:
        return NotImplementedError(f"{cls.__module__}.{cls.__name__} has no counterpart here: {cls._instead}")


def elsewhere(module: str, name: str, instead: str) -> Any:
    """Return a placeholder for ``name`` in a module: a class that raises on any use.

    Args:
        instead: the replacement, for the error message.
    """
    return _Elsewhere(name, (), {"__module__": module, "_instead": instead})


class _NeedsPackage(_Elsewhere):
    """Metaclass of placeholder classes for layers of a package that is not installed."""

    def _refusal(cls) -> Exception:
        return ImportError(f"{cls.__module__}.{cls.__name__} needs an optional package: {cls._instead}")


def needs_package(module: str, name: str, reason: str) -> Any:
    """Return a placeholder for ``name`` in a module, as ``elsewhere`` does; what it raises is an ImportError.

    Args:
        reason: why the package cannot be imported, for the error message.
    """
    return _NeedsPackage(
        name,
        (),
        {"__module__": module, "_instead": f"{reason}; install it (docs/transformer_engine.md), or use local layers"},
    )
