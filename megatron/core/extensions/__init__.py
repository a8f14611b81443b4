"""Optional packages, each imported in one file here."""

from __future__ import annotations

import functools
import importlib
import warnings


@functools.cache
def why_missing(package: str) -> str | None:
    """Return why the file here that imports a package cannot be used, None if it can.

    The package is imported at the first call. A package that is there may fail in many ways, as when libraries that it was
    built for are others; whatever it says is the reason.
    """
    try:
        with warnings.catch_warnings():
            # What packages warn of while they are imported is not of ours: transformer-engine, that JAX is there.
            warnings.simplefilter("ignore")
            importlib.import_module(f"{__name__}.{package}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
