"""Pretraining of a GPT model: ``torchrun --nproc-per-node N pretrain_gpt.py <flags>``; ``--help`` lists the flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.training.arguments import Settings, parse_settings
from megatron.training.checkpointing import print_rank_0
from megatron.training.cli.flag_parser import FlagError
from megatron.training.cli.words_of_flags import in_few_lines
from megatron.training.data.datasets import Datasets, build_gpt_datasets
from megatron.training.data.documents import documents_of
from megatron.training.launch.failures import refuse, run_script
from megatron.training.launch.gpt_config import build_gpt_model, why_local_layers
from megatron.training.launch.packages import missing_packages
from megatron.training.launch.pretrain import pretrain
from megatron.training.launch.refusals import StartRefusedError
from megatron.training.loop.stage_forward import Batch, has_output_layer


def model_provider(
    settings: Settings,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection,
    vp_stage: int | None = None,
) -> torch.nn.Module:
    """Build this rank's part of the GPT model, not yet sharded; say where it has other layers than were asked for."""
    if not vp_stage and (reason := why_local_layers(settings.model, device.type)) is not None:
        print_rank_0(
            f" transformer-engine is not used ({reason}): layers are the local ones (--transformer-impl local)"
        )
    return build_gpt_model(
        settings.model, vocab_size=vocab_size, device=device, pg_collection=pg_collection, vp_stage=vp_stage
    )


def datasets_provider(settings: Settings, tokenizer: MegatronTokenizerBase, sizes: Sequence[int | None]) -> Datasets:
    """Build the GPT datasets of training, validation and test."""
    return build_gpt_datasets(settings.data, tokenizer, sizes)


def forward_step(batch: Batch, model: torch.nn.Module) -> tuple[Tensor, Tensor] | Tensor:
    """Return the sum [] of the losses of the unmasked tokens and their number []; on earlier pipeline stages hidden states."""
    mask, documents = batch["loss_mask"], documents_of(batch)
    more = {} if documents is None else {"packed_seq_params": documents}
    losses: Tensor = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask, **more)
    if not has_output_layer(model):
        return losses
    return (losses.float() * mask).sum(), mask.sum()


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; return the exit status, 2 if the run is refused before it starts."""
    try:
        settings = parse_settings(argv)
    except FlagError as error:
        refuse(in_few_lines(str(error).splitlines()), _report)
        return 2
    if missing := missing_packages(settings, "cpu" if settings.distributed.backend == "gloo" else "cuda"):
        refuse(in_few_lines(list(missing.values())), _report)
        return 2
    try:
        pretrain(
            settings, model_provider=model_provider, datasets_provider=datasets_provider, forward_step=forward_step
        )
    except StartRefusedError as error:
        error.report_once(_report)
        return 2
    return 0


def _report(text: str) -> None:
    print("\n".join(f"pretrain_gpt.py: error: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main, sys.argv[1:])
