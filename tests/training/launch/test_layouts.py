"""The same command line with other degrees of parallelism prints the same losses, gradient norms and sizes."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.conversations import conversation, write_conversations, write_sft
from tests.support.rank_processes import write_corpus
from tests.support.tiny_run import SHARDED, Run, train_all

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --log-interval 1 --eval-iters 1 --num-workers 0 --distributed-backend gloo "
    f"{SHARDED} "
)
TP, CP, PP = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2",
)
EXPERTS = (
    "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-layer-freq [0,1] "
    "--moe-z-loss-coeff 0.001 "
    "--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 8"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOCK, BLEND = "--mock-data", "--data-path 0.3 {folder}/corpus 0.7 {folder}/corpus --split 80,10,10"
TALK = "--seq-length 64 --max-position-embeddings 64 {sft}"
HYBRID = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"

# name: (ranks, flags, flags of the run on one rank that must print the same)
LAYOUTS: dict[str, tuple[int, str, str]] = {
    "tensor": (2, f"{TP} --save {{folder}} --exit-interval 2 --untie-embeddings-and-output-weights", "untied"),
    "pipeline, from a checkpoint of tensor parallelism": (
        2,
        f"{PP} --load {{folder}} --untie-embeddings-and-output-weights",
        "untied",
    ),
    "pipeline with tied embeddings": (2, PP, "dense"),
    "context": (2, f"{CP} --cp-comm-type all_gather p2p", "dense"),
    "context, of a blend": (2, f"{CP} {BLEND}", "blend"),
    "conversations": (2, f"{TALK} --save {{folder}}/talk --save-interval 2", "conversations"),
    "conversations, resumed": (2, f"{TALK} --load {{folder}}/talk --ckpt-step 2", "conversations"),
    "conversations, tensor": (2, f"{TALK} {TP}", "conversations"),
    "conversations, pipeline": (2, f"{TALK} {PP}", "conversations"),
    "experts": (2, f"{EXPERTS} --expert-model-parallel-size 2", "experts"),
    "experts of the second stage, recomputed": (2, f"{EXPERTS} {PP} {RECOMPUTED}", "experts"),
    "experts and parts of sequences": (2, f"{EXPERTS} {CP}", "experts"),
    "tensor, pipeline": (4, f"{TP} {PP}", "dense"),
    "hybrid, with context": (4, f"{CP} {HYBRID} --calculate-per-token-loss", "dense"),
    "experts on tensor-parallel ranks": (
        4,
        f"{EXPERTS} {TP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --create-all-gather-group",
        "experts",
    ),
}
REFERENCES = {
    "dense": "",
    "blend": BLEND,
    "untied": "--untie-embeddings-and-output-weights",
    "experts": EXPERTS,
    "conversations": TALK,
}


# Runs on one rank that are refused, with the message.
REFUSED = {
    f"{TALK} --data-path none.jsonl": "conversations must be in a file of JSON lines, got none.jsonl, where there is none",
    f"{TALK} --data-path {{folder}}/bad.jsonl": "bad.jsonl, line 2: a line must be a JSON object, got text that is none",
    f"{TALK} --data-path {{talk}} {{talk}} --train-iters 20": "the data must have 160 samples for training, got 64; give weights",
}


@cache
def runs_on(ranks: int) -> dict[str, Run]:
    """All runs on so many ranks, one after the other in one launch."""
    added = {name: flags for name, (size, flags, _) in LAYOUTS.items() if size == ranks}
    if ranks == 1:
        added = REFERENCES | {flags: flags for flags in REFUSED}
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"))
        names = {"folder": folder, "sft": write_sft(Path(folder)), "talk": f"{folder}/talk.jsonl"}
        write_conversations(Path(folder, "bad.jsonl"), [conversation("a", "b"), "{"])
        flags = {
            name: f"{'' if BLEND in own or TALK in own else MOCK} {own}".format(**names) for name, own in added.items()
        }
        return train_all(ranks, flags, base=BASE)


def evaluations(run: Run) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss value: (\S+)", run.output)]


def num_parameters(run: Run) -> list[str]:
    return re.findall(r"parameters \.+ (\S+) in all", run.output)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_printed_is_what_one_rank_prints(name: str) -> None:
    """fp32 sums in another order differ by 1e-7 at each step; AdamW's normalisation carries some of that on."""
    ranks, flags, reference = LAYOUTS[name]
    expected, run = runs_on(1)[reference], runs_on(ranks)[name]
    assert expected.error is None and run.error is None
    iterations = [1, 2] if "--exit-interval" in flags else [3] if "--load" in flags else [1, 2, 3]
    assert run.losses == pytest.approx({i: expected.losses[i] for i in iterations}, rel=1e-5)
    assert run.grad_norms == pytest.approx({i: expected.grad_norms[i] for i in iterations}, rel=1e-5)
    for i in iterations:
        assert run.auxiliary[i] == pytest.approx(expected.auxiliary[i], rel=1e-5)
        # About what uniform scores over 4 experts give, 1 and log(4) squared: a layer or microbatch too many would be seen.
        about = {"seq_load_balancing_loss": 1.0, "z_loss": 1.92} if reference == "experts" else {}
        assert run.auxiliary[i] == pytest.approx(about, rel=0.3)
    if iterations[-1] == 3:
        assert evaluations(run) == pytest.approx(evaluations(expected), rel=1e-5) and len(evaluations(run)) == 2
    assert num_parameters(run) == num_parameters(expected) != []


def test_conversations_go_on_to_the_last_bit() -> None:
    whole, resumed = runs_on(2)["conversations"], runs_on(2)["conversations, resumed"]
    assert (resumed.losses[3], resumed.grad_norms[3]) == (whole.losses[3], whole.grad_norms[3])
    assert evaluations(resumed) == evaluations(whole)


@pytest.mark.parametrize("flags", REFUSED)
def test_data_that_cannot_be_used_are_refused_on_one_rank_too(flags: str) -> None:
    """By one message, not by a traceback."""
    error = runs_on(1)[flags].error
    assert error is not None and error.startswith("StartRefusedError") and REFUSED[flags] in error
