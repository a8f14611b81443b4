"""Time the model's own part of a step: ``python3 benchmarks/model_speed.py [--layers N] [--tokens N] ...``.

One GPU, no sharding: layers of the Llama-3-8B shape, then its output layer and loss, forward and backward in bf16, with
fusions and without, weight gradients written in place. For each: milliseconds, TFLOP/s of the matrix multiplications,
peak memory, and the kernels that take most time. Without a GPU a tiny shape runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
)
_GIB = 2**30
_NUM_KERNELS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of its microbatch of one sequence."""

    num_tokens: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        width = self.hidden_size // self.num_heads
        attention = self.hidden_size * (2 * self.hidden_size + 2 * self.num_groups * width)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def layer_flops(self) -> int:
        """Floating-point operations of forward and backward: attention's causal half, no recomputation."""
        return 6 * self.num_tokens * self.layer_weights + 6 * self.num_tokens**2 * self.hidden_size

    @property
    def head_flops(self) -> int:
        return 6 * self.num_tokens * self.hidden_size * self.vocab_size


LLAMA_3_8B = Shape(
    num_tokens=8192, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_groups=8, vocab_size=128256
)
TINY = Shape(num_tokens=64, hidden_size=64, ffn_hidden_size=160, num_heads=4, num_groups=2, vocab_size=256)


@dataclasses.dataclass(kw_only=True)
class Result:
    """Time and memory of one part (the layers, or the head) with one set of fusions."""

    name: str
    forward_ms: float
    backward_ms: float
    host_ms: float
    flops: int
    saved_nbytes: int
    """Saved by forward for backward."""
    peak_nbytes: int
    """Above what was allocated before."""
    kernels: str

    def row(self) -> str:
        total = self.forward_ms + self.backward_ms
        return (
            f"| {self.name} | {self.forward_ms:.3f} | {self.backward_ms:.3f} | {total:.3f} | {self.host_ms:.3f}"
            f" | {self.flops / total / 1e9:.0f} | {self.saved_nbytes / _GIB:.3f} | {self.peak_nbytes / _GIB:.3f} |"
        )


HEAD = (
    "| | forward, ms | backward, ms | both, ms | host, ms | TFLOP/s | saved for backward, GiB | peak above, GiB |\n"
    "|---|---|---|---|---|---|---|---|"
)


def layers_config(shape: Shape, num_layers: int, **fields: Any) -> TransformerConfig:
    """Return the configuration of bf16 layers of the shape, as in Llama-3, with these fields too."""
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        gated_linear_unit=True,
        activation_func="silu",
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        **fields,
    )


def build_model(shape: Shape, num_layers: int, device: torch.device, **fields: Any) -> GPTModel:
    """Build a bf16 GPT of the shape whose linear layers write weight gradients into buffers of their own."""
    config = layers_config(shape, num_layers, **fields)
    with device:
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            shape.vocab_size,
            shape.num_tokens,
            position_embedding_type="rope",
            rotary_base=500000,
        )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            _offer_main_grad(parameter)
    return model


def _offer_main_grad(weight: Any) -> None:
    buffer = torch.empty_like(weight)

    def get_main_grad() -> torch.Tensor:
        weight.overwrite_main_grad = True
        return buffer

    weight.get_main_grad = get_main_grad


class Step(NamedTuple):
    """What is measured: a forward and its backward."""

    forward: Callable[[], torch.Tensor]
    grad: torch.Tensor | None
    """The gradient of what forward gives; None: 1."""
    clear: Callable[[], None]
    """Frees the gradients that backward has left: there is nothing to add to."""


