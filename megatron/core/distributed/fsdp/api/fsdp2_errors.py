"""Errors that FSDP2's callers catch by the class and the words that they have there, and others by what they are."""

from __future__ import annotations


class Fsdp2ValueError(ValueError, AssertionError):
    """An argument that must be another one; an ``AssertionError`` in FSDP2."""


class Fsdp2NotServedError(NotImplementedError, AssertionError):
    """A lawful wish that is not served; an ``AssertionError`` in FSDP2."""
