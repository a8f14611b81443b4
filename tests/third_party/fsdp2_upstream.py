"""Run PyTorch's own tests of FSDP2 with this engine in FSDP2's place, on gloo ranks of the CPU, and count.

The tests are PyTorch's (test/distributed/_composable/fsdp of its repository) and are not kept here: pass the folder of a copy.

    python -m tests.third_party.fsdp2_upstream FOLDER [-k PART OF A NAME] [--engine torch] [--ranks 2] [--json FILE]

With ``--engine torch`` FSDP2 itself runs: which tests run on these ranks at all. The import switch is ``_switch``: before a test's file is
imported, the public names of ``torch.distributed.fsdp`` become those of ``megatron.core.distributed.fsdp.fsdp2``. Each test has ranks of its own,
which are forked from a process that has imported its file, so that a test that hangs or ends its ranks harms no other.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import linecache
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.testing._internal import common_distributed, common_fsdp, common_utils
from torch.testing._internal.common_utils import TestCase

from megatron.core.distributed.fsdp import fsdp2
from megatron.core.distributed.fsdp.comm import process_group

# What a test names that looks at the inside of FSDP2, or puts something of its own into it, as no user of it does. Patches of torch's
# collectives, which assert dtypes or add delays, are none of these: such a test's numbers count.
_INSIDE = (
    "_composable",
    "_get_fsdp_state",
    "_fsdp_param",
    "._fully_shard",
    "foreach_all_gather",
    "foreach_reduce",
    "fully_shard.state",
    "get_cls_to_fsdp_cls",
    "get_comm_counts",
    "patch_foreach_",
    "patch_post_backward",
    "patch_register_",
    "patch_reshard",
    "patch_unshard",
)
NAMES = tuple(name for name in fsdp2.__all__ if hasattr(torch.distributed.fsdp, name))
_LIMIT_S = 300


class Case(common_fsdp.FSDPTestMixin, TestCase):
    """What the tests' classes inherit from, in the place of classes that start ranks themselves."""

    num_ranks = 2
    rank = 0
    file_name = ""

    @property
    def world_size(self) -> int:
        return Case.num_ranks

    @property
    def process_group(self) -> Any:
        return dist.distributed_c10d._get_default_group()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def _any_device(*_: Any, **__: Any) -> Any:
    """Stand for a decorator that skips a test without so many GPUs."""
    return lambda test: test


def _switch(engine: str, sums: str) -> None:
    """Put this engine's names into ``torch.distributed.fsdp``, and classes that start no ranks in the place of those that do."""
    if sums == "backend":
        own: Any = process_group
        own.RankOrderTransport = process_group.ProcessGroupTransport
    if engine == "ours":
        for name in NAMES:
            setattr(torch.distributed.fsdp, name, getattr(fsdp2, name))
    module: Any = common_fsdp
    module.FSDPTest = module.FSDPTestMultiThread = module.FSDPTestContinuous = Case
    module = common_distributed
    module.MultiProcContinuousTest = Case
    module.skip_if_lt_x_gpu = _any_device
    # What puts a delay on a GPU's stream: there is none here.
    torch.cpu._sleep = lambda *_: None  # type: ignore[attr-defined]
    for module in (common_fsdp, common_distributed, common_utils):
        for name in ("device_sleep", "get_cycles_per_ms"):
            if hasattr(module, name):
                setattr(module, name, lambda *_: 0)


def _load(path: Path) -> types.ModuleType:
    """Import a file of tests, for the CPU."""
    text = path.read_text().replace("torch.accelerator.current_accelerator()", 'torch.device("cpu")')
    text = re.sub(r'"(cuda|npu)(:0)?"', '"cpu"', text).replace(".cuda()", ".cpu()").replace(".npu()", ".cpu()")
    spec = importlib.util.spec_from_loader(path.stem, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Copies of the tests that were changed for a device of somebody else.
    # DistributedDataParallel of CPU modules.
    text = re.sub(r"device_ids=\[[^\]]*\]", "device_ids=None", text)
    text = re.sub(r"^(import|from) torch_npu.*$", "", text, flags=re.MULTILINE)
    vars(module).update(FSDPNPUTest=Case, skipIfUnsupportMultiNPU=_any_device, SupportedDevices=_any_device)
    sys.modules[path.stem] = module
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def _tests(module: types.ModuleType) -> Iterator[tuple[type[Case], str]]:
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, Case) and cls.__module__ == module.__name__:
            cls.world_size = Case.world_size  # type: ignore[method-assign]
            yield from ((cls, name) for name in unittest.TestLoader().getTestCaseNames(cls))


