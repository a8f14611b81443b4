"""Measure how fast the GPUs and the host of this machine are, for ``tools/plan.py``; takes about a minute.

    torchrun --nproc-per-node 2 tools/calibrate.py rates.json

One rank is enough; with several, collectives between them are measured too. Without GPUs it runs on the CPU, which shows that
it works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from megatron.training.launch.distributed_init import DistributedConfig, initialize_distributed
from megatron.training.planner.calibration import calibrate


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    device = initialize_distributed(DistributedConfig())
    rates = calibrate(device)
    if dist.get_rank() == 0:
        rates.save(options.output)
        for name, value in asdict(rates).items():
            print(f"{name}: {value}")
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
