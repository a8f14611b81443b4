"""A model as those of ``transformers`` are, with a table of conversions, for tests where that package is not installed.

What stands for the package's two modules has their names and calls; ``tests/third_party`` tests the package itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH, EXPERTS, VOCABULARY = 8, 3, 21


class Config:
    dtype: Any = "float32"
    architectures: Any = None

    def save_pretrained(self, folder: Path) -> None:
        text = json.dumps({"architectures": self.architectures, "dtype": str(self.dtype)})
        (Path(folder) / "config.json").write_text(text)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale
        return torch.layer_norm(x, [WIDTH]) * self.weight * scale


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("btd,eod->bto", self.norm(x), self.gate_up).chunk(2, dim=-1)
        return x + (gate.sigmoid() * up) @ self.down


class TinyModel(nn.Module):
    """Tied embeddings, and layers whose experts lie in one tensor."""

    base_model_prefix = "body"
    _no_split_modules = ("Layer",)
    all_tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, *, new_head: bool = False, num_layers: int = 2) -> None:
        super().__init__()
        self.config = Config()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        if new_head:
            self.score = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def can_generate(self) -> bool:
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Norm):
            if not getattr(module.weight, "_is_hf_initialized", False):
                module.weight.fill_(1.0)
            module.scale.fill_(0.5)  # type: ignore[operator]
        else:
            for parameter in module._parameters.values():
                if parameter is not None and not getattr(parameter, "_is_hf_initialized", False):
                    parameter.normal_(0.0, 0.3)
                    if isinstance(module, nn.Embedding):
                        parameter[module.padding_idx].zero_()

    def initialize_weights(self) -> None:
        for module in list(self.modules())[::-1]:
            if not getattr(module, "_is_hf_initialized", False):
                self._init_weights(module)
                module._is_hf_initialized = True  # type: ignore[assignment]


class Renaming:
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new, self.used = old, new, False

    def __call__(self, name: str) -> str:
        self.used |= name.startswith(self.old)
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name

    def was_used(self) -> bool:
        return self.used


class Converter:
    """Makes ``target`` of a layer of its ``source_patterns``, and the other way round."""

    def __init__(self, source_patterns: list[str], target: str, make: Callable[..., Any], unmake: Any) -> None:
        self.source_patterns, self.target, self._make, self.unmake = source_patterns, target, make, unmake
        self.collected_tensors: dict[str, list[Any]] = defaultdict(list)

    def add_tensor(self, target: str, name: str, pattern: str, tensor: Any) -> None:
        self.collected_tensors[pattern].append(tensor)

    def convert(self, target: str, model: Any = None, config: Any = None) -> dict[str, Any]:
        return {target: self._make(*(self.collected_tensors[pattern] for pattern in self.source_patterns))}

    def was_used(self) -> bool:
        return True


def _rename(name: str, renamings: Any, converters: Any, prefix: str, own: Any) -> tuple[str, str | None]:
    for renaming in renamings:
        name = renaming(name)
    for converter in converters:
        for pattern in converter.source_patterns:
            head, _, tail = pattern.partition("*")
            at = name.find(head)
            if at >= 0 and name.endswith(tail):
                return name[:at] + converter.target, pattern
    return name, None


def _table(model: nn.Module) -> list[Any]:
    experts = Converter(
        ["experts.*.gate", "experts.*.up"],
        "gate_up",
        lambda gates, ups: torch.cat([torch.stack(gates), torch.stack(ups)], dim=1),
        lambda whole: {
            f"experts.{index}.{kind}": half
            for kind, halves in zip(("gate", "up"), whole.chunk(2, dim=1), strict=True)
            for index, half in enumerate(halves.unbind(0))
        },
    )
    down = Converter(
        ["doubled_down"], "down", lambda tensors: tensors[0] * 0.5, lambda whole: {"doubled_down": whole * 2}
    )
    return [Renaming("body.", ""), experts, down]


def _revert(model: nn.Module, own: dict[str, Any]) -> dict[str, Any]:
    converters = [entry for entry in _table(model) if isinstance(entry, Converter)]
    found: dict[str, Any] = {}
    for name, tensor in own.items():
        converter = next((c for c in converters if name.endswith(f".{c.target}")), None)
        made = {name: tensor}
        if converter is not None:
            prefix = name.removesuffix(converter.target)
            made = {prefix + own_name: value for own_name, value in converter.unmake(tensor).items()}
        found |= {f"body.{own_name}": value for own_name, value in made.items()}
    return found


def library() -> Any:
    """Stand for ``transformers``."""
    return SimpleNamespace(
        mapping=SimpleNamespace(get_model_conversion_mapping=_table),
        loading=SimpleNamespace(
            WeightRenaming=Renaming,
            WeightConverter=Converter,
            dot_natural_key=lambda name: name,
            rename_source_key=_rename,
            revert_weight_conversion=_revert,
        ),
    )


def files_of(model: TinyModel) -> dict[str, torch.Tensor]:
    """Return what a file of an unsharded model has."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    return {name: value.contiguous() for name, value in _revert(model, state).items()}
