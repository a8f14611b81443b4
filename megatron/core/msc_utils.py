"""Megatron-Core's switch of the package multistorageclient, which is not served: paths are those of the file system."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["MultiStorageClientFeature"]


class _Feature:
    """A switch that stays off."""

    def is_enabled(self) -> bool:
        """Return False."""
        return False

    def disable(self) -> None:
        """Do nothing."""

    def enable(self) -> NoReturn:
        """Refuse."""
        raise NotImplementedError(
            "MultiStorageClientFeature.enable() is not served: paths are those of the file system"
        )

    def import_package(self) -> NoReturn:
        """Refuse: the switch is off."""
        raise RuntimeError("the feature must be enabled to use its package, and is not served")


MultiStorageClientFeature = _Feature()
