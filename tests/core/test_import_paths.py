"""Import paths of Megatron-Core whose names lie elsewhere: each row leads somewhere, and placeholders raise."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from megatron.core import import_paths
from megatron.core.elsewhere import elsewhere

_ROWS = [
    (path, home, *name.partition("=")[::2])
    for path, homes in import_paths._SERVED.items()
    for home, names in homes.items()
    for name in names.split()
]


@pytest.mark.parametrize(("path", "home", "name", "other"), _ROWS)
def test_a_served_name_is_that_of_its_home(path: str, home: str, name: str, other: str) -> None:
    found = getattr(importlib.import_module(path), name)
    if importlib.util.find_spec("transformer_engine") is None and "transformer_engine" in home:
        with pytest.raises(ImportError, match=rf"{name} needs an optional package: .*transformer_engine.*install"):
            found()
    else:
        assert found is getattr(importlib.import_module(home), other or name)


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in import_paths._REFUSED.items() for name in names]
)
def test_a_refused_name_raises_when_it_is_used(path: str, name: str) -> None:
    found = getattr(importlib.import_module(path), name)
    with pytest.raises(NotImplementedError, match=f"{name} has no counterpart here"):
        found()


def test_a_placeholder_can_be_a_base_class_and_a_type() -> None:
    """Callers define layers over transformer-engine's at import, whether or not they build them."""
    norm: Any = elsewhere("module", "Norm", "use another")

    class Derived(norm):  # type: ignore[misc]
        pass

    assert not isinstance(3, norm)
    with pytest.raises(NotImplementedError, match="use another"):
        Derived()


def test_a_file_keeps_its_own_names_and_an_unknown_one_is_an_error() -> None:
    module = importlib.import_module("megatron.core.transformer.attention")
    assert module.SelfAttention.__module__ == module.__name__
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("megatron.core.no_such_module")
