"""Run Megatron-FSDP's own tests against this package and against Megatron-FSDP, and compare the results of each test.

The tests are ``tests/unit_tests/distributed/mfsdp_v1`` and ``mfsdp_v2`` of Megatron-LM's repository, unmodified. This repository has no
copy of them: pass a checkout.

    python -m tests.third_party.megatron_fsdp_upstream CHECKOUT [--ranks 2 4] [-k PART OF A NAME] [--json FILE] [--table FILE]

``megatron`` is this package or the checkout's; ``tests.unit_tests`` is always the checkout's. Without a GPU, each test runs on
separate gloo ranks, forked from a process that has imported its file; ``_without_cuda`` replaces the ``torch.cuda`` calls that need a
device. With a GPU, ``--ranks 1`` runs the tests unchanged in one process. The exit status is 1 if a test passes with the checkout's
package but not with this one, unless ``DIFFERENT`` lists it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any

DIFFERENT: dict[str, str] = {
    "test_fsdp_db_persist_buf_on_alloc_fail": "allocators of buckets; here one planned arena",
    "test_nccl_ub_enables_symmetric_memory": "which function the adapter calls; nccl_ub reaches the transport",
    "TestMcoreAdapterDense::test_build_train_and_step": "Adam's moments in bf16; here they are fp32",
    "test_tied_child_parameters_allocate_one_physical_weight": "the flat layout of a group is aligned to 64 elements for each rank",
}
"""Substrings of names of tests that assert private internals or unsupported features, and the difference here."""

_FOLDERS = ("mfsdp_v1", "mfsdp_v2")
# All tests in these files count a device's kernels or bytes, or capture a graph.
_OF_A_DEVICE = ("test_cuda_graph.py", "test_memory.py", "test_overlap.py", "test_symmetric_memory.py")
_LIMIT_S = 180
_RESULTS, _RANKS, _PACKAGE = "MFSDP_UPSTREAM_RESULTS", "MFSDP_UPSTREAM_RANKS", "MFSDP_UPSTREAM_PACKAGE"


# ---- in a process of pytest: this file is its plugin -----------------------------------------------------------------


class _Stream:
    """Placeholder for a device stream: on the CPU everything runs synchronously."""

    stream_id, cuda_stream = 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    def __eq__(self, _: object) -> bool:
        return True  # None is the CPU's stream

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream

    def synchronize(self) -> None:
        pass


class _Event:
    """Placeholder for a device event."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _: Any = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _without_cuda() -> None:
    """Run tests for CUDA devices on the CPU: the device name means the CPU, streams do nothing, and NCCL means gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        # A number also means a CUDA device.
        is_cuda = type(value) is int or (isinstance(value, str | torch.device) and str(value).startswith("cuda"))
        return torch.device("cpu") if is_cuda else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
            if func is torch.Tensor.to:
                args = (args[0], *map(on_cpu, args[1:]))
            return func(*args, **kwargs)

    OnCpu().__enter__()
    cuda: Any = torch.cuda
    stream = _Stream()
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *_: (0, 0)
    cuda.get_rng_state, cuda.set_rng_state = (
        (lambda *_: torch.get_rng_state()),
        (lambda state, *_: torch.set_rng_state(state)),
    )
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    for cls in (torch.Tensor, torch.nn.Module):
        cls.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    to: Any = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: to(  # type: ignore[method-assign]
        self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()}
    )
    init_mesh, init, new_group = device_mesh.init_device_mesh, dist.init_process_group, dist.new_group
    device_mesh.init_device_mesh = lambda kind, *args, **kwargs: init_mesh(str(on_cpu(kind)), *args, **kwargs)
    dist.device_mesh.init_device_mesh = dist.init_device_mesh = device_mesh.init_device_mesh

    def gloo(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None), kwargs.pop("pg_options", None)
            backends = {name: "gloo" for name, value in kwargs.items() if name == "backend" and value is not None}
            return make(*("gloo" if one == "nccl" else one for one in args), **{**kwargs, **backends})

        return made

    def averaged(reduce: Any) -> Any:
        def reduced(output: Any, *args: Any, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
            if op != dist.ReduceOp.AVG:
                return reduce(output, *args, op=op, **kwargs)
            assert not kwargs.get("async_op")
            reduce(output, *args, op=dist.ReduceOp.SUM, **kwargs)
            output.div_(dist.get_world_size(kwargs.get("group")))

        return reduced

    for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter"):
        setattr(dist, name, averaged(getattr(dist, name)))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    cuda._lazy_init = lambda: None
    dist.init_process_group = dist.distributed_c10d.init_process_group = gloo(init)
    dist.new_group = dist.distributed_c10d.new_group = gloo(new_group)


def _let_upstream_run_on_cpu() -> None:
    """Let the checkout's own package create contexts on the CPU, although it checks the device type."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental

    module: Any = sys.modules[experimental.__name__ + ".fully_shard"]
    own, named_cuda = module.fully_shard_context, types.SimpleNamespace(type="cuda")
    module.fully_shard_context = lambda device=None, **kwargs: own(named_cuda, **kwargs)
    vars(experimental)["fully_shard_context"] = module.fully_shard_context
    # A buffer records the stream on which it was allocated; CPUs have no streams.
    stream = _Stream()
    experimental.DBuffer.allocation_stream = property(lambda _: stream, lambda *_: None)


