"""Packaging: what is imported is declared, what is declared is used, and what is pinned is what is declared."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import setuptools

import megatron.core
from megatron.core.distributed.fsdp.config.torch_versions import NEWEST, OLDEST

REPOSITORY = Path(__file__).resolve().parent.parent

OWN = {"megatron", "tests", "tools", "examples", "benchmarks", "pretrain_gpt", "pretrain_hybrid", "pretrain_mamba"}
DISTRIBUTION_OF_MODULE = {"pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "importlinter": "import-linter"}
EXTRA_OF_EXTENSION = {
    "yaml": "pyyaml",
    "fla": "flash-linear-attention",
    "fused_weight_gradient_mlp_cuda": "apex",
    "transformer_engine_torch": "transformer-engine",
}


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """The arguments of ``setup``."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        patch.chdir(REPOSITORY)
        runpy.run_path("setup.py")
    return given


def third_party_imports(folder: str) -> dict[str, set[str]]:
    """{top-level module: files that import it}, without the standard library and the repository's own."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in OWN:
                    found[top].add(path.relative_to(REPOSITORY).as_posix())
    return found


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[@]", requirement)[0].strip().lower() for requirement in requirements}


def test_what_the_library_imports_is_required_or_optional_in_one_file(metadata: dict[str, Any]) -> None:
    """An optional package that several files import would have to be guarded in each of them."""
    required = names_of(metadata["install_requires"])
    optional = set().union(*(names_of(extra) for extra in metadata["extras_require"].values()))
    for module, files in third_party_imports("megatron").items():
        if module not in required:
            assert EXTRA_OF_EXTENSION.get(module, module.replace("_", "-")) in optional, (
                f"{module} is imported by {files} and must be declared in setup.py"
            )
            assert len(files) == 1, f"the optional package {module} must be imported in one file, got {sorted(files)}"


def test_what_scripts_and_tests_import_is_declared(metadata: dict[str, Any]) -> None:
    declared = names_of(metadata["install_requires"] + metadata["extras_require"]["all"])
    for folder in ("tools", "examples", "tests"):
        # Tests for GPUs import what is compiled against the torch that is there; fixtures are made by hand.
        optional = {"transformer_engine", "transformers"} if folder == "tests" else set()
        optional |= names_of(metadata["extras_require"]["third-party"] if folder != "tools" else [])
        for module, files in third_party_imports(folder).items():
            if module in optional:
                continue
            name = DISTRIBUTION_OF_MODULE.get(module, module)
            assert name in declared | {"setuptools"}, (
                f"{module} is imported by {files} and must be declared in setup.py"
            )


def test_what_is_required_is_imported(metadata: dict[str, Any]) -> None:
    assert names_of(metadata["install_requires"]) <= third_party_imports("megatron").keys()


def test_everything_that_is_installed_has_a_pinned_version(metadata: dict[str, Any]) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    declared = names_of(metadata["install_requires"] + metadata["extras_require"]["all"])
    assert declared <= {name.lower() for name in pins}, "constraints.txt must pin what setup.py declares"
    assert pins["torch"] == "2.13.0"


def test_install_script_looks_for_what_is_declared(metadata: dict[str, Any]) -> None:
    """Its list of modules decides whether a system's Python has all that is needed, and its names are what pip fetches."""
    script = (REPOSITORY / "examples/install.sh").read_text()
    (named,) = re.findall(r"named = (\{.*\})", script)
    assert ast.literal_eval(named) == DISTRIBUTION_OF_MODULE
    modules = {name for listed in re.findall(r"modules \+?= (\[.*\])", script) for name in ast.literal_eval(listed)}
    names = {DISTRIBUTION_OF_MODULE.get(module, module) for module in modules}
    assert names == names_of(metadata["install_requires"] + metadata["extras_require"]["all"])


