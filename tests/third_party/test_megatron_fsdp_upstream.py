"""The script reports tests that pass with Megatron-FSDP but not with this package; here it runs on a fake checkout with toy tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOYS = """
import os
import pytest
import torch
import torch.distributed as dist
from tests.unit_tests.test_utilities import Utils


def test_both(distributed_setup):
    dist.init_process_group("nccl")
    total = torch.full((2,), dist.get_rank() + 1.0, device="cuda").cuda()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    assert total.tolist() == [1.5, 1.5] and Utils.rank == dist.get_rank()


def test_there_alone():
    assert os.environ["MFSDP_UPSTREAM_PACKAGE"] == "upstream", "not here"


def test_skipped():
    pytest.skip("no device")


def test_on_one_rank_alone():
    assert Utils.rank == 0
"""
CONFTEST = """
import pytest
from tests.test_utils.python_scripts.download_unit_tests_dataset import download_and_extract_asset
from tests.unit_tests.dist_checkpointing.utils import initialize_gpt_model


@pytest.fixture
def distributed_setup():
    download_and_extract_asset(assets_dir="nowhere")
    yield
"""


def test_a_table_tells_what_passes_where(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    unit_tests = checkout / "tests" / "unit_tests"
    for folder in ("mfsdp_v1", "mfsdp_v2"):
        (unit_tests / "distributed" / folder).mkdir(parents=True)
    (unit_tests / "dist_checkpointing").mkdir()
    for package in (unit_tests, unit_tests / "dist_checkpointing"):
        (package / "__init__.py").touch()
    (checkout / "megatron").symlink_to(REPOSITORY / "megatron")
    (unit_tests / "test_utilities.py").write_text("class Utils:\n    rank = local_rank = 0\n    world_size = 1\n")
    (unit_tests / "conftest.py").write_text(CONFTEST)
    (unit_tests / "distributed" / "mfsdp_v2" / "test_toy.py").write_text(TOYS)
    (unit_tests / "distributed" / "mfsdp_v1" / "test_broken.py").write_text("import no_such_package\n")
    command = [sys.executable, "-m", "tests.third_party.megatron_fsdp_upstream", str(checkout), "--ranks", "2"]
    ran = subprocess.run(
        [*command, "--table", str(tmp_path / "table")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "table").read_text().splitlines()]
    found = {row[1].rpartition("::")[2]: row[2:4] for row in rows[2:]}
    assert found == {
        "mfsdp_v1/test_broken.py": ["import", "import"],
        "test_both": ["passed", "passed"],
        "test_there_alone": ["passed", "FAILED"],
        "test_skipped": ["skipped", "skipped"],
        "test_on_one_rank_alone": ["FAILED", "FAILED"],
        "all": ["2 passed", "1 of these passed, 1 in all"],
    }, ran.stdout
    assert ran.returncode == 1 and "1 tests pass with the checkout's package and not with this one" in ran.stdout
    assert "not here" in next(row for row in rows if row[1].endswith("test_there_alone"))[4]