def _without_transformer_engine() -> None:
    """Let test files import transformer-engine if it is not installed; tests that use it fail."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    import torch

    # First run the code that checks whether it is installed.
    importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    importlib.import_module("megatron.core.transformer.transformer_layer")
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["transformer_engine"])["__version__"] = "0.0.0"
    vars(sys.modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = torch.optim.Adam


def _without_downloads() -> None:
    """Replace imports of upstream's ``conftest.py`` other than fixtures (data, models of other tests), and names of newer Pythons."""
    import typing

    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    scripts = "tests.test_utils.python_scripts"
    stand_ins = {
        f"{scripts}.download_unit_tests_dataset": ["download_and_extract_asset"],
        "tests.unit_tests.dist_checkpointing.utils": [
            *(
                "init_basic_mock_args",
                "init_checkpointing_mock_args",
                "initialize_gpt_model",
                "setup_model_and_optimizer",
            ),
            "setup_moe_model_and_optimizer",
        ],
    }
    for name, members in {"tests.test_utils": [], scripts: [], **stand_ins}.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members, lambda **_: None))
    # Its Utils imports this for tests that train from a command line.
    from megatron.training import argument_utils

    for name in ("gpt_config_from_args", "hybrid_config_from_args", "pretrain_cfg_container_from_args"):
        vars(argument_utils).setdefault(name, None)
    from megatron.training import training

    vars(training).setdefault("setup_model_and_optimizer", None)


class _OnRanks:
    """A pytest plugin that runs each test on several ranks and records its result."""

    def __init__(self) -> None:
        self.num_ranks = int(os.environ[_RANKS])
        self.results: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            self.results[_short(report.nodeid)] = f"import: {lines[-1] if lines else ''}"

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        label = _short(item.nodeid)
        self.results[label] = said = _run(item, nextitem, self.num_ranks)
        print(f"{'passed' if not said else said.strip().splitlines()[-1][:150]}  {label}", flush=True)
        return True

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[_RESULTS]).write_text(json.dumps(self.results))


def _short(nodeid: str) -> str:
    return nodeid.partition("distributed/")[2] or nodeid


def _run(item: Any, nextitem: Any, num_ranks: int) -> str:
    """Run a test on forked ranks; return "" or the reason for a failure. On a GPU, run it in this process: forks cannot use CUDA."""
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        if torch.cuda.is_available():
            _run_rank(item, nextitem, 0, 1, port, Path(f"{folder}/result"))
            return Path(f"{folder}/result").read_text()
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(f"{folder}/out{rank}", os.O_CREAT | os.O_WRONLY), 1)
                os.dup2(1, 2)
                try:
                    _run_rank(item, item, rank, num_ranks, port, Path(f"{folder}/result{rank}"))
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                finally:
                    _wait_for_all(Path(folder), num_ranks)
                    sys.stdout.flush()
                    os._exit(0)
            children.append(child)
        end = time.monotonic() + _LIMIT_S
        for child in children:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.01)
        paths = [Path(f"{folder}/result{rank}") for rank in range(num_ranks)]
        said = [
            path.read_text() if path.exists() else f"{_last_words(path)}\nno result: the rank ended" for path in paths
        ]
    wrong = [text for text in said if text]
    # The first rank's error is usually the cause of the others'.
    return min(wrong, key=lambda text: ("onnection closed" in text or "no result" in text, text)) if wrong else ""


def _wait_for_all(folder: Path, num_ranks: int) -> None:
    """Wait up to five seconds for all ranks' results: rank 0 serves the store, which the others may still use."""
    end = time.monotonic() + 5
    while len(list(folder.glob("result*"))) < num_ranks and time.monotonic() < end:
        time.sleep(0.01)


def _last_words(result: Path) -> str:
    return result.with_name(result.name.replace("result", "out")).read_text(errors="replace")[-2000:]


