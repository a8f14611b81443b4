"""The PyPI package ``megatron_fsdp`` and this one are imported in one process, in either order: neither is taken for the other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

OURS = "megatron.core.distributed.fsdp.src.megatron_fsdp"
THEIRS = "megatron_fsdp"
ORDERS = pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours_first", "theirs_first"])

# Submodules as those of the package, which import from one another by relative paths.
STAND_IN = {
    "__init__.py": "from .fully_shard import fully_shard\nfrom .megatron_fsdp import MegatronFSDP\n",
    "fully_shard.py": "from .megatron_fsdp import MegatronFSDP\ndef fully_shard(module):\n    return MegatronFSDP()\n",
    "megatron_fsdp.py": "class MegatronFSDP:\n    pass\n",
    "uneven_dtensor.py": "def split_dtensor():\n    pass\n",
    "experimental/__init__.py": "from ..uneven_dtensor import split_dtensor\nfrom .fully_shard import fully_shard\n",
    "experimental/fully_shard.py": "def fully_shard():\n    pass\n",
}


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith((f"{OURS}.", f"{THEIRS}."))]:
        monkeypatch.delitem(sys.modules, name)


def _check_apart(order: tuple[str, str]) -> None:
    """Import both, and each submodule of one that the other has too."""
    first, second = map(importlib.import_module, order)
    ours, theirs = (first, second) if order[0] == OURS else (second, first)
    for path in (".uneven_dtensor", ".fully_shard", ".experimental.fully_shard", ".experimental", ".megatron_fsdp", ""):
        own, other = (importlib.import_module(name + path) for name in (OURS, THEIRS))
        assert own is not other and own.__file__ != other.__file__
        for name in set(getattr(own, "__all__", ())) & set(vars(other)):
            mine, its = getattr(own, name), getattr(other, name)
            if callable(its):
                assert mine.__module__.startswith("megatron.core.") and its.__module__.startswith(f"{THEIRS}."), name
    for package, home in ((ours, "megatron.core."), (theirs, f"{THEIRS}.")):
        assert package.fully_shard.__module__.startswith(home), "a function, not the submodule of its name"
        assert package.experimental.fully_shard.__module__.startswith(home)
        assert package.MegatronFSDP.__module__.startswith(home)


@ORDERS
def test_neither_shadows_the_other(order: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in STAND_IN.items():
        file = tmp_path / THEIRS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    _forget(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    _check_apart(order)
    assert str(tmp_path) in str(sys.modules[THEIRS].__file__)
    _forget(monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec(THEIRS) is None, reason="needs the package megatron-fsdp")
@pytest.mark.filterwarnings("ignore")
@ORDERS
def test_neither_shadows_the_real_package(order: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch)
    _check_apart(order)
