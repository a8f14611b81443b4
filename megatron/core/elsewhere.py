"""Names of Megatron-Core that have no counterpart here. They can be imported; who uses them is told what to use instead."""

from __future__ import annotations

from typing import Any


class _Elsewhere(type):
    """The class of classes that stand for what is not here."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise cls._refusal()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    def _refusal(cls) -> NotImplementedError:
        return NotImplementedError(f"{cls.__module__}.{cls.__name__} has no counterpart here: {cls.__doc__}")


def elsewhere(module: str, name: str, instead: str) -> Any:
    """Return what stands for ``name`` in a module: a class of which nothing can be used.

    Args:
        instead: what to use in its place.
    """
    return _Elsewhere(name, (), {"__module__": module, "__doc__": instead})
