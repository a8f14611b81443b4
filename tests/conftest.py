"""Skips tests for CUDA where there are too few devices, and has workers begin with the longest files."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support.launch import num_simulated_hosts
from tests.support.warm_python import share_among_workers

torch.set_num_threads(1)

_TESTS = Path(__file__).parent
# Longest first: a long file that starts last would keep one core busy alone.
_LONGEST = [
    "parity/test_matrix.py",
    "core/distributed/fsdp/test_situations.py",
    "test_docs.py",
    "core/test_simple_training_loop.py",
    "training/launch/test_megatron_lines.py",
    "core/extensions/test_transformer_engine_ranks.py",
    "core/distributed/fsdp/test_compiled_situations.py",
    "core/test_interpreted_kernels.py",
    "training/launch/test_fault_injection.py",
    "core/distributed/fsdp/test_random_programs.py",
    "core/distributed/fsdp/strategies/test_cut_rows.py",
    "training/launch/test_failures.py",
    "training/loop/test_cuda_graph.py",
    "benchmarks/test_compare.py",
    "core/distributed/fsdp/strategies/test_parity.py",
    "core/distributed/fsdp/dtensor/test_row_shard.py",
    "training/loop/test_pipeline.py",
    "core/distributed/fsdp/checkpoint/test_checkpoint.py",
    "parity/test_precision_and_offload.py",
    "parity/test_router_losses.py",
    "tools/test_audit.py",
    "core/distributed/fsdp/strategies/test_fp8_weights.py",
    "core/distributed/fsdp/runtime/test_public_state.py",
    "examples/test_quickstart.py",
    "core/distributed/fsdp/comm/test_communicators.py",
    "core/test_full_cuda_graph.py",
    "training/formats/test_huggingface.py",
    "core/distributed/fsdp/foreign_optimizers/test_fused_adam.py",
    "training/launch/test_pretrain.py",
    "core/distributed/fsdp/adapter/test_adapter.py",
    "core/distributed/fsdp/buffers/test_parameters.py",
    "core/distributed/fsdp/comm/test_peer_copy.py",
    "core/distributed/fsdp/strategies/test_hybrid.py",
    "core/distributed/fsdp/flat_optimizer/test_flat_adamw.py",
    "training/test_checkpointing.py",
    "core/distributed/fsdp/runtime/test_order.py",
    "damage/test_damage.py",
    "core/extensions/test_transformer_engine_mlp.py",
    "tools/checkpoint/test_inspect.py",
    "core/distributed/fsdp/api/test_optimizer.py",
    "training/launch/test_resume.py",
    "core/distributed/fsdp/flat_optimizer/test_host_updates.py",
    "core/distributed/fsdp/dtensor/test_row_parts.py",
    "parity/test_reload.py",
    "core/distributed/fsdp/flat_optimizer/test_flat_muon.py",
    "training/launch/test_restart.py",
    "training/formats/test_saved_for_megatron_lm.py",
    "core/distributed/fsdp/comm/test_lost_rank.py",
    "training/launch/test_kill.py",
    "core/distributed/fsdp/api/test_fsdp2_methods.py",
    "core/distributed/fsdp/buffers/test_gradients.py",
    "core/distributed/fsdp/runtime/test_schedule.py",
    "core/distributed/fsdp/checkpoint/test_checkpoint_kill.py",
    "core/distributed/fsdp/checkpoint/test_damaged_checkpoints.py",
    "benchmarks/test_compare_precisions.py",
    "core/distributed/fsdp/api/test_load_state_dict.py",
    "core/distributed/fsdp/flat_optimizer/test_param_remainders.py",
    "benchmarks/test_model_speed.py",
    "training/launch/test_layouts.py",
    "training/launch/test_growing_batches.py",
    "training/formats/test_runs_of_megatron_lm.py",
    "core/models/test_context_parallel_gpt.py",
    "core/distributed/fsdp/checkpoint/test_split_checkpoints.py",
    "benchmarks/engines/test_graphed.py",
    "core/distributed/fsdp/test_planted_faults.py",
    "core/distributed/fsdp/test_self_audit.py",
]
assert all((_TESTS / name).exists() for name in _LONGEST), "_LONGEST must name files that exist"


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # until all tests are imported: what is there by then stays
    workerinput = getattr(session.config, "workerinput", None)
    if workerinput is None and session.config.getoption("numprocesses", None):
        share_among_workers()
    if workerinput is None or session.config.args != session.config.getini("testpaths"):
        return
    # Each worker imports all tests. Those of one begin where those of another are not yet, and rewrite a part each.
    names = [
        ".".join(path.relative_to(_TESTS.parent).with_suffix("").parts) for path in sorted(_TESTS.rglob("test_*.py"))
    ]
    begin = len(names) * int(workerinput["workerid"].removeprefix("gw")) // workerinput["workercount"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in collection, but for what torch.compile itself imports
        warnings.filterwarnings("ignore", ".*torch.jit.script_method.* is deprecated", DeprecationWarning)
        for name in names[begin:] + names[:begin]:
            with suppress(Exception, pytest.skip.Exception):  # which collection will find again, and report
                importlib.import_module(name)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each collection of garbage would look at the million objects of all modules and tests
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        needed = marker.args[0] if marker.args else 1
        ranks_per_device = 1 if marker.kwargs.get("own_devices") else num_simulated_hosts()
        if torch.cuda.device_count() * ranks_per_device < needed:
            pytest.skip(f"needs {needed} CUDA devices, found {torch.cuda.device_count()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("-m"):
        skip = pytest.mark.skip(reason="slow: run with -m slow")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, which hands out files in this order
        turns = {_TESTS / name: turn for turn, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: turns.get(item.path, len(turns)))


@pytest.fixture(autouse=True)
def _level_of_the_root_logger() -> Iterator[None]:
    """Let what a test hides from the log hide nothing from later tests."""
    root = logging.getLogger()
    level, disabled = root.level, root.manager.disable
    yield
    root.setLevel(level)
    logging.disable(disabled)
