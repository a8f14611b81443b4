"""Names of Megatron-Core that have no counterpart here. Importing one works; using it raises an error that names the replacement."""

from __future__ import annotations

from typing import Any


class _Elsewhere(type):
    """Metaclass of placeholder classes for missing names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise cls._refusal()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    def _refusal(cls) -> NotImplementedError:
        return NotImplementedError(f"{cls.__module__}.{cls.__name__} has no counterpart here: {cls.__doc__}")


def elsewhere(module: str, name: str, instead: str) -> Any:
    """Return a placeholder for ``name`` in a module: a class that raises on any use.

    Args:
        instead: the replacement, for the error message.
    """
    return _Elsewhere(name, (), {"__module__": module, "__doc__": instead})
