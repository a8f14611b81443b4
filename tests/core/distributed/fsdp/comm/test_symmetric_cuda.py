"""NCCL's symmetric memory on GPUs: which kernels run, when memory is registered, and what "auto" chooses."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import fastest_transport, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.comm.choose import TRANSPORTS, SharedTransports, transport_problem
from megatron.core.process_groups_config import create_all_gather_groups
from tests.support.launch import run_ranks

pytestmark = pytest.mark.gpu(2, own_devices=True)

# 8 MiB a unit in bf16: a few MiB are where symmetric kernels gain most.
WIDTH, NUM_UNITS = 2048, 4


class Trainer:
    """A net of equal units that takes the same steps whatever moves its bytes."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_UNITS))
        self.net = nn.Sequential(*layers)
        for unit in (*self.net, self.net):
            fully_shard(unit, **options)
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.net.parameters(), lr=2e-3))
        self.inputs = torch.randn(
            16, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(dist.get_rank())
        )

    @property
    def transport(self) -> Any:
        return self.net[0].parameter_groups[0].group_mesh.axes[0]  # type: ignore[index]

    def step(self) -> torch.Tensor:
        loss = self.net(self.inputs.bfloat16()).float().square().sum() / len(self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, num_steps: int) -> list[float]:
        return torch.stack([self.step() for _ in range(num_steps)]).tolist()


def _collectives(trainer: Trainer) -> list[str]:
    """The names of NCCL's kernels in two steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        trainer.losses(2)
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.name.startswith("nccl") and ("AllGather" in event.name or "ReduceScatter" in event.name)
    ]


def _kernels() -> None:
    losses, found = {}, {}
    for use_symm_mem in (False, True):
        trainer = Trainer(use_symm_mem=use_symm_mem)
        assert trainer.transport.name == ("symm" if use_symm_mem else "nccl")
        losses[use_symm_mem] = trainer.losses(6)
        found[use_symm_mem] = _collectives(trainer)
        del trainer
    # The sum of two ranks' gradients has one order.
    assert losses[True] == losses[False] and losses[True][-1] < losses[True][0]
    for use_symm_mem, names in found.items():
        assert sum("AllGather" in name for name in names) == 2 * (2 * NUM_UNITS - 1), names
        assert sum("ReduceScatter" in name for name in names) == 2 * NUM_UNITS, names
        assert all(name.startswith("ncclSymk") is use_symm_mem for name in names), names


def test_each_collective_has_a_symmetric_kernel_where_it_is_asked_for_and_none_elsewhere() -> None:
    run_ranks(2, _kernels, backend="nccl")


def _first_step() -> None:
    """The profile has two steps: the one without a plan, and the first with one."""
    expected = Trainer().losses(2)
    trainer = Trainer(use_symm_mem=True)
    names = _collectives(trainer)
    assert sum("ReduceScatter" in name for name in names) == 2 * NUM_UNITS, names
    # Between the steps ranks exchange their records, as objects: their sizes, then the bytes. All else is of weights and gradients.
    plain = [name for name in names if not name.startswith("ncclSymk")]
    assert len(plain) == 2 and all("AllGather" in name for name in plain), names
    assert sum("AllGather" in name for name in names) == 2 + 2 * NUM_UNITS + 2 * NUM_UNITS - 1, names
    assert not trainer.transport._staging, "the plan's arenas took its place"
    assert Trainer(use_symm_mem=True).losses(2) == expected


def test_symmetric_kernels_run_from_the_first_step_on() -> None:
    run_ranks(2, _first_step, backend="nccl")


def _two_communicators() -> None:
    settings = {"dp_cp": {"max_ctas": 8, "is_high_priority_stream": True}}
    gathers, _ = create_all_gather_groups(nccl_comm_cfgs=settings)
    with pytest.raises(ValueError, match="must name settings of NCCL's communicators, got 'max_cats'"):
        create_all_gather_groups(nccl_comm_cfgs={"dp_cp": {"max_cats": 8}})
    trainer = Trainer(use_symm_mem=True, fsdp_group_ag=gathers)
    losses = trainer.losses(6)
    names = _collectives(trainer)
    assert names and all(name.startswith("ncclSymk") for name in names), "memory is registered with both"
    assert losses == Trainer().losses(6)


def test_buffers_are_registered_with_the_group_for_gathers_too() -> None:
    run_ranks(2, _two_communicators, backend="nccl")


def _life() -> None:
    trainer = Trainer(use_symm_mem=True)
    trainer.losses(4)
    registrations = list(trainer.transport._windows.values())
    assert len(registrations) >= 3, "shards, and an arena each for weights and gradients"
    del trainer
    assert not any(each.alive for each in registrations), "all went with the model"
    expected = Trainer().losses(8)
    trainer = Trainer(use_symm_mem=True)
    losses = trainer.losses(4)
    trainer.transport.close()
    assert not trainer.transport._windows
    assert losses + trainer.losses(4) == expected, "what is not registered any more is moved by other kernels"


def test_memory_is_registered_as_long_as_it_is_there() -> None:
    run_ranks(2, _life, backend="nccl")


_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from tests.core.distributed.fsdp.comm.test_symmetric_cuda import Trainer
from megatron.core.process_groups_config import create_all_gather_groups

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
gathers, _ = create_all_gather_groups()
trainer = Trainer(transport=sys.argv[1], fsdp_group_ag=gathers)
trainer.losses(4)
if sys.argv[2] == "deleted":
    del trainer
else:
    trainer.transport.close()
dist.destroy_process_group()
print("ended well", flush=True)
"""