def test_torch_is_bounded_alike_where_it_is_required_imported_and_found(metadata: dict[str, Any]) -> None:
    """DTensor's placements of uneven rows rest on torch's inside: a version that nobody tried is not taken in silence."""
    (major, oldest), (newest_major, newest) = OLDEST, NEWEST
    assert major == newest_major
    assert f"torch>={major}.{oldest},<{major}.{newest + 1}" in metadata["install_requires"]
    script = (REPOSITORY / "examples/install.sh").read_text()
    assert f"({major}, {oldest}) <= version < ({major}, {newest + 1})" in script


def test_every_package_of_the_namespace_is_typed_where_it_is_installed(metadata: dict[str, Any]) -> None:
    """PEP 561: each package of a namespace has its own marker, and checkers read no types without it."""
    assert "Typing :: Typed" in metadata["classifiers"]
    packages = [path.name for path in (REPOSITORY / "megatron").iterdir() if (path / "__init__.py").exists()]
    typed = [package for package, names in metadata["package_data"].items() if "py.typed" in names]
    assert typed == [f"megatron.{package}" for package in sorted(packages)]
    assert all((REPOSITORY / "megatron" / package / "py.typed").exists() for package in packages)


def test_every_file_that_is_no_python_is_installed_or_documentation(metadata: dict[str, Any]) -> None:
    named = {(package.replace(".", "/"), name) for package, names in metadata["package_data"].items() for name in names}
    files = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "megatron").rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in (".py", ".pyc", ".md")}
    assert named == {(path.parent.as_posix(), path.name) for path in others}


def test_the_version_can_be_read_at_run_time(metadata: dict[str, Any]) -> None:
    assert metadata["version"] == megatron.core.__version__


def test_no_docstring_describes_a_state_instead_of_an_act() -> None:
    """A first line says what a function does: "Gather the unit's weights.", not what is true after the call."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)}"
        for folder in ("megatron", "benchmarks", "tools", "examples", "tests")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented) and "Afterwards" in (ast.get_docstring(node) or "")
    ]
    assert not found, "docstrings must say what is done, got 'Afterwards' in " + ", ".join(found)


def test_metadata_names_the_packages_and_the_licence(metadata: dict[str, Any]) -> None:
    assert {"megatron.core", "megatron.core.distributed.fsdp", "megatron.training"} <= set(metadata["packages"])
    assert not any(package.split(".")[0] != "megatron" for package in metadata["packages"])
    assert metadata["license"] == "Apache-2.0" and metadata["python_requires"] == ">=3.11"
    assert not (REPOSITORY / "megatron/__init__.py").exists(), "megatron is a namespace package"


def test_licence_is_the_text_of_apache_2_without_an_owner() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    owners = [line.strip() for line in text.splitlines() if re.match(r"\s*Copyright\b", line)]
    assert owners == ["Copyright [yyyy] [name of copyright owner]"]


def test_every_folder_of_the_library_is_a_package_that_is_installed(metadata: dict[str, Any]) -> None:
    folders = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "megatron").rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} <= set(metadata["packages"])


@pytest.mark.parametrize(
    "script", ["examples/install.sh", "examples/quickstart.sh", "tests/run.sh", "tests/check.sh", ".ci/run"]
)
def test_shell_scripts_are_well_formed(script: str) -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / script)], check=True)


def test_pre_commit_checks_what_ci_checks() -> None:
    """One script has the list of checks, so that the two cannot differ."""
    for name in ("tests/run.sh", ".pre-commit-config.yaml"):
        assert "bash tests/check.sh" in (REPOSITORY / name).read_text(), f"{name} must run tests/check.sh"


def test_code_owners_are_named_for_what_is_there() -> None:
    rows = [line.split() for line in (REPOSITORY / "CODEOWNERS").read_text().splitlines() if line and line[0] != "#"]
    assert rows[0][0] == "*" and all(owner.startswith("@") for _, *owners in rows for owner in owners)
    assert [pattern for pattern, *_ in rows[1:] if not (REPOSITORY / pattern.lstrip("/")).exists()] == []
