"""The layers of DESIGN.md are contracts in pyproject.toml: they hold, and each is broken by an import that it forbids."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINE = "megatron.core.distributed.fsdp"

# Contract, importer, imported: at least one for each contract.
FORBIDDEN = [
    ("parts", "megatron.core.jit", "megatron.training.arguments"),
    ("parts", "megatron.training.loop.garbage", "benchmarks.measure.memory"),
    ("engine-layers", f"{ENGINE}.layout.plan", f"{ENGINE}.comm.streams"),
    ("engine-layers", f"{ENGINE}.api.unit_modules", f"{ENGINE}.flat_optimizer.flat_adamw"),
    ("engine-layers", f"{ENGINE}.checkpoint.folder", f"{ENGINE}.adapter.model_groups"),
    ("engine-transports", f"{ENGINE}.comm.transport", f"{ENGINE}.comm.process_group"),
    ("engine-transports", f"{ENGINE}.comm.peer_copy", f"{ENGINE}.comm.choose"),
    ("engine-buffers", f"{ENGINE}.buffers.flat_buffer", f"{ENGINE}.buffers.weights"),
    ("engine-runtime", f"{ENGINE}.runtime.unsharder", f"{ENGINE}.runtime.planner"),
    ("engine-core", f"{ENGINE}.runtime.planner", f"{ENGINE}.checks.step_order"),
    ("engine-core", f"{ENGINE}.buffers.parameter_group", f"{ENGINE}.codec.fp8_codec"),
    ("engine-core", f"{ENGINE}.buffers.parameter_group", f"{ENGINE}.compat.dbuffer"),
    ("engine-core", f"{ENGINE}.api.optimizer", f"{ENGINE}.foreign_optimizers.fused_adam"),
    ("engine-core", f"{ENGINE}.mesh.group_mesh", f"{ENGINE}.adapter.distributed_index"),
    ("engine-circles", f"{ENGINE}.buffers.flat_buffer", f"{ENGINE}.buffers.parameter_group"),
    ("engine-alone", f"{ENGINE}.api.module", "megatron.core.transformer.enums"),
    ("engine-alone", f"{ENGINE}.mesh.group_mesh", "megatron.core.process_groups_config"),
    ("engine-core", f"{ENGINE}.api.module", f"{ENGINE}.fsdp2.methods"),
    ("engine-inside", "megatron.training.checkpointing", f"{ENGINE}.checkpoint.files"),
    ("engine-inside", "megatron.core.optimizer.optimizer", f"{ENGINE}.flat_optimizer.flat_norm"),
    ("engine-inside", "tools.checkpoint.inspect", f"{ENGINE}.dtensor.placements"),
    ("training-layers", "megatron.training.loop.train_step", "megatron.training.telemetry.memory"),
    ("training-flags", "megatron.training.data.batches", "megatron.training.arguments"),
    ("benchmarks-layers", "benchmarks.engines.plain_gpt", "benchmarks.measure.steps"),
]


# Read from the folder that it runs in: the contracts over that tree once with each forbidden import, then without any.
PLANT = """
import sys
from pathlib import Path

from importlinter.cli import lint_imports

for row in sys.argv[1:]:
    contract, importer, imported = row.split()
    path = Path(importer.replace(".", "/") + ".py")
    text = path.read_text()
    # Also where only type checkers look.
    path.write_text(f"{text}\\nif TYPE_CHECKING:\\n    import {imported}\\n")
    print("row", row)
    lint_imports(limit_to_contracts=(contract,), no_cache=True, no_logo=True)
    path.write_text(text)
print("end")
sys.exit(lint_imports(no_cache=True, no_logo=True))
"""


def names_of_contracts() -> dict[str, str]:
    """{id: name} of the contracts in pyproject.toml."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    return dict(re.findall(r'^id = "(.+)"\nname = "(.+)"$', text, re.MULTILINE))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a copy of the tree in which one forbidden import after the other is planted."""
    folder = tmp_path_factory.mktemp("planted")
    for name in ("megatron", "benchmarks", "tools", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "1000"}
    command = [sys.executable, "-c", PLANT, *map(" ".join, FORBIDDEN)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return done.stdout


def test_contracts_hold(report: str) -> None:
    names, of_tree = names_of_contracts(), report.rpartition("\nend\n")[2]
    assert f"Contracts: {len(names)} kept, 0 broken." in of_tree, of_tree


@pytest.mark.parametrize(("contract", "importer", "imported"), FORBIDDEN)
def test_a_forbidden_import_is_named(report: str, contract: str, importer: str, imported: str) -> None:
    of_row = re.split(r"\n(?:row|end)\b", report.partition(f"row {contract} {importer} {imported}\n")[2])[0]
    assert f"{names_of_contracts()[contract]} BROKEN" in of_row, of_row
    if contract == "engine-circles":
        assert f"No cycles are allowed in {importer.rpartition('.')[0]}." in of_row, of_row
    else:
        assert f"{importer} -> {imported} (l." in of_row, of_row


def test_each_contract_is_broken_by_some_import() -> None:
    assert names_of_contracts().keys() == {contract for contract, _, _ in FORBIDDEN}
