"""The engine's wheel: its imports, and that it works if only torch, numpy and einops are installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tools.engine_wheel import ENGINE, NAME, REPOSITORY, build, sources

# Imported when they are asked for, in the file that serves them.
OPTIONAL = {"transformers", "accelerate", "matplotlib", "peft", "triton", "transformer_engine"}

SCRIPT = f"""
import sys, torch, torch.distributed as dist
from {NAME} import *
from {NAME}.fsdp2 import FSDPModule
import {NAME}.huggingface
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
for part in (model[0], model[2], model):
    fully_shard(part)
optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
losses = []
for _ in range(4):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] and isinstance(model, FSDPModule)
save_checkpoint(model, optimizer, f"{{folder}}/checkpoint")
load_checkpoint(model, optimizer, f"{{folder}}/checkpoint")
assert "megatron" not in sys.modules
print("trained")
"""


def test_the_engine_alone_imports_torch_numpy_and_einops_and_nothing_else() -> None:
    inside = {"python": sys.stdlib_module_names, "own": {NAME, "torch", "numpy", "einops"}}
    for name, text in sources().items():
        assert not re.search(r"megatron\.(core\.(distributed|extensions|child_process|regular_file)|training)", text), (
            name
        )
        for node in ast.walk(ast.parse(text)) if name.endswith(".py") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - inside["python"] - inside["own"]:
                assert top in OPTIONAL, f"{name} imports {top}"


def test_the_page_of_a_report_has_its_files() -> None:
    """They are no Python, and are read when a report is written."""
    folder = "overlap_report"
    files = {f"{folder}/{path.name}" for path in (REPOSITORY / ENGINE.replace(".", "/") / folder).glob("*.*")}
    assert files <= set(sources()) and any(name.endswith(".js") for name in files)


def _required_by(name: str, found: set[str]) -> set[str]:
    """Return the distribution and all that it needs."""
    if name.lower() not in found:
        try:
            requirements = distribution(name).requires or []
        except ModuleNotFoundError:
            return found  # for another platform
        found.add(name.lower())
        for requirement in requirements:
            if "extra ==" not in requirement:
                _required_by(re.split(r"[<>=!~;\[ (]", requirement)[0], found)
    return found


def test_every_public_name_is_there(tmp_path: Path) -> None:
    """Modules of the wheel import none that is left out of it."""
    with zipfile.ZipFile(build(tmp_path / "dist")) as archive:
        archive.extractall(tmp_path)
    imports = f"import sys; from {NAME} import *; import {NAME}.fsdp2, {NAME}.huggingface; assert 'megatron' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_trains_where_nothing_but_torch_numpy_and_einops_is_installed(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist")
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    for name in _required_by("torch", _required_by("numpy", _required_by("einops", set()))):
        own = distribution(name)
        for top in {file.parts[0] for file in own.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(own.locate_file(top)))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = site.glob(f"{NAME}-*.dist-info/METADATA")
    required = re.findall(r"^Requires-Dist: (\w+)>=", metadata.read_text(), re.MULTILINE)
    assert sorted(required) == ["einops", "numpy", "torch"]
    python = tmp_path / "venv/bin/python"
    done = subprocess.run(
        [python, "-I", "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stderr
