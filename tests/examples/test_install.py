"""The installation reports what is missing, and installs nothing if all is there."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def write_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(stat.S_IRWXU)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout without .venv, and programs that stand in for the system's."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "programs").mkdir()
    for name in ("examples/install.sh", "constraints.txt", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    write_program(tmp_path / "programs", "apt-get", "exit 1")
    return tmp_path


def install(folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder / 'programs'}:{os.environ['PATH']}", "PYTHON": str(python)}
    script = "set -euo pipefail; source examples/install.sh; install train; echo ready with $PYTHON"
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_python_that_is_too_old_is_refused(folder: Path) -> None:
    done = install(folder, write_program(folder / "programs", "old-python", "exit 1"))
    assert done.returncode == 1 and "Python 3.11 or newer is needed" in done.stderr


def test_a_python_without_venv_is_refused_with_the_package_that_has_it(folder: Path) -> None:
    done = install(
        folder,
        write_program(folder / "programs", "bare", '[[ $* == *ensurepip* || $* == "-" ]] && exit 1; exit 0'),
    )
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr


def test_a_full_disk_is_refused_before_anything_is_fetched(folder: Path) -> None:
    write_program(folder / "programs", "df", "echo header; echo /dev/x 100 88 12 88% /")
    done = install(folder, write_program(folder / "programs", "fine", '[[ $* == "-" ]] && exit 1; exit 0'))
    assert done.returncode == 1 and "MiB of free disk are needed" in done.stderr and "got 12" in done.stderr
    assert not (folder / ".venv").exists()


def test_a_python_with_cuda_and_all_imports_is_used_as_it_is(folder: Path) -> None:
    """A machine without network, too: nothing is fetched, and no virtual environment is made."""
    python = write_program(folder / "programs", "with-cuda", "exit 0")
    done = install(folder, python)
    assert done.returncode == 0, done.stderr
    assert "nothing is installed" in done.stdout and f"ready with {python}" in done.stdout
    assert not (folder / ".venv").exists()


def test_training_enter_rootout_a_picture_where_nothing_can_be_fetched(folder: Path) -> None:
    """A GPU machine without network and without matplotlib."""
    python = write_program(
        folder / "programs",
        "with-cuda",
        '[[ $* == "- train" ]] && echo matplotlib; [[ $* == *"-m venv"* ]] && exit 1; exit 0',
    )
    done = install(folder, python)
    assert done.returncode == 0, done.stderr
    assert "going on without matplotlib" in done.stdout and f"ready with {python}" in done.stdout


def test_an_installation_is_not_repeated_until_what_it_depends_on_changes(folder: Path) -> None:
    python = write_program(folder / "programs", "fine", '[[ $* == "-" ]] && exit 1; exit 0')
    (folder / ".venv/bin").mkdir(parents=True)
    write_program(folder / ".venv/bin", "python", 'echo "$*" >> calls; exit 0')
    assert "installing" in install(folder, python).stdout and (folder / ".venv/ready-train").exists()
    assert "torch numpy" in (folder / "calls").read_text()
    later = (folder / ".venv/ready-train").stat().st_mtime + 5
    assert "installing" not in install(folder, python).stdout
    os.utime(folder / "constraints.txt", (later, later))
    assert "installing" in install(folder, python).stdout
