"""fp16, and state and activations in the host's memory, under every strategy and split: four ranks beside the plain run."""

from __future__ import annotations

import pytest

from tests.support.tiny_run import TINY, Run, train_all

pytestmark = pytest.mark.matrix

_BASE = f"{TINY} --attention-dropout 0 --hidden-dropout 0 --swiglu --disable-bias-linear"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.1 --micro-batch-size 2"
_HYBRID = "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy optim_grads_params"
LAYOUTS = {
    "no_shard": "--data-parallel-sharding-strategy no_shard",
    "optim": "--data-parallel-sharding-strategy optim",
    "optim_grads": "--data-parallel-sharding-strategy optim_grads",
    "optim_grads_params": "--data-parallel-sharding-strategy optim_grads_params",
    "hsdp": f"{_HYBRID} --outer-dp-sharding-strategy no_shard",
    "hfsdp": f"{_HYBRID} --outer-dp-sharding-strategy optim",
    "tp2+sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "tp2+pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "ep2": f"--expert-model-parallel-size 2 {_EXPERTS}",
    "ep4": f"--expert-model-parallel-size 4 {_EXPERTS}",
}
_IN_CI = ("optim_grads_params", "hfsdp", "tp2+pp2", "ep2")
_ALL_MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"
WAYS = {
    "fp16": "--fp16 --loss-scale 2048",
    "fp16, grads in fp32": "--fp16 --loss-scale 2048 --accumulate-allreduce-grads-in-fp32",
    "fp16, overflowing": "--fp16 --initial-loss-scale 1073741824 --hysteresis 1",
    "state on the host": "--optimizer-cpu-offload --optimizer-offload-fraction 0.7 --overlap-cpu-optimizer-d2h-h2d",
    "activations on the host": (
        f"--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules {_ALL_MODULES}"
    ),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Run]:
    """All layouts that this run of the tests asks for, in one launch."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in items if not item.get_closest_marker("skip")]  # type: ignore[attr-defined]
    flags = {name: f"--use-megatron-fsdp {LAYOUTS[name]}" for name in asked}
    cells = {f"{name}, {way}": f"{flags[name]} {added}" for name in flags for way, added in WAYS.items()}
    return train_all(4, flags | cells, base=_BASE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _IN_CI else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_a_layout_trains_alike_in_every_way(runs: dict[str, Run], name: str) -> None:
    plain = runs[name]
    assert plain.error is None, plain.error
    for way in WAYS:
        run = runs[f"{name}, {way}"]
        assert run.error is None, (way, run.error)
        if way == "fp16, overflowing":
            assert run.output.count("number of skipped iterations:   1") == 4 and run.losses == {}
        elif way.startswith("fp16"):
            assert run.losses == pytest.approx(plain.losses, rel=2e-3), way
            assert run.grad_norms == pytest.approx(plain.grad_norms, rel=2e-2), way
        elif way == "state on the host":
            assert run.losses == pytest.approx(plain.losses, rel=2e-5), way
        else:
            assert run.losses == plain.losses and run.grad_norms == plain.grad_norms, way