@pytest.mark.parametrize("end", ["deleted", "closed"])
@pytest.mark.parametrize("transport", ["nccl", "symm"])
def test_groups_are_destroyed_without_a_warning(transport: str, end: str, tmp_path: Path) -> None:
    """Whose warnings: Python's, PyTorch's or NCCL's, with the model deleted or closed."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "PYTHONPATH": os.getcwd()}  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(script), transport, end], env=environment, capture_output=True, text=True, timeout=240
    )
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0 and ended.stdout.count("ended well") == 2, told
    warnings = [line for line in told.splitlines() if re.search(r"\[W\d{3}|NCCL WARN|Warning:", line)]
    # A machine may lack a network or a tool, and have that said; here it is about groups and what is registered.
    ours = [line for line in warnings if re.search("group|regist|pool|window|leak|symm", line, re.IGNORECASE)]
    assert not ours, "\n".join(ours)


def _refused() -> None:
    for name, value, message in (
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable segments cannot be registered"),
        ("NCCL_WIN_ENABLE", "0", "cannot register windows with NCCL_WIN_ENABLE=0"),
    ):
        # On one rank alone: the others say the same.
        if dist.get_rank() == 1:
            os.environ[name] = value
        with pytest.raises(ValueError, match=rf"transport='symm' cannot serve ranks \[0, 1\] on cuda: .*{message}"):
            fully_shard(nn.Linear(2, 2, device="cuda"), use_symm_mem=True)
        os.environ.pop(name, None)


def test_settings_that_rule_it_out_on_one_rank_are_refused_on_all() -> None:
    run_ranks(2, _refused, backend="nccl")


def _auto() -> str:
    mesh, group = init_device_mesh("cuda", (2,)), dist.group.WORLD
    device = torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    seconds: list[float] = []
    measure = fastest_transport.measure

    def timed(*arguments: Any) -> Any:
        result = measure(*arguments)
        assert not result[1], f"none of those that can serve fails: {result[1]}"
        seconds.append(result[-1])
        return result

    with patch.object(fastest_transport, "measure", timed), redirect_stdout(io.StringIO()) as printed:
        arguments = "auto", group, group, device, fastest_transport.fastest_transport
        kind, again = (SharedTransports.of(mesh).get(*arguments).name for _ in range(2))
    # Two seconds when the devices are this test's alone, which they need not be. On one device, NCCL goes over sockets.
    limit_s = 10 if torch.cuda.device_count() > 1 else 60
    assert kind == again and len(seconds) <= 1 and all(each < limit_s for each in seconds), seconds
    line = printed.getvalue()
    assert line.count("\n") == (1 if dist.get_rank() == 0 else 0)
    assert dist.get_rank() or line.startswith(f"fsdp transport: {kind} between 2 ranks; "), line
    trainer = Trainer(mesh=mesh, transport="auto")
    assert trainer.transport.name == kind
    # Peer copy does not round the sum to bf16 before it is scaled.
    torch.testing.assert_close(trainer.losses(4), Trainer(transport="nccl").losses(4), rtol=1e-2, atol=0)
    print(line, end="")
    return kind


@pytest.mark.gpu(1)
def test_auto_chooses_alike_and_soon() -> None:
    kinds = run_ranks(2, _auto, backend="nccl")
    assert len(set(kinds)) == 1


def _figures() -> list[fastest_transport.Figures]:
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    kinds = [kind for kind in TRANSPORTS if transport_problem(kind, group, device) is None]
    figures, failed, sizes, _ = fastest_transport.measure(kinds, group, group, device, [32 * 2**20])
    assert set(figures) == set(kinds) and not failed and sizes == [32 * 2**20]
    for each in figures.values():
        # 32 MiB take more than 10 us on any link and less than a second, and GEMMs are never slowed tenfold: on a device of
        # their own.
        assert 0.01 < each.gather_ms[0] < 1000 and 0.01 < each.reduce_ms[0] < 1000 and each.gemm_factor >= 1
        assert each.gemm_factor < 10 or torch.cuda.device_count() == 1
    return list(figures.values())


@pytest.mark.gpu(1)
def test_ranks_have_the_same_figures() -> None:
    first, second = run_ranks(2, _figures, backend="nccl")
    assert first == second
