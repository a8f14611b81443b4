"""What one rank is given differently: each difference is named before anything is allocated.

Run all with ``python -m tests.training.launch.one_rank_differences``.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.launch import run_ranks
from tests.support.rank_processes import write_corpus
from tests.support.tiny_run import SHARDED, TINY


class Difference(NamedTuple):
    """What rank 1 is given besides, and what the message must say."""

    flags: str
    names: str
    base: str = ""
    """Given to both ranks."""


_BASE = f"{TINY} {SHARDED} --clip-grad 1.0"
_LR = "--lr-decay-style cosine --lr-decay-iters 4"
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
_ROPE = "--position-embedding-type rope"

DIFFERENCES = (
    Difference("--num-layers 4", "model.transformer.num_layers"),
    Difference("--hidden-size 64", "model.transformer.hidden_size"),
    Difference("--ffn-hidden-size 96", "model.transformer.ffn_hidden_size"),
    Difference("--num-attention-heads 2", "model.transformer.num_attention_heads"),
    Difference("--group-query-attention --num-query-groups 2", "model.transformer.num_query_groups"),
    Difference("--kv-channels 16", "model.transformer.kv_channels"),
    Difference("--swiglu", "model.transformer.gated_linear_unit"),
    Difference("--squared-relu", "model.transformer.activation_func"),
    Difference("--normalization RMSNorm", "model.transformer.normalization"),
    Difference("--norm-epsilon 1e-6", "model.transformer.layernorm_epsilon"),
    Difference("--apply-layernorm-1p", "model.transformer.layernorm_zero_centered_gamma"),
    Difference("--disable-bias-linear", "model.transformer.add_bias_linear"),
    Difference("--add-qkv-bias", "model.transformer.add_qkv_bias", "--disable-bias-linear"),
    Difference("--qk-layernorm", "model.transformer.qk_layernorm"),
    Difference("--attention-dropout 0.2", "model.transformer.attention_dropout"),
    Difference("--hidden-dropout 0.2", "model.transformer.hidden_dropout"),
    Difference("--init-method-std 0.01", "model.transformer.init_method_std"),
    Difference("--bf16", "model.transformer.params_dtype"),
    Difference("--recompute-granularity selective", "model.transformer.recompute_granularity"),
    Difference("--calculate-per-token-loss", "model.transformer.calculate_per_token_loss"),
    Difference("--max-position-embeddings 32", "model.max_position_embeddings"),
    Difference(_ROPE, "model.position_embedding_type"),
    Difference("--rotary-base 500000", "model.rotary_base", _ROPE),
    Difference("--rotary-percent 0.5", "model.rotary_percent", _ROPE),
    Difference("--untie-embeddings-and-output-weights", "model.share_embeddings_and_output_weights"),
    Difference("--make-vocab-size-divisible-by 64", "model.make_vocab_size_divisible_by"),
    Difference("--init-model-with-meta-device", "model.init_on_meta_device"),
    Difference("--moe-router-topk 3", "model.transformer.moe_router_topk", _MOE),
    Difference("--moe-aux-loss-coeff 0.1", "model.transformer.moe_aux_loss_coeff", _MOE),
    Difference("--tensor-model-parallel-size 2", "grid.tensor_model_parallel_size"),
    Difference("--micro-batch-size 4", "batch.micro_batch_size"),
    Difference("--global-batch-size 16", "batch.global_batch_size"),
    Difference("--seq-length 8", "data.seq_length"),
    Difference("--vocab-size 90", "tokenizer.vocab_size"),
    Difference("--num-workers 1", "data.num_workers"),
    Difference("--eod-mask-loss", "data.eod_mask_loss"),
    Difference("--seed 7", "loop.seed"),
    Difference("--train-iters 5", "loop.train_iters"),
    Difference("--eval-iters 1", "loop.eval_iters"),
    Difference("--eval-interval 7", "loop.eval_interval"),
    Difference("--exit-interval 2", "loop.exit_interval"),
    Difference("--exit-signal-handler", "loop.exit_signal_handler", "--save unused"),
    Difference("--no-check-for-nan-in-loss-and-grad", "loop.check_finite"),
    Difference("--lr 2e-2", "optimizer.lr"),
    Difference("--min-lr 1e-3", "optimizer.min_lr"),
    Difference("--weight-decay 0.5", "optimizer.weight_decay"),
    Difference("--adam-beta1 0.5", "optimizer.adam_beta1"),
    Difference("--adam-eps 1e-6", "optimizer.adam_eps"),
    Difference("--clip-grad 0.5", "optimizer.clip_grad"),
    Difference("--optimizer sgd", "optimizer.optimizer"),
    Difference("--lr-warmup-iters 2", "schedule.warmup_samples", _LR),
    Difference("--lr-decay-iters 3", "schedule.decay_samples", _LR),
    Difference("--lr-decay-style linear", "schedule.decay_style", _LR),
    Difference("--save-interval 2", "checkpoint.save_interval", "--save unused"),
    Difference("--async-save", "checkpoint.async_save", "--save unused"),
    Difference("--load elsewhere", "checkpoint.load"),
    Difference("--log-interval 2", "logging.log_interval"),
    Difference("--distributed-timeout-minutes 3", "distributed.timeout_minutes"),
    Difference("--create-all-gather-group", "distributed.create_all_gather_group"),
    Difference("--data-parallel-sharding-strategy optim", "ddp.data_parallel_sharding_strategy"),
    Difference("--overlap-grad-reduce", "ddp.overlap_grad_reduce"),
    Difference("--fsdp-forward-prefetch-depth 2", "ddp.fsdp_forward_prefetch_depth", "--overlap-param-gather"),
    Difference("--fsdp-transport peer_copy", "ddp.fsdp_transport"),
    Difference("--grad-reduce-in-bf16", "ddp.megatron_fsdp_grad_comm_dtype", "--bf16"),
    Difference("--no-such-flag", "rank 1 refuses its command line"),
    Difference("--micro-batch-size 3", "rank 1 refuses its command line"),
)


def said_to(base: str, flags: str) -> list[tuple[int, str]]:
    """Start two ranks, the second with ``flags`` besides; return the exit status of ``main`` of each and what it printed."""
    return [results[0] for results in run_ranks(2, _start_all, [(base, flags)])]


def said_to_all() -> list[list[tuple[int, str]]]:
    """Return [2] for each rank [D] its status and words for each difference; one launch of ranks."""
    return run_ranks(2, _start_all, [(f"{_BASE} {d.base}", d.flags) for d in DIFFERENCES])


def faults_of(statuses: list[list[tuple[int, str]]]) -> dict[str, str]:
    """Return what is wrong by difference: a rank that went on, or a message that does not name the setting."""
    faults = {}
    for difference, *said in zip(DIFFERENCES, *statuses, strict=True):
        words = said[0][1]
        if [status for status, _ in said] != [2, 2] or difference.names not in words:
            faults[difference.flags] = f"must end with status 2 and name {difference.names}, got {said}"
        elif "rank 1" not in words or len(words.splitlines()) > 12:
            faults[difference.flags] = f"must name rank 1 in a few lines, got {words}"
    return faults


def _start_all(lines: list[tuple[str, str]]) -> list[tuple[int, str]]:
    return [_start(f"{base} {flags}" if dist.get_rank() == 1 else base) for base, flags in lines]


def _start(line: str) -> tuple[int, str]:
    import pretrain_gpt

    def allocates(*_: object, **__: object) -> None:
        raise AssertionError("ranks must compare their settings before anything is allocated")

    printed = io.StringIO()
    launch = sys.modules["megatron.training.launch.pretrain"]
    with contextlib.redirect_stderr(printed), mock.patch.object(launch, "set_up", allocates):
        status = pretrain_gpt.main(line.split())
    return status, printed.getvalue()


def differing_corpora() -> list[tuple[int, str]]:
    """Start two ranks whose corpora have other tokens under the same name and of the same size."""
    with tempfile.TemporaryDirectory() as folder:
        for rank, token in enumerate((7, 8)):
            Path(folder, str(rank)).mkdir()
            flags = write_corpus(Path(folder, str(rank), "corpus"), bad_token=token)
        base = _BASE.replace("--mock-data", "") + " " + flags.replace(f"{folder}/1", f"{folder}/0")
        return said_to(base, f"--data-path 1.0 {folder}/1/corpus")


def differing_torch() -> list[tuple[int, str]]:
    """Start two ranks, the second with another version of torch."""
    return [results[0] for results in run_ranks(2, _start_with_other_torch)]


def _start_with_other_torch() -> list[tuple[int, str]]:
    version = "2.11.0" if dist.get_rank() == 1 else torch.__version__
    with mock.patch.object(torch, "__version__", version):
        return [_start(_BASE)]


if __name__ == "__main__":
    found = faults_of(said_to_all())
    for flags, fault in found.items():
        print(f"{flags}: {fault}")
    print(f"{len(DIFFERENCES)} one-rank differences of the command line, {len(found)} not named")
    sys.exit(1 if found else 0)
