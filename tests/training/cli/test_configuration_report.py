"""The report of the settings in effect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron.training.arguments import parse_settings
from megatron.training.cli.configuration_report import report_configuration
from tests.support.tiny_run import TINY


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("flags", "effective"),
    [
        ("", "own "),
        ("--ckpt-format torch_dist", "torch_dist "),
        ("--ckpt-format fsdp_dtensor", "fsdp_dtensor "),
        ("--ckpt-format torch_dcp", "own "),
    ],
)
def test_the_checkpoint_format_is_the_one_that_is_written(flags: str, effective: str, alone: None) -> None:
    assert _reported("checkpoint format", flags).startswith(effective)


@pytest.mark.parametrize(
    ("flags", "effective"),
    [
        ("", "gradient reduction False, parameter gathering False, prefetch depth 0 in forward and 0 in backward"),
        (
            "--use-megatron-fsdp",
            "gradient reduction True, parameter gathering True, prefetch depth 1 in forward and 1 in backward",
        ),
        (
            "--use-megatron-fsdp --fsdp-forward-prefetch-depth 3 --fsdp-backward-prefetch-depth 0",
            "gradient reduction True, parameter gathering True, prefetch depth 3 in forward and 0 in backward",
        ),
        (
            "--use-megatron-fsdp --suggested-communication-unit-size 5000",
            "gradient reduction True, parameter gathering True, prefetch depth 1 in forward and 1 in backward, or more until "
            "5,000 elements are in flight",
        ),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            "gradient reduction True, parameter gathering False, prefetch depth 0 in forward and 0 in backward",
        ),
        (
            "--use-megatron-fsdp --no-overlap-param-gather --no-overlap-grad-reduce",
            "gradient reduction False, parameter gathering False, prefetch depth 0 in forward and 0 in backward "
            "(--no-overlap-grad-reduce, --no-overlap-param-gather)",
        ),
    ],
)
def test_the_overlap_is_the_one_in_effect(flags: str, effective: str, alone: None) -> None:
    assert _reported("overlap", flags) == effective


def _reported(what: str, flags: str) -> str:
    text = report_configuration(
        parse_settings(f"{TINY} {flags}".split(), world_size=1),
        device=torch.device("cpu"),
        model=torch.nn.Linear(2, 2),
        padded_vocab_size=128,
        vocab_size=99,
        flops_per_sample=1,
    )
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {what} ."))
    return line.partition(".. ")[2]
