"""Decorators under Megatron-Core's names that say how stable a function or class of a caller is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core import config

_T = TypeVar("_T", bound=Callable[..., Any])


class ExperimentalNotEnabledError(Exception):
    """Something experimental was used without ``config.set_experimental_flag(True)``."""


def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Return what is decorated, with or without arguments of the decorator."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return lambda decorated: decorated


def _require_experimental(name: str) -> None:
    if not config.is_experimental_enabled():
        raise ExperimentalNotEnabledError(
            f"{name} is experimental and must be enabled first; call megatron.core.config.set_experimental_flag(True)"
        )


def experimental_fn(introduced_with_version: str) -> Callable[[_T], _T]:
    """Return a decorator of functions that raise ExperimentalNotEnabledError until ``config.set_experimental_flag(True)``."""

    def decorate(function: _T) -> _T:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            _require_experimental(function.__qualname__)
            return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[type], type]:
    """Return a decorator of classes whose attributes raise as functions of ``experimental_fn`` do; ``is_experimental`` tells."""

    def decorate(cls: type) -> type:
        def look_up(found: Any, name: str) -> Any:
            if name == "is_experimental":
                return config.is_experimental_enabled()
            if not (name.startswith("__") and name.endswith("__")):
                _require_experimental(cls.__qualname__)
            return found.__getattribute__(name)

        class Meta(type(cls)):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                return look_up(super(), name)

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                _require_experimental(cls.__qualname__)
                return super().__call__(*args, **kwargs)

        def look_up_of_instance(self: Any, name: str) -> Any:
            return look_up(super(guarded, self), name)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        Meta.__qualname__ = cls.__qualname__
        guarded: type = Meta(cls.__name__, (cls,), {**names, "__getattribute__": look_up_of_instance})
        return guarded

    return decorate


def deprecated(
    version: str, removal_version: str | None = None, alternative: str | None = None, reason: str | None = None
) -> Callable[[_T], _T]:
    """Return a decorator of functions that warn with a DeprecationWarning of what to do instead, and then run."""
    parts = [
        f" Use {alternative} instead." if alternative else "",
        f" Will be removed in version {removal_version}." if removal_version else "",
        f" Reason: {reason}" if reason else "",
    ]

    def decorate(function: Any) -> Any:
        function._deprecated, function._deprecated_version = True, version
        function._removal_version, function._alternative = removal_version, alternative
        function._deprecation_reason = reason
        message = f"{function.__name__} is deprecated since version {version}.{''.join(parts)}"

        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warning

    return decorate


def deprecate_args(
    *deprecated_keys: str, message: str = "{name} must be left out: the argument is deprecated"
) -> Callable[[_T], _T]:
    """Return a decorator of functions that raise TypeError where a keyword argument of these names is given."""

    def decorate(function: _T) -> _T:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in deprecated_keys:
                if name in kwargs:
                    raise TypeError(message.format(name=name))
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def internal_api(marked: _T) -> _T:
    """Mark a function or class as one that other projects should not use."""
    marked._internal_api = True  # type: ignore[attr-defined]
    return marked


def experimental_api(marked: _T) -> _T:
    """Mark a function or class as one that may change."""
    marked._experimental_api = True  # type: ignore[attr-defined]
    return marked