def layers_step(model: GPTModel, shape: Shape, device: torch.device) -> Step:
    """Run all layers and the final norm, on a hidden state that requires a gradient as an embedding's output does."""
    hidden = torch.randn(shape.num_tokens, 1, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    cos, sin = model.rotary_pos_emb.get_cos_sin(shape.num_tokens, device)  # type: ignore[union-attr]

    def forward() -> torch.Tensor:
        output: torch.Tensor = model.decoder(hidden, None, rotary_pos_cos=cos, rotary_pos_sin=sin)
        return output

    return Step(forward, torch.randn_like(hidden), lambda: setattr(hidden, "grad", None))


def head_step(model: GPTModel, shape: Shape, device: torch.device) -> Step:
    """Run the output layer and the mean loss."""
    hidden = torch.randn(shape.num_tokens, 1, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(shape.vocab_size, (1, shape.num_tokens), device=device)
    options = {"overwrite_logits": True} if model.config.cross_entropy_loss_fusion else {}

    def forward() -> torch.Tensor:
        logits, _ = model.output_layer(hidden)
        return model.compute_language_model_loss(labels, logits, **options).mean()

    return Step(forward, None, lambda: setattr(hidden, "grad", None))


def measure(
    name: str, step: Step, flops: int, *, num_steps: int, device: torch.device, profiles: bool = True
) -> Result:
    """Measure the median step's time after steps that compile, then memory and kernels in one more step each.

    Args:
        profiles: kernels are asked for.
    """
    forward, grad, clear = step
    times: list[tuple[float, float, float]] = []
    for index in range(3 + num_steps):
        clear()
        _wait(device)
        start = time.perf_counter()
        output = forward()
        host_forward = time.perf_counter() - start
        _wait(device)
        middle = time.perf_counter()
        output.backward(grad)
        host_backward = time.perf_counter() - middle
        _wait(device)
        if index >= 3:
            times.append((middle - start, time.perf_counter() - middle, host_forward + host_backward))
        del output
    saved, peak = _memory(step, device)
    forward_s, backward_s, host_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Result(
        name=name,
        forward_ms=1e3 * forward_s,
        backward_ms=1e3 * backward_s,
        host_ms=1e3 * host_s,
        flops=flops,
        saved_nbytes=saved,
        peak_nbytes=peak,
        kernels=_kernels(step, device) if profiles else "",
    )


def _memory(step: Step, device: torch.device) -> tuple[int, int]:
    """Return bytes between forward and backward, and at the peak, above those before; zero without a GPU."""
    forward, grad, clear = step
    if device.type != "cuda":
        return 0, 0
    clear()
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    saved = torch.cuda.memory_allocated(device) - before
    output.backward(grad)
    _wait(device)
    return saved, torch.cuda.max_memory_allocated(device) - before


def _kernels(step: Step, device: torch.device) -> str:
    """Format a table of one step's kernels by time."""
    if device.type != "cuda":
        return "no kernels without a GPU"
    forward, grad, clear = step
    clear()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        forward().backward(grad)
        _wait(device)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            by_name[event.name].append((event.time_range.end - event.time_range.start) / 1e3)
    total = sum(map(sum, by_name.values()))
    lines = [f"kernels of one step: {total:.3f} ms", "", "| ms | share | launches | kernel |", "|---|---|---|---|"]
    for name, spans in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]:
        lines.append(f"| {sum(spans):.3f} | {sum(spans) / total:.1%} | {len(spans)} | `{name[:100]}` |")
    return "\n".join(lines)


@contextmanager
def _built(model: GPTModel, device: torch.device) -> Iterator[GPTModel]:
    """Build a model for a scope and free it at its end: two need not fit into memory."""
    yield model
    for module in model.modules():
        module._parameters.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def variants(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configurations to compare: fields by name."""
    fused: dict[str, Any] = dict.fromkeys(FUSIONS, True) | {"attention_backend": arguments.attention_backend}
    chosen: dict[str, dict[str, Any]] = {"fused": fused, "plain": {"attention_backend": arguments.attention_backend}}
    if arguments.ablations:
        chosen |= {f"without {name}": {**fused, name: False} for name in FUSIONS}
        chosen["fused, not compiled"] = {**fused, "disable_jit_fuser": True}
        chosen["fused, flash attention"] = {**fused, "attention_backend": "flash"}
        chosen["fused, cuDNN attention"] = {**fused, "attention_backend": "fused"}
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="layers that are timed together (default: 2)")
    parser.add_argument("--tokens", type=int, help="tokens of the sequence (default: 8192)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default: 10)")
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "flash", "fused"])
    parser.add_argument("--ablations", action="store_true", help="each fusion left out, and each kernel of attention")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = LLAMA_3_8B if device.type == "cuda" else TINY
    if arguments.tokens is not None:
        shape = dataclasses.replace(shape, num_tokens=arguments.tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, a tiny shape"
    print(f"{name}, torch {torch.__version__}, {arguments.layers} layers, {shape}\n\n{HEAD}")
    results = [
        result for name, fields in variants(arguments).items() for result in run(name, fields, shape, arguments, device)
    ]
    for result in results[:4]:
        print(f"\n{result.name}: {result.kernels}")


def run(
    name: str, fields: dict[str, Any], shape: Shape, arguments: argparse.Namespace, device: torch.device
) -> Iterator[Result]:
    """Measure the layers and the head, and print a row for each."""
    torch.manual_seed(1)
    with _built(build_model(shape, arguments.layers, device, **fields), device) as model:
        for part, make, flops in (
            (f"{arguments.layers} layers", layers_step, arguments.layers * shape.layer_flops),
            ("output layer and loss", head_step, shape.head_flops),
        ):
            step = make(model, shape, device)
            result = measure(f"{part}, {name}", step, flops, num_steps=arguments.steps, device=device)
            print(result.row(), flush=True)
            yield result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
