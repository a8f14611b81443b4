"""The benchmark of a layer's parts runs as it stands, on a tiny shape where there is no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import layer_parts
from benchmarks.measure.saved import saved_by_module
from tests.support.fake_transformer_engine import fake_transformer_engine  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it takes the full shape, by hand")


def _rows(text: str) -> list[str]:
    """The first column of the table of times."""
    return re.findall(r"^\| (.+?) \| \d", text.split("## Saved for backward")[0], re.MULTILINE)


def test_local_layers_are_measured_where_there_is_no_transformer_engine(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert layer_parts.main(["--steps", "1", "--layers", "1", "--output", str(page)]) == 0
    losses = [f"output layer and loss, cross entropy {kind}" for kind in ("ours", "plain")]
    assert _rows(page.read_text()) == ["bf16, local", *losses]


def test_parts_are_exchanged_in_each_precision(
    tmp_path: Path,
    fake_transformer_engine: SimpleNamespace,  # noqa: F811
) -> None:
    """A part that fails is named and the others follow: the stand-in has no SwiGLU of its own."""
    page = tmp_path / "page.md"
    variants = "norm=ours,norm=apart,swiglu=te,attention=fp8,norm=ours+residual=plain"
    arguments = ["--steps", "1", "--layers", "1", "--no-head", "--variants", variants, "--output", str(page)]
    assert layer_parts.main(arguments) == 1
    text = page.read_text()
    exchanged = ["norm=ours", "norm=apart", "norm=ours+residual=plain"]
    assert _rows(text) == [
        *(f"bf16, {name}" for name in ("local", "te", *exchanged)),
        *(
            f"delayed, {name}"
            for name in ("te", "norm=ours", "norm=apart", "attention=fp8", "norm=ours+residual=plain")
        ),
    ]
    assert re.findall(r"^- (\w+, \S+): AttributeError", text, re.MULTILINE) == [
        "bf16, swiglu=te",
        "delayed, swiglu=te",
    ]


def test_an_exchanged_part_is_what_runs(fake_transformer_engine: SimpleNamespace) -> None:  # noqa: F811
    from megatron.core.extensions import transformer_engine_layers as te
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def modules(variant: str) -> set[type]:
        spec = layer_parts.layers_of(variant).spec.submodules
        attention, mlp = spec.self_attention.submodules, spec.mlp.submodules
        return {spec.input_layernorm, attention.linear_qkv, attention.core_attention, mlp.linear_fc1}

    assert te.TELayerNormColumnParallelLinear in modules("te") and te.TEDotProductAttention in modules("te")
    assert te.TELayerNormColumnParallelLinear not in modules("norm=ours") | modules("norm=apart")
    assert DotProductAttention in modules("norm=ours+attention=ours")
    assert te.TELayerNormColumnParallelLinear in modules("te"), "specs are made anew"


def test_a_part_that_does_not_exist_is_refused(fake_transformer_engine: SimpleNamespace) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"must be one of norm=ours,.* got norm=mine"):
        layer_parts.layers_of("norm=mine")


def test_what_is_saved_is_counted_once_and_by_module() -> None:
    """A linear layer saves its input, which the activation before it has saved already, and its weight."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False), torch.nn.Sigmoid(), torch.nn.Linear(8, 2, bias=False)
    )
    x = torch.randn(3, 4, requires_grad=True)
    saved = saved_by_module(layers, lambda: layers(x), torch.ones(3, 2))
    found = [(tensor.module, tensor.shape, tensor.of_weights) for tensor in saved.tensors]
    assert sorted(found) == [("0", (3, 4), False), ("0", (4, 8), True), ("1", (3, 8), False), ("2", (8, 2), True)]
    assert saved.nbytes() == 4 * (12 + 24) and saved.nbytes(of_weights=True) == 4 * (32 + 16)
