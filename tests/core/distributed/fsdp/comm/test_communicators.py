"""Process groups for all-gathers end without warnings of Python and without output of the libraries on stderr."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]

_PROGRAM = """
import sys
from dataclasses import replace
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection, create_all_gather_groups
from megatron.core.transformer.transformer_config import TransformerConfig

rank, world, store, backend, transport = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
dense, expert = create_all_gather_groups(timeout=timedelta(seconds=60))
assert expert is None and dense is not None
groups = replace(ProcessGroupCollection.data_parallel(), dp_cp_ag=dense)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))).to(device, torch.bfloat16)
config = DistributedDataParallelConfig(
    use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", overlap_param_gather=True,
    overlap_grad_reduce=True, fsdp_transport=transport,
)
settings = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
try:
    model = FullyShardedDataParallel(settings, config, net, ["Sequential"], pg_collection=groups)
except ValueError as error:
    if "cannot serve" not in str(error):
        raise
    print(error)
    dist.destroy_process_group()
    sys.exit(77)
for group in model.parameter_groups:
    (transport,) = group.group_mesh.axes
    assert getattr(transport, "gather_group", dense) is dense
optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    model(torch.ones(2, 64, device=device, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.start_param_sync()
model.synchronize_param_gather()
if device.type == "cuda":
    torch.cuda.synchronize()
del model, net, optimizer, group, transport
dist.barrier(device_ids=[rank] if device.type == "cuda" else None)  # no rank leaves while another still works
del groups, dense
dist.destroy_process_group()
"""


def _run(backend: str, transport: str, store: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PROGRAM, str(rank), "2", str(store), backend, transport],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=200) for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    if codes == [77, 77]:
        pytest.skip(texts[0][0])
    assert codes == [0, 0], texts
    for _, errors in texts:
        assert not re.search(r"warn|leak|not been destroyed|exception|error", errors, flags=re.IGNORECASE), errors


@pytest.mark.parametrize("transport", ["nccl", "peer_copy"])
def test_groups_end_without_a_word_on_the_cpu(transport: str, tmp_path: Path) -> None:
    _run("gloo", transport, tmp_path / "store")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["nccl", "peer_copy", "symm"])
def test_groups_and_pools_end_without_a_word_on_gpus(transport: str, tmp_path: Path) -> None:
    """Symmetric memory is deregistered before its communicator goes."""
    _run("nccl", transport, tmp_path / "store")
