"""Measure each part of a transformer layer in place of the other one: ``python3 benchmarks/layer_parts.py [--output PAGE.md]``.

One GPU, layers of the Llama-3-8B shape, each a unit of the sharding engine on one rank (weights in bf16, or at rest in FP8 as
with ``--fp8-param-gather``), forward and backward, weight gradients in place: layers of transformer-engine as they are, and
with one part exchanged (norm, rotation, SwiGLU, attention, residual sum, the whole MLP); then the output layer with each cross
entropy. For each: milliseconds and memory; for the layers as they are what each module saves for backward. Without a GPU a
tiny shape runs, and without transformer-engine the local layers alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron.core.distributed.fsdp as fsdp
from benchmarks import model_speed
from benchmarks.measure.saved import Saved, saved_by_module
from benchmarks.model_speed import LLAMA_3_8B, TINY, Shape, Step
from benchmarks.reports.page import facts_of_run
from benchmarks.reports.page import page as markdown_page
from megatron.core.extensions import why_missing
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

_ROTARY_BASE = 500000
_FUSED: dict[str, Any] = dict.fromkeys(
    ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"), True
)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    **{
        recipe: {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True}
        | ({"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"} if recipe == "delayed" else {})
        for recipe in ("delayed", "tensorwise", "blockwise")
    },
}
VARIANTS = (
    "norm=ours,norm=apart,rope=te,swiglu=te,swiglu=fp8-kept,swiglu=plain,mlp=te,mlp=fused,mlp=recomputed,mlp=fp8-kept,"
    "attention=ours,attention=flash,attention=fp8,attention=fp8-kept,residual=plain,norm=ours+attention=ours"
)
HEADS = ("ours", "plain", "te")


class _TeRotation(SelfAttention):
    """Self-attention with transformer-engine's kernel for split and rotation."""

    angles: torch.Tensor
    """[s, 1, 1, d], fp32."""

    def _rotated(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        from megatron.core.extensions.transformer_engine_layers import te

        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.unflatten(-1, (self.num_groups, -1))
        widths = [self.num_heads // self.num_groups * self.head_width, self.head_width, self.head_width]
        query, key, value = te.attention.rope.apply_fused_qkv_rotary_pos_emb(mixed, self.angles, self.angles, widths)
        return query.reshape(*query.shape[:2], self.num_heads, self.head_width), key, value


class _TeSwiglu(MLP):
    """An MLP with transformer-engine's kernel for SwiGLU."""

    options: ClassVar[dict[str, bool]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from megatron.core.extensions.transformer_engine_layers import te

        self.swiglu = te.ops.SwiGLU(**self.options)

    def _activate(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        activated: torch.Tensor = self.swiglu(x)
        return activated


class _TeSwigluKeptInFp8(_TeSwiglu):
    """The same, with its input in FP8 from forward to backward: half of the most that a layer saves."""

    options: ClassVar[dict[str, bool]] = {"cache_quantized_input": True}


def _te_mlp(config: TransformerConfig, pg_collection: Any = None) -> torch.nn.Module:
    """Build transformer-engine's module of norm, both linear layers and SwiGLU."""
    from megatron.core.extensions.transformer_engine_layers import te

    class LayerNormMLP(te.LayerNormMLP):  # type: ignore[misc]
        quantized_weights = ("fc1_weight", "fc2_weight")

        def set_parameter_attribute(self, name: str, attribute: str, value: Any) -> None:
            setattr(getattr(self, name), attribute, value)

        def get_optional_state(self) -> None:
            return None

        def forward(self, x: torch.Tensor) -> Any:
            self.__dict__["_is_fsdp2"] = True  # as the framework's own classes do it under the engine
            self.__dict__["fuse_wgrad_accumulation"] = hasattr(self.fc1_weight, "get_main_grad")
            return super().forward(x), None

    return LayerNormMLP(
        config.hidden_size,
        config.ffn_hidden_size,
        eps=config.layernorm_epsilon,
        bias=False,
        normalization=config.normalization,
        activation="swiglu",
        params_dtype=config.params_dtype,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=config.init_method_std),
        device=torch.get_default_device(),
    )


class _Mlp:
    """A constructor of transformer-engine's MLP; layer specs take classes."""

    def __new__(cls, config: TransformerConfig, pg_collection: Any = None) -> Any:
        return _te_mlp(config, pg_collection)


class Layers(NamedTuple):
    """The layers of a variant: what they are built of, and what configures them."""

    spec: ModuleSpec
    fields: dict[str, Any]


def _exchange(layers: Layers, part: str) -> Layers:
    """Return the layers with one part exchanged, by its name in ``VARIANTS``.

    Raises:
        ValueError: there is no such part.
    """
    spec, fields = layers.spec, dict(layers.fields)
    inner = spec.submodules
    attention, mlp = inner.self_attention, inner.mlp
    if part in ("norm=ours", "norm=apart"):
        from megatron.core.extensions.transformer_engine_layers import TEColumnParallelLinear, TENorm

        inner.input_layernorm = inner.pre_mlp_layernorm = WrappedTorchNorm if part == "norm=ours" else TENorm
        attention.submodules.linear_qkv = mlp.submodules.linear_fc1 = TEColumnParallelLinear
    elif part == "rope=te":
        attention.module = _TeRotation
    elif part in ("swiglu=te", "swiglu=fp8-kept"):
        mlp.module = _TeSwiglu if part == "swiglu=te" else _TeSwigluKeptInFp8
    elif part == "swiglu=plain":
        fields["bias_activation_fusion"] = False
    elif part == "mlp=te":
        inner.mlp = ModuleSpec(module=_Mlp)
    elif part in ("mlp=fused", "mlp=recomputed", "mlp=fp8-kept"):
        from megatron.core.extensions.transformer_engine_mlp import TEFusedMLP

        mlp.module = TEFusedMLP
        fields["use_transformer_engine_op_fuser"] = True
        fields["activation_func_fp8_input_store"] = part == "mlp=fp8-kept"
        if part == "mlp=recomputed":
            fields |= {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}
    elif part in ("attention=ours", "attention=flash"):
        attention.submodules.core_attention = DotProductAttention
        fields["attention_backend"] = "fused" if part == "attention=ours" else "flash"
    elif part in ("attention=fp8", "attention=fp8-kept"):
        fields["fp8_dot_product_attention"] = True
        fields["fp8_multi_head_attention"] = part == "attention=fp8-kept"
    elif part == "residual=plain":
        fields["bias_dropout_fusion"] = False
    else:
        raise ValueError(f"a part must be one of {VARIANTS}, or several joined by +, got {part}")
    return Layers(spec, fields)


def layers_of(variant: str) -> Layers:
    """Return the layers of a variant: ``local``, ``te``, or what is exchanged in the latter.

    Raises:
        ValueError: there is no such part.
    """
    if variant == "local":
        return Layers(get_gpt_layer_local_spec(), _FUSED | {"attention_backend": "fused"})
    layers = Layers(get_gpt_layer_with_transformer_engine_spec(), dict(_FUSED))
    for part in variant.split("+") if variant != "te" else ():
        layers = _exchange(layers, part)
    return layers


def why_not(variant: str, precision: str) -> str | None:
    """Return why a variant does not go with a precision, None if it does."""
    if precision != "bf16" and variant == "local":
        return "local layers multiply in bf16"
    if precision == "bf16" and "mlp=fp8-kept" in variant:
        return "inputs of activations are kept in FP8 where layers multiply in it"
    if "attention=fp8" in variant and precision in ("bf16", "blockwise"):
        return "attention in FP8 goes with delayed and tensorwise"
    return None


def build_layers(variant: str, precision: str, shape: Shape, num_layers: int, device: torch.device) -> TransformerBlock:
    """Build the layers, each a unit of the engine on this rank alone."""
    layers = layers_of(variant)
    config = model_speed.layers_config(shape, num_layers, **layers.fields, **PRECISIONS[precision])
    with device:
        block = TransformerBlock(config, layers.spec, post_layer_norm=False)
    rotary = RotaryEmbedding(shape.hidden_size // shape.num_heads, 1.0, rotary_base=_ROTARY_BASE)
    cos, sin = rotary.get_cos_sin(shape.num_tokens, device)
    half = torch.atan2(sin, cos)
    for module in block.modules():
        if isinstance(module, _TeRotation):
            module.angles = torch.cat((half, half), dim=-1)[:, None, None, :].contiguous()
    mesh = init_device_mesh(device.type, (1,))
    policy = fsdp.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    for unit in (*block.layers, block):
        fsdp.fully_shard(unit, mesh, None, policy)
    return block


def layers_step(block: TransformerBlock, shape: Shape, device: torch.device) -> Step:
    """Return a forward of all layers on a hidden state that requires a gradient, and the gradient of its result."""
    hidden = torch.randn(shape.num_tokens, 1, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    rotary = RotaryEmbedding(shape.hidden_size // shape.num_heads, 1.0, rotary_base=_ROTARY_BASE)
    cos, sin = rotary.get_cos_sin(shape.num_tokens, device)
    parameters = list(block.parameters())

    def forward() -> torch.Tensor:
        output: torch.Tensor = block(hidden, None, rotary_pos_cos=cos, rotary_pos_sin=sin)
        return output

    def clear() -> None:
        for tensor in (hidden, *parameters):
            tensor.grad = None

    return Step(forward, torch.randn_like(hidden), clear)


def head_step(kind: str, shape: Shape, device: torch.device) -> Step:
    """Return a forward of the output layer and the mean loss, by one of ``HEADS``."""
    fields = {"cross_entropy_loss_fusion": kind == "ours"}
    model = model_speed.build_model(shape, 1, device, **fields)
    if kind != "te":
        return model_speed.head_step(model, shape, device)
    from megatron.core.extensions.transformer_engine_layers import te

    hidden = torch.randn(shape.num_tokens, 1, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(shape.vocab_size, (shape.num_tokens, 1), device=device)

    def forward() -> torch.Tensor:
        logits, _ = model.output_layer(hidden)
        losses: torch.Tensor = te.cross_entropy.parallel_cross_entropy(logits, labels, overwrite_input=True)
        return losses.mean()

    return Step(forward, None, lambda: setattr(hidden, "grad", None))


@contextmanager
def _freed(device: torch.device) -> Iterator[None]:
    """Free what the scope allocated, also transformer-engine's references to modules that are gone."""
    try:
        yield
    finally:
        if why_missing("transformer_engine_layers") is None:
            from megatron.core.extensions.transformer_engine_layers import te

            te.fp8.FP8GlobalStateManager.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """Have a process group of this process alone in the scope."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Table:
    """Rows of results, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.saved: list[str] = []
        self.kernels: list[str] = []
        self.missing: list[str] = []

    def text(self) -> str:
        return "\n".join((model_speed.HEAD, *self.rows))

    def add(self, row: str) -> None:
        self.rows.append(row)
        print(row, flush=True)

    def miss(self, name: str, error: Exception) -> None:
        traceback.print_exc()
        first = str(error).splitlines()[0] if str(error) else ""
        self.missing.append(f"- {name}: {type(error).__name__}: {first}")
        print(self.missing[-1], flush=True)


def _rows_of_saved(saved: Saved, num_layers: int) -> str:
    """Format what one layer saves, by module, with the tensors of each."""
    lines = ["| module | MiB of a layer | tensors |", "|---|---|---|"]
    by_module: dict[str, Counter[str]] = {}
    nbytes: Counter[str] = Counter()
    for tensor in saved.tensors:
        # "layers.0.mlp" and "layers.1.mlp" are one part.
        name = ".".join(word for word in tensor.module.split(".") if not word.isdigit()).removeprefix("layers")
        name = name.lstrip(".") or "layer"
        if tensor.of_weights:
            name += " (weights)"
        by_module.setdefault(name, Counter())[f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"] += 1
        nbytes[name] += tensor.nbytes
    for name, size in nbytes.most_common():
        tensors = ", ".join(f"{count} x {what}" for what, count in by_module[name].most_common(6))
        lines.append(f"| {name} | {size / num_layers / 2**20:.1f} | {tensors} |")
    total = sum(size for name, size in nbytes.items() if not name.endswith("(weights)"))
    lines.append(f"| all but weights | {total / num_layers / 2**20:.1f} | |")
    return "\n".join(lines)


def _measure_layers(
    variant: str, precision: str, shape: Shape, arguments: argparse.Namespace, device: torch.device, table: Table
) -> None:
    name = f"{precision}, {variant}"
    profiled = variant in ("te", "local")
    with _freed(device):
        torch.manual_seed(1)
        block = build_layers(variant, precision, shape, arguments.layers, device)
        step = layers_step(block, shape, device)
        flops = arguments.layers * shape.layer_flops
        result = model_speed.measure(
            name, step, flops, num_steps=arguments.steps, device=device, profiles=profiled and arguments.profile
        )
        table.add(result.row())
        if profiled:
            step.clear()
            saved = saved_by_module(block, step.forward, step.grad)
            table.saved.append(f"### {name}\n\n{_rows_of_saved(saved, arguments.layers)}")
            if arguments.profile:
                table.kernels.append(f"### {name}\n\n{result.kernels}")


def _each(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Return (variant, precision) of all measurements."""
    if why_missing("transformer_engine_layers") is not None:
        yield "local", "bf16"
        return
    for precision in arguments.precisions:
        for variant in ("local", "te", *arguments.variants):
            if why_not(variant, precision) is None:
                yield variant, precision


def run(arguments: argparse.Namespace, shape: Shape, device: torch.device) -> Table:
    """Measure all variants; what fails is named and the others follow."""
    table = Table()
    print(model_speed.HEAD)
    for variant, precision in _each(arguments):
        try:
            _measure_layers(variant, precision, shape, arguments, device, table)
        except Exception as error:
            table.miss(f"{precision}, {variant}", error)
    has_te = why_missing("transformer_engine_layers") is None and device.type == "cuda"
    for kind in HEADS if arguments.head else ():
        if kind == "te" and not has_te:
            continue
        try:
            with _freed(device):
                torch.manual_seed(1)
                step = head_step(kind, shape, device)
                name = f"output layer and loss, cross entropy {kind}"
                steps, flops = arguments.steps, shape.head_flops
                result = model_speed.measure(name, step, flops, num_steps=steps, device=device, profiles=False)
                table.add(result.row())
                del step
        except Exception as error:
            table.miss(f"cross entropy {kind}", error)
    return table


def _page(arguments: argparse.Namespace, shape: Shape, device: torch.device, table: Table) -> str:
    facts = facts_of_run(
        device,
        [
            ("layers", f"{arguments.layers} together, {shape}"),
            ("steps", f"3 to warm up, {arguments.steps} measured, median"),
        ],
        num_parameters=arguments.layers * shape.layer_weights,
    )
    sections = [table.text()]
    if table.missing:
        sections.append("Not measured:\n\n" + "\n".join(table.missing))
    sections.append("## Saved for backward\n\n" + "\n\n".join(table.saved))
    if table.kernels:
        sections.append("## Kernels\n\n" + "\n\n".join(table.kernels))
    return markdown_page("Parts of a transformer layer, exchanged one by one", facts, sections)


def main(argv: list[str]) -> int:
    """Measure and print; return 1 where a variant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="layers that are timed together (default: 2)")
    parser.add_argument("--tokens", type=int, help="tokens of the sequence (default: 8192)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default: 10)")
    parser.add_argument("--precisions", type=_names(PRECISIONS), default=["bf16", "delayed"], help="PRECISION,...")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=VARIANTS.split(","), help=VARIANTS)
    parser.add_argument("--no-head", dest="head", action="store_false", help="without the output layer and its losses")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="without tables of kernels")
    parser.add_argument("--output", type=Path, help="markdown page to write")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = LLAMA_3_8B if device.type == "cuda" else TINY
    if arguments.tokens is not None:
        shape = dataclasses.replace(shape, num_tokens=arguments.tokens)
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    with _one_rank(device):
        table = run(arguments, shape, device)
        text = _page(arguments, shape, device, table)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    print(text)
    return int(bool(table.missing))


def _names(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {name}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
