"""Runs that Megatron-LM saved go on with the losses that they would have had, from each of its distributed formats."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_ranks
from tests.support.megatron_lm_folders import Backend, write_run
from tests.support.tiny_run import SHARDED, TINY, Run, train_one
from tools.checkpoint import convert

KINDS = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor", "dp_reshardable", "torch", "distrib_optim")
CONVERTED = ("converted", "back", "twice")
_RUN = (
    f"{TINY} {SHARDED} --bf16 --swiglu --num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 16 --disable-bias-linear "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --seed 7 --lr-warmup-iters 1 --min-lr 1e-4"
)
ARGS = argparse.Namespace(
    consumed_train_samples=16,
    consumed_valid_samples=0,
    seed=7,
    seq_length=16,
    attention_backend=Backend.auto,
)


def _train(root: str) -> dict[str, Run]:
    native, folder = f"{root}/native/iter_0000002", Path(root)
    runs = {"whole": train_one(_RUN.split())}
    runs["begins"] = train_one(f"{_RUN} --exit-interval 2 --save {root}/native".split())
    if dist.get_rank() == 0:
        for kind in KINDS:
            write_run(folder / kind, Path(native), kind, ARGS, gated=True, dtype=torch.bfloat16)
        local = argparse.Namespace(**vars(ARGS), transformer_impl="local")
        write_run(folder / "other order", Path(native), "dp_reshardable", local, gated=True, dtype=torch.bfloat16)
        several = argparse.Namespace(**vars(ARGS), expert_model_parallel_size=2)
        write_run(folder / "experts", Path(native), "dp_reshardable", several, gated=True, dtype=torch.bfloat16)
        flags = [*_RUN.split(), "--padded-vocab-size", "128"]
        assert convert.main([f"{root}/{KINDS[0]}", f"{root}/converted", "--", *flags]) == 0
        assert convert.main([f"{root}/native", f"{root}/back", "--to", "fsdp_dtensor"]) == 0
        assert convert.main([f"{root}/back", f"{root}/twice", "--to", "torch_dist"]) == 0
        assert convert.main([f"{root}/native", f"{root}/weights", "--weights-only"]) == 0
    dist.barrier()
    for kind in (*KINDS, *CONVERTED, "other order", "experts"):
        runs[kind] = train_one([*_RUN.split(), "--load", f"{root}/{kind}"])
    runs["weights"] = train_one(f"{_RUN} --load {root}/weights --exit-interval 1".split())
    load = f"{_RUN} --load {root}/fully_reshardable"
    runs |= {
        name: train_one(f"{load} {flags}".split())
        for name, flags in {
            "other seed": "--seed 8",
            "other schedule": "--min-lr 1e-3",
            "its schedule": "--min-lr 1e-3 --use-checkpoint-opt-param-scheduler",
            "own schedule": "--min-lr 1e-3 --override-opt-param-scheduler",
            "no optimizer": "--no-load-optim",
            "finetune": "--finetune --exit-interval 1",
            "sgd": "--optimizer sgd",
        }.items()
    }
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_ranks(2, _train, str(tmp_path_factory.mktemp("runs")))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_enter_root_the_same_losses(runs: dict[str, Run], kind: str) -> None:
    whole, resumed = runs["whole"], runs[kind]
    assert runs["begins"].error is None and resumed.error is None, resumed.error
    assert resumed.losses == {i: whole.losses[i] for i in (3, 4)}
    assert resumed.grad_norms == {i: whole.grad_norms[i] for i in (3, 4)}
    assert "weights, optimizer and schedule; training continues after iteration 2" in resumed.output
    if kind not in ("torch", "distrib_optim"):
        assert "not taken, since it has no counterpart here: rng_state" in resumed.output
    rates = [line.split("learning rate: ")[1][:12] for line in whole.output.splitlines() if "lm loss:" in line]
    assert rates[2:] == [
        line.split("learning rate: ")[1][:12] for line in resumed.output.splitlines() if "lm loss:" in line
    ]


@pytest.mark.parametrize("kind", CONVERTED)
def test_a_run_goes_on_from_a_conversion(runs: dict[str, Run], kind: str) -> None:
    whole, resumed = runs["whole"], runs[kind]
    assert resumed.error is None, resumed.error
    assert resumed.losses == {i: whole.losses[i] for i in (3, 4)}
    assert "training continues after iteration 2" in resumed.output


def test_a_conversion_of_weights_alone_begins_anew(runs: dict[str, Run]) -> None:
    assert runs["weights"].error is None and list(runs["weights"].losses) == [1]


def test_what_does_not_fit_is_refused_by_name(runs: dict[str, Run]) -> None:
    assert "seed: now 8, saved 7" in str(runs["other seed"].error or runs["other seed"].output)
    assert "min_lr: now 0.001, saved 0.0001" in str(runs["other schedule"].error or runs["other schedule"].output)
    assert "must hold optimizer state momentum_buffer" in str(runs["sgd"].error or runs["sgd"].output)


def test_buckets_of_another_order_or_split_are_refused(runs: dict[str, Run]) -> None:
    assert "other main weights where those of decoder.layers.0." in str(runs["other order"].error)
    assert "alone divide evenly, got expert_model_parallel_size 2" in str(runs["experts"].error)


def test_a_schedule_is_chosen_by_its_flags(runs: dict[str, Run]) -> None:
    whole = runs["whole"]
    assert runs["its schedule"].losses == {i: whole.losses[i] for i in (3, 4)}
    assert runs["own schedule"].losses[3] == whole.losses[3] and runs["own schedule"].losses[4] != whole.losses[4]


def test_parts_are_left_out_by_flags_and_that_is_said(runs: dict[str, Run]) -> None:
    whole, fresh, tuned = runs["whole"], runs["no optimizer"], runs["finetune"]
    assert fresh.error is None and fresh.losses[4] != whole.losses[4]
    assert "weights; the optimizer and its schedule start afresh; training continues after iteration 2" in fresh.output
    assert tuned.error is None and list(tuned.losses) == [1] and "training at iteration 0" in tuned.output
