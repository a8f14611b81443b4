"""Training with state or activations in the host's memory, from the command line; tests/parity has every split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny_run import SHARDED, TINY, Run, train_all

_BF16 = f"{SHARDED} --bf16 --use-precision-aware-optimizer --attention-dropout 0 --hidden-dropout 0"
_FP32 = f"{SHARDED} --attention-dropout 0 --hidden-dropout 0"
_HOST = "--optimizer-cpu-offload"
_MODULES = (
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules attn_norm qkv_linear core_attn "
    "attn_proj mlp_norm expert_fc1 moe_act"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root: Path = tmp_path_factory.mktemp("offload")
    half = f"{_HOST} --optimizer-offload-fraction 0.5"
    flags = {
        "on the device": _BF16,
        "on the host": f"{_BF16} {_HOST}",
        "half, overlapping": f"{_BF16} {half} --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads",
        "fp32": f"{_FP32} {_HOST}",
        "fp32 on the device": _FP32,
        "modules' activations": f"{_FP32} {_MODULES}",
        "host, halfway": f"{_BF16} {_HOST} --exit-interval 2 --save {root}/host",
        "from host to host": f"{_BF16} {_HOST} --load {root}/host",
        "from host to device": f"{_BF16} --load {root}/host",
        "device, halfway": f"{_BF16} --exit-interval 2 --save {root}/device",
        "from device to host": f"{_BF16} {half} --load {root}/device",
    }
    return train_all(2, flags, base=TINY)


@pytest.mark.parametrize("name", ["on the host", "half, overlapping"])
def test_losses_are_those_of_state_on_the_device(runs: dict[str, Run], name: str) -> None:
    """Up to fp32 rounding in the update, which turns some bf16 weights to the next number."""
    wanted, run = runs["on the device"], runs[name]
    assert run.error is None, run.error
    assert run.losses == pytest.approx(wanted.losses, rel=2e-3) and len(run.losses) == 4
    assert run.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-2)


def test_in_fp32_they_agree_to_its_rounding(runs: dict[str, Run]) -> None:
    assert runs["fp32"].error is None
    assert runs["fp32"].losses == pytest.approx(runs["fp32 on the device"].losses, rel=1e-5)


def test_a_run_goes_on_from_either_memory(runs: dict[str, Run]) -> None:
    whole = runs["on the host"]
    resumed = runs["from host to host"]
    assert resumed.error is None and resumed.losses == {3: whole.losses[3], 4: whole.losses[4]}, "bit by bit"
    assert resumed.grad_norms == {3: whole.grad_norms[3], 4: whole.grad_norms[4]}
    for name in ("from host to device", "from device to host"):
        run = runs[name]
        assert run.error is None, run.error
        assert run.losses == pytest.approx({3: whole.losses[3], 4: whole.losses[4]}, rel=2e-3)


def test_offloaded_activations_change_no_bit(runs: dict[str, Run]) -> None:
    run, wanted = runs["modules' activations"], runs["fp32 on the device"]
    assert run.error is None, run.error
    assert run.losses == wanted.losses and run.grad_norms == wanted.grad_norms and len(run.losses) == 4


def test_the_report_has_the_hosts_memory(runs: dict[str, Run]) -> None:
    assert re.search(r"host: optimizer state +0\.\d+ GiB  with main weights in fp32", runs["on the host"].output)
    assert "host: optimizer state" not in runs["on the device"].output
