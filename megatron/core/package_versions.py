"""Versions of torch and of optional packages."""

from __future__ import annotations

import functools
from importlib import metadata

import torch
from packaging.version import Version

_NONE = Version("0.0.0")


@functools.cache
def _installed(*names: str) -> Version:
    for name in names:
        try:
            return Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return _NONE


def get_torch_version() -> Version:
    """Return torch's version."""
    return Version(torch.__version__)


def get_te_version() -> Version:
    """Return transformer-engine's version; 0.0.0 where it is not installed."""
    return _installed("transformer-engine", "transformer_engine")


def get_fa_version() -> Version:
    """Return the version of the package flash-attn, which nothing here uses; 0.0.0 where it is not installed."""
    return _installed("flash-attn")


def _is_min(found: Version, version: str, check_equality: bool) -> bool:
    return found >= Version(version) if check_equality else found > Version(version)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is of this version or a later one; without ``check_equality`` of a later one."""
    return _is_min(get_torch_version(), version, check_equality)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether transformer-engine is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_te_version(), version, check_equality)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flash-attn is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_fa_version(), version, check_equality)
