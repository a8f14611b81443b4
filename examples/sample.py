"""Continuation of a text by a trained model.

Example::

    python examples/sample.py --prompt "import os" --num-tokens 300 @runs/quickstart/flags.txt

The flags after the sampler's own are those with which the model was trained; ``@file`` reads them from a file. The model
is loaded from the checkpoint in ``--load``. One process is enough, whatever the number of ranks in training; under torchrun
the weights are sharded over its ranks.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import FullyShardedDataParallel, load_checkpoint
from megatron.core.inference.sampling import generate
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import Settings, parse_settings
from megatron.training.cli.flag_parser import FlagError
from megatron.training.launch.distributed_init import initialize_distributed, process_groups
from megatron.training.launch.gpt_config import build_gpt_model
from megatron.training.run_folder import checkpoint_path, latest_iteration


def load_model(settings: Settings, vocab_size: int) -> tuple[FullyShardedDataParallel, torch.device]:
    """Load the trained model; return it and its device.

    Raises:
        FileNotFoundError: there is no checkpoint in ``--load``.
        ValueError: the checkpoint is of another model, or the settings split the model.

    Ranks: all; blocks.
    """
    folder = settings.checkpoint.load
    if settings.grid.size("dp") < settings.grid.world_size:
        raise ValueError(
            "sampling needs the whole model, got flags that split it between ranks; leave them out: a checkpoint can be "
            "loaded whatever the split in training"
        )
    device = initialize_distributed(settings.distributed)
    iteration = settings.checkpoint.load_step
    if iteration is None and folder is not None:
        iteration = latest_iteration(Path(folder))
    if folder is None or iteration is None:
        raise FileNotFoundError(f"--load must name a folder with a checkpoint, got {folder}; train a model first")
    model = FullyShardedDataParallel(
        settings.model.transformer,
        settings.ddp,
        build_gpt_model(settings.model, vocab_size=vocab_size, device=device),
        device=device,
        pg_collection=process_groups(settings.distributed, settings.grid),
    )
    load_checkpoint(model, None, checkpoint_path(folder, iteration), load_optimizer=False)
    return model, device


def continue_text(
    settings: Settings, prompt: str, *, num_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """Return the model's continuation of the prompt, without the prompt, up to the end of a document.

    Raises:
        ValueError: the prompt has no token.

    Ranks: all; each returns the same text.
    """
    tokenizer = build_tokenizer(settings.tokenizer)
    prompt_tokens = tokenizer.tokenize(prompt)
    if not prompt_tokens:
        raise ValueError("--prompt must have at least one token, got an empty text")
    model, device = load_model(settings, tokenizer.vocab_size)
    tokens = generate(
        model,
        torch.tensor([prompt_tokens], device=device),
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
        max_context=settings.data.seq_length,
    )
    # Larger ids are padding of the vocabulary.
    drawn = [token for token in tokens[0, len(prompt_tokens) :].tolist() if token < tokenizer.vocab_size]
    if tokenizer.eod in drawn:
        drawn = drawn[: drawn.index(tokenizer.eod)]
    return tokenizer.detokenize(drawn)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    class Parser(argparse.ArgumentParser):
        def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
            return shlex.split(arg_line)

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a line break)")
    parser.add_argument("--num-tokens", type=int, default=300, help="tokens to draw at most (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0: always the most probable token (default: 0.7)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw among this many most probable tokens (default: 0, all)"
    )
    parser.add_argument("--sample-seed", type=int, default=1, help="seed of the draws (default: 1)")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print prompt and continuation; return the exit status."""
    arguments, training_flags = _parse(argv)
    try:
        text = continue_text(
            parse_settings(training_flags),
            arguments.prompt,
            num_tokens=arguments.num_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            seed=arguments.sample_seed,
        )
        if dist.get_rank() == 0:
            print(arguments.prompt + text)
    except (FlagError, OSError, ValueError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