def _run_rank(item: Any, nextitem: Any, rank: int, num_ranks: int, port: int, result: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    utilities = sys.modules.get("tests.unit_tests.test_utilities")
    if utilities is not None:
        utilities.Utils.rank = utilities.Utils.local_rank = rank
        utilities.Utils.world_size = num_ranks
    reports = item.config.pluginmanager.getplugin("runner").runtestprotocol(item, nextitem=nextitem, log=False)
    failed = [str(report.longrepr) for report in reports if report.failed]
    skipped = [f"skipped: {str(report.longrepr).splitlines()[-1]}" for report in reports if report.skipped]
    result.write_text("\n".join([*failed, *skipped]))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files that need a device if there is none."""
    import torch

    return True if collection_path.name in _OF_A_DEVICE and not torch.cuda.is_available() else None


def pytest_configure(config: Any) -> None:
    """Register the plugin that runs the tests."""
    config.pluginmanager.register(_OnRanks())


def _prepare() -> None:
    """Set up pytest's process as the tests expect, before it imports them."""
    import torch

    _without_downloads()
    if not torch.cuda.is_available():
        _without_cuda()
        if os.environ[_PACKAGE] == "upstream":
            _let_upstream_run_on_cpu()
    _without_transformer_engine()


# ---- the program -------------------------------------------------------------------------------------------------------


def _run_package(package: Path, checkout: Path, num_ranks: int, pytest_arguments: list[str]) -> dict[str, str]:
    """Run the tests with the ``megatron`` package of a folder; return each test's result: "" or the reason for its failure."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "tests").mkdir()
        (root / "tests" / "__init__.py").touch()
        (root / "tests" / "unit_tests").symlink_to(checkout / "tests" / "unit_tests")
        (root / "megatron").symlink_to(package / "megatron")
        # Other modules that the tests' helpers import, such as model_provider.py.
        scripts = {path.name: path for folder in (checkout, package) for path in folder.glob("*.py")}
        for name, path in scripts.items():
            (root / name).symlink_to(path)
        (root / "mfsdp_plugin.py").symlink_to(Path(__file__).resolve())
        (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  flaky\n  flaky_in_dev\n  internal\n")
        paths = ":".join([folder, *filter(None, [os.environ.get("MFSDP_UPSTREAM_PATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, _RANKS: str(num_ranks), _RESULTS: f"{folder}/results"}
        environment[_PACKAGE] = "upstream" if package == checkout else "ours"
        environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks), "RANK": "0", "LOCAL_RANK": "0"}
        folders = [f"tests/unit_tests/distributed/{name}" for name in _FOLDERS]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "mfsdp_plugin",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "--tb=line",
            "--continue-on-collection-errors",
        ]
        subprocess.run([*command, *pytest_arguments, *folders], cwd=folder, env=environment, check=False)
        results: dict[str, str] = json.loads((root / "results").read_text())
        return results


def _word(said: str | None) -> str:
    if said is None:
        return "-"
    if not said:
        return "passed"
    kind = said.partition(":")[0]
    return kind if kind in ("skipped", "import") else "FAILED"


def _why(said: str) -> str:
    errors = [line[2:].strip() for line in said.splitlines() if line.startswith("E ")]
    return " ".join((errors or said.strip().splitlines())[0].split())[:160].replace("|", "/")


def main() -> int:
    """Run the tests as the command line requests, and print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=None)
    parser.add_argument("-k", default="", help="pytest's expression: tests to run")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--known", type=Path, help="a --json file with earlier results of the checkout's package")
    parser.add_argument("--table", type=Path, help="write the table to this file, as Markdown")
    options = parser.parse_args()
    ours, checkout = Path(__file__).resolve().parents[2], options.checkout.resolve()
    arguments = ["-k", options.k] if options.k else []
    known = json.loads(options.known.read_text()) if options.known else {}
    has_cuda = importlib.util.find_spec("torch") is not None and __import__("torch").cuda.is_available()
    everything: dict[str, dict[str, dict[str, str]]] = {}
    lines, num_worse = ["| ranks | test | upstream | ours | why |", "|---|---|---|---|---|"], 0
    for num_ranks in options.ranks or ([1] if has_cuda else [2, 4]):
        theirs = known.get(str(num_ranks), {}).get("upstream") or _run_package(checkout, checkout, num_ranks, arguments)
        own = _run_package(ours, checkout, num_ranks, arguments)
        everything[str(num_ranks)] = {"upstream": theirs, "ours": own}
        for label in sorted(own if options.k else theirs | own):
            imported = own.get(label.partition("::")[0], own.get(label, None))
            there, here = theirs.get(label), own.get(label, imported)
            worse = there == "" and here != ""
            excuse = next((why for part, why in DIFFERENT.items() if part in label), "") if worse else ""
            num_worse += worse and not excuse
            why = f"known: {excuse}" if excuse else _why(here) if worse and here else ""
            lines.append(f"| {num_ranks} | {label} | {_word(there)} | {_word(here)} | {why} |")
        passed = [label for label, said in theirs.items() if not said]
        both = sum(own.get(label) == "" for label in passed)
        lines.append(
            f"| {num_ranks} | all | {len(passed)} passed | {both} of these passed, {sum(not said for said in own.values())} in all | |"
        )
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"{num_worse} tests pass with the checkout's package and not with this one")
    return 1 if num_worse else 0


if __name__ == "mfsdp_plugin":
    _prepare()

if __name__ == "__main__":
    sys.exit(main())
