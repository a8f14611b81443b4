"""Helpers of type checkers, without effect on what runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

_T = TypeVar("_T")


def apply_module(m: _T, *, check_subclass: bool = True) -> _T:
    """Return a module as it is.

    Raises:
        TypeError: it is no ``torch.nn.Module``, and ``check_subclass`` asks for one.
    """
    if check_subclass and not isinstance(m, torch.nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, got {type(m).__name__}")
    return m


def not_none(value: _T | None) -> _T:
    """Return a value.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError("a value is needed, got None")
    return value


def copy_signature(
    source: Callable[..., Any],
    /,
    *,
    handle_return_type: Literal["preserve", "overwrite"] = "preserve",
    handle_first_src_param: Literal["copy", "skip"] = "copy",
    handle_first_dst_param: Literal["preserve", "drop"] = "drop",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the signature that ``inspect`` sees of another one.

    Args:
        handle_return_type: whose return type; "overwrite" takes the source's.
        handle_first_src_param: "skip" leaves out the source's first parameter (``self``).
        handle_first_dst_param: "preserve" keeps the function's own first parameter in front.
    """
    signature = inspect.signature(source)
    parameters = list(signature.parameters.values())[handle_first_src_param == "skip" :]

    def decorate(function: Callable[..., Any], /) -> Callable[..., Any]:
        own = inspect.signature(function)
        kept = list(own.parameters.values())[:1] if handle_first_dst_param == "preserve" else []
        returns = (signature if handle_return_type == "overwrite" else own).return_annotation
        function.__signature__ = own.replace(parameters=kept + parameters, return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return decorate
