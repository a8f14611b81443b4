"""Nothing in a file that is read runs: sources use no reader that would run it, but those listed here with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = (
    "megatron",
    "tools",
    "benchmarks",
    "examples",
    "setup.py",
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "pretrain_mamba.py",
)

# Whatever is used of these may run what a file says, but for names that only write.
_MODULES = (
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "runpy",
    "shelve",
    "torch.hub",
    "torch.package",
    "yaml",
)
_HARMLESS = {
    *(f"{module}.{name}" for module in ("pickle", "cloudpickle", "marshal") for name in ("dump", "dumps")),
    *("pickle.PicklingError", "pickle.UnpicklingError"),
    *("yaml.safe_load", "yaml.safe_load_all", "yaml.safe_dump", "yaml.SafeLoader", "yaml.YAMLError"),
}
_NAMES = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *(
        "torch.jit.load",
        "torch.export.load",
        "pandas.read_pickle",
        "logging.config.fileConfig",
        "logging.config.listen",
    ),
    *("numpy.lib.format.read_array", "torch.serialization.add_safe_globals", "torch.utils.model_zoo.load_url"),
    # It unpickles ``.metadata``.
    *("torch.distributed.checkpoint.load", "torch.distributed.checkpoint.FileSystemReader"),
    *(
        "torch.distributed.checkpoint.filesystem.FileSystemReader",
        "torch.distributed.checkpoint.state_dict_loader.load",
    ),
}
# Calls that are safe with a keyword alone.
_WITH_KEYWORD = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
_FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "allow_pickle": True, "weights_only": False}

ENGINE = "megatron/core/distributed/fsdp"
ALLOWED = {
    f"{ENGINE}/checkpoint/pickles.py: pickle.Unpickler": "names become inert records",
    # What may be made of their arguments has no effect on anything else.
    f"{ENGINE}/comm/choose.py: torch.serialization.add_safe_globals": "a table of transports, without content",
    f"{ENGINE}/dtensor/placements.py: torch.serialization.add_safe_globals": "placements, which are numbers",
    f"{ENGINE}/dtensor/uneven_dtensor.py: torch.serialization.add_safe_globals": "a DTensor, as torch's own",
    "benchmarks/same_numbers.py: runpy.run_path": "the script of the command line",
    "benchmarks/same_numbers.py: torch.distributed.checkpoint.filesystem.FileSystemReader": "of what its own run wrote",
    "benchmarks/same_numbers.py: torch.distributed.checkpoint.state_dict_loader.load": "of what its own run wrote",
    "megatron/core/import_paths.py: exec_module": "files of this package, as Python's own loader",
    "megatron/core/dist_checkpointing/strategies/cached_metadata_filesystem_reader.py: torch.distributed.checkpoint.FileSystemReader": (
        "a base class for callers, who choose what they read; nothing here uses it"
    ),
    "tools/audit.py: exec_module": "the script of the command line",
}


def unsafe_readers(text: str) -> Iterator[str]:
    """Yield what a source uses that may run what a file says, by its full name."""
    tree = ast.parse(text)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _of_name(f"{node.module}.{alias.name}")
    safe_calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_safe(node, known)}
    for node in ast.walk(tree):
        name = _full_name(node, known)
        if name is not None:
            yield from _of_name(name)
            if name in _WITH_KEYWORD and id(node) not in safe_calls:
                yield name
        if isinstance(node, ast.Attribute) and node.attr in ("exec_module", "load_module"):
            yield node.attr
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "not a constant"
                if keyword.arg == "pickle_module" or (
                    keyword.arg in _FORBIDDEN_KEYWORDS and value in (_FORBIDDEN_KEYWORDS[keyword.arg], "not a constant")
                ):
                    yield f"{keyword.arg}={value!r}"
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            if first in _MODULES and _full_name(node.func, known) == "importlib.import_module":
                yield repr(first)


def _of_name(name: str) -> Iterator[str]:
    is_of_module = any(name.startswith(f"{module}.") for module in _MODULES) and name not in _HARMLESS
    if is_of_module or name in _NAMES:
        yield name


def _full_name(node: ast.AST, known: dict[str, str]) -> str | None:
    """Return what a name or attribute stands for, by imports of the file; None for others."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id if node.id in _NAMES else None)
    if isinstance(node, ast.Attribute) and (before := _full_name(node.value, known)) is not None:
        return f"{before}.{node.attr}"
    return None


def _is_safe(call: ast.Call, known: dict[str, str]) -> bool:
    keyword, value = _WITH_KEYWORD.get(_full_name(call.func, known) or "", ("", None))
    return any(
        given.arg == keyword and isinstance(given.value, ast.Constant) and given.value.value is value
        for given in call.keywords
    )


def test_sources_use_no_reader_that_runs_what_a_file_says() -> None:
    files = [path for part in PARTS for path in sorted((REPOSITORY / part).rglob("*.py") or [])]
    files += [REPOSITORY / part for part in PARTS if part.endswith(".py")]
    found = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in files
        for name in unsafe_readers(path.read_text(encoding="utf-8"))
    }
    assert len(files) > 500
    assert found - ALLOWED.keys() == set(), "read data alone (weights_only=True, allow_pickle=False, read_inert)"
    assert ALLOWED.keys() - found == set(), "listed here and not used any more"


def test_unpicklers_name_what_may_be_named() -> None:
    """Without a ``find_class`` of its own an Unpickler finds any function."""
    paths = [path for path in REPOSITORY.glob(f"{ENGINE}/**/*.py") if "Unpickler" in path.read_text(encoding="utf-8")]
    classes = [
        node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    own = [node for node in classes if any("Unpickler" in ast.unparse(base) for base in node.bases)]
    finding = {n.name for n in own if any(isinstance(i, ast.FunctionDef) and i.name == "find_class" for i in n.body)}
    assert len(finding) == 1
    for node in own:
        assert node.name in finding or {ast.unparse(base) for base in node.bases} <= finding, node.name


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import loads",
        "from pickle import Unpickler as U\nU(f).load()",
        "import pickle\nread = pickle.loads",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "from torch import load\nload(f)",
        "import torch\nread = torch.load",
        "import numpy as np\nnp.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import yaml\nyaml.load(f, yaml.Loader)",
        "import marshal\nmarshal.loads(b)",
        "import shelve\nshelve.open(f)",
        "eval(text)",
        "exec(text)",
        "spec.loader.exec_module(module)",
        "AutoModel.from_pretrained(f, trust_remote_code=True)",
        "import importlib\nimportlib.import_module('pickle').loads(b)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state)",
    ],
)
def test_the_scan_finds(text: str) -> None:
    assert list(unsafe_readers(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import numpy as np\nnp.load(f, allow_pickle=False)",
        "import pickle\npickle.dumps(value)",
        "import json\njson.load(f)",
        "import re\nre.compile('a')\nmodel.eval()\nmodel.load(f)",
    ],
)
def test_the_scan_passes(text: str) -> None:
    assert not list(unsafe_readers(text))
