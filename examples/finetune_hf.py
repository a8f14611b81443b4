"""Fine-tune a small Hugging Face model on real text, all weights and with LoRA, save it, and sample with plain transformers.

Example::

    torchrun --nproc-per-node 2 examples/finetune_hf.py --output-folder runs/finetune

needs ``pip install 'transformers>=5.20' 'peft>=0.20'``. The model is a Llama that is made from its config; ``--model`` names a folder of
another one. The text are the sources of the Python standard library, byte by byte. A minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

from examples.stdlib_corpus import is_held_out, read_modules
from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained, load_pretrained, save_pretrained

SPECIAL_TOKENS = 3
"""Ids before those of bytes in ByT5's vocabulary."""


def read_text(max_nbytes: int, *, held_out: bool) -> torch.Tensor:
    """Return ids of the first bytes of the standard library's modules, of those for training or of the others."""
    found = bytearray()
    for name, text in read_modules(Path(sysconfig.get_path("stdlib"))):
        if is_held_out(name) == held_out:
            found += text.encode()
        if len(found) >= max_nbytes:
            break
    return torch.frombuffer(found[:max_nbytes], dtype=torch.uint8).long() + SPECIAL_TOKENS


def batches(text: torch.Tensor, *, num_samples: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield [num_samples, length] ids from random places, this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    while True:
        starts = torch.randint(len(text) - length, (num_samples,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts.tolist()])


def make_base(folder: Path) -> None:
    """Save an untrained model with plain transformers, and its tokenizer. Ranks: one."""
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=125).save_pretrained(folder)


def load(folder: Path, device: torch.device, *, lora: bool) -> Any:
    """Return a folder's model, sharded; no rank ever has all of it. Ranks: all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        if lora:
            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    fully_shard_pretrained(model, initialize=False)
    report = load_pretrained(model, folder)
    if dist.get_rank() == 0:
        print(f"{folder}: {report}")
    return model


@torch.no_grad()
def evaluate(model: Any, text: torch.Tensor, device: torch.device, *, length: int) -> float:
    """Return the mean loss over the held-out text; ranks share the samples."""
    model.eval()
    samples = text[: len(text) // length * length].view(-1, length).to(device)
    own = samples[dist.get_rank() :: dist.get_world_size()][: len(samples) // dist.get_world_size()]
    losses = torch.stack([model(input_ids=ids, labels=ids).loss for ids in own.split(16)]).mean()
    dist.all_reduce(losses)
    model.train()
    return losses.item() / dist.get_world_size()


def train(
    model: Any, options: argparse.Namespace, device: torch.device, *, rate: float, seed: int
) -> tuple[float, float]:
    """Train on the sources; return the loss over held-out ones before and after. Ranks: all."""
    text = read_text(2_000_000, held_out=False)
    held_out = read_text(options.length * 64, held_out=True)
    before = evaluate(model, held_out, device, length=options.length)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=rate))
    data = batches(text, num_samples=options.samples, length=options.length, seed=seed)
    for step in range(options.steps):
        ids = next(data).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return before, evaluate(model, held_out, device, length=options.length)


def sample(folder: Path, prompt: str, adapter: Path | None = None) -> str:
    """Continue a prompt by a saved model, in plain transformers and peft. Ranks: one."""
    tokenizer = ByT5Tokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    torch.manual_seed(1)
    made = model.generate(input_ids=ids, max_new_tokens=60, do_sample=True, top_k=20, pad_token_id=0)
    return str(tokenizer.decode(made[0]))


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune all weights, then LoRA on top, and print losses and samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a folder with a model of a vocabulary of bytes, as ByT5's; default: make one"
    )
    parser.add_argument("--output-folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=8, help="on each rank in a step")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--prompt", default="def __init__(self")
    options = parser.parse_args(argv)

    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    folder: Path = options.output_folder
    base, tuned, adapter = options.model or folder / "base", folder / "full", folder / "lora"
    if dist.get_rank() == 0 and options.model is None:
        make_base(base)
    dist.barrier()
    began = time.monotonic()
    for source, target, lora, rate in ((base, tuned, False, 2e-3), (tuned, adapter, True, 2e-3)):
        model = load(source, device, lora=lora)
        before, after = train(model, options, device, rate=rate, seed=int(lora))
        save_pretrained(model, target)
        del model
        if dist.get_rank() == 0:
            ByT5Tokenizer.from_pretrained(source).save_pretrained(target)
            print(f"{target}: held-out loss {before:.3f} -> {after:.3f}, {time.monotonic() - began:.0f} s", flush=True)
            print(repr(sample(tuned, options.prompt, adapter if lora else None)), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