def _is_inside(cls: type[Case], name: str) -> bool:
    """Return whether the test, or a method of its class that it calls, looks at the inside of FSDP2."""
    seen, waiting = set(), [name]
    while waiting:
        method = waiting.pop()
        seen.add(method)
        # Not the docstring's words, nor decorators.
        code = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, method)))).body[0]
        assert isinstance(code, ast.FunctionDef)
        text = "\n".join(map(ast.unparse, code.body[1:] if ast.get_docstring(code) else code.body))
        if any(word in text for word in _INSIDE):
            return True
        called = re.findall(r"self\.(_\w+)", text)
        waiting += [other for other in called if other not in seen and inspect.isfunction(getattr(cls, other, None))]
    return False


def _run_rank(cls: type[Case], name: str, rank: int, folder: str) -> str:
    """Run a test as this rank; return "" or why it did not pass."""
    store = dist.FileStore(f"{folder}/store", Case.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=Case.num_ranks, timeout=timedelta(seconds=_LIMIT_S / 2)
    )
    case = cls(name)
    case.rank, case.file_name = rank, f"{folder}/store"
    torch.manual_seed(1234)
    try:
        case.setUp()
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skip: {skip}"
    except BaseException:
        return traceback.format_exc()
    return ""


def _run(cls: type[Case], name: str) -> str:
    """Run a test on forked ranks; return "" or why it did not pass on one of them."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(Case.num_ranks):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(f"{folder}/out{rank}", os.O_CREAT | os.O_WRONLY), 1)
                os.dup2(1, 2)
                Path(f"{folder}/result{rank}").write_text(_run_rank(cls, name, rank, folder))
                os._exit(0)
            ranks.append(child)
        end = time.monotonic() + _LIMIT_S
        for child in ranks:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.02)
        results = [Path(f"{folder}/result{rank}") for rank in range(Case.num_ranks)]
        said = [
            path.read_text() if path.exists() else "no result: the rank ended, or took too long" for path in results
        ]
        wrong = [text for text in said if text]
        # What one rank says first is the cause of what the others lack.
        return min(wrong, key=lambda text: ("gloo" in text or "no result" in text, text)) if wrong else ""


def main() -> None:
    """Run what the command line asks for, and print a line for each test and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="")
    parser.add_argument("--file", default="", help="part of the name of a file")
    parser.add_argument("--engine", choices=("ours", "torch"), default="ours")
    parser.add_argument(
        "--sums",
        choices=("fixed", "backend"),
        default="fixed",
        help="who sums gradients: the engine, in fp32 and in rank order as it does on CPUs, or the process group in the dtype of "
        "the wire, as on GPUs and as FSDP2 does everywhere",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=Path, help="a --json file of another run: run what passed there")
    parser.add_argument("--inside", action="store_true", help="run also what looks at the inside of FSDP2")
    parser.add_argument("-v", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    Case.num_ranks = options.ranks
    _switch(options.engine, options.sums)
    known = json.loads(options.only.read_text()) if options.only else None
    results: dict[str, str] = {}
    for path in sorted(options.folder.glob("test_*.py")):
        if options.file not in path.stem:
            continue
        for cls, name in _tests(_load(path)):
            label = f"{path.stem}::{cls.__name__}::{name}"
            if options.k not in label or (known is not None and known.get(label) != ""):
                continue
            results[label] = (
                "skip: looks at the inside of FSDP2"
                if not options.inside and _is_inside(cls, name)
                else _run(cls, name)
            )
            words = results[label].strip().splitlines()
            print(
                "passed" if not words else "SKIPPED" if words[0].startswith("skip") else "FAILED",
                label,
                *words[-1:],
                flush=True,
            )
            if options.v and words:
                print(results[label])
    passed = sum(not text for text in results.values())
    skipped = sum(text.startswith("skip") for text in results.values())
    print(f"{passed} passed, {len(results) - passed - skipped} failed, {skipped} skipped")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
