"""Every flag in effect reaches a setting, and every setting is read by the component that it is for."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, get_type_hints

import megatron
from megatron.training.arguments import Settings, build_parser, settings_from_args

PACKAGE = Path(megatron.__path__[0])
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
LINES = (
    "",
    "--swiglu --num-experts 4 --group-query-attention --num-query-groups 2 --use-megatron-fsdp",
    "--multi-latent-attention",
    "--quick-geglu --use-megatron-fsdp --position-embedding-type yarn",
    "--geglu",
    "--squared-relu --tensorboard-dir board --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
)

# Flags that others take the place of, before settings are made.
SUBSTITUTED = {
    "use_torch_fsdp2",
    "torch_fsdp2_reshard_after_forward",
    "use_checkpoint_args",
    "use_mp_args_from_checkpoint_args",
    "use_tokenizer_model_from_checkpoint_args",
    "data_args_path",
    "per_split_data_args_path",
}

# Fields that nothing needs to read, and why.
NOT_READ = {
    "grad_sync_func": "library code may set it; gradients are reduced as the plan says",
    "init_method_std": "the configuration makes functions of it",
    "init_model_with_meta_device": "GPTConfig.init_on_meta_device, of the same flag, is read",
    "lines": "the configuration report prints them",
    "main_grads_dtype": "only checked; megatron_fsdp_main_grads_dtype, of the same flag, is read",
    "moe_token_dispatcher_type": "the checks let through what gives the same results alone",
    "param_name_patterns_for_fp32_local_accumulation": "only checked; all gradients accumulate in fp32",
    "param_sync_func": "library code may set it; weights are gathered as the plan says",
    "use_precision_aware_optimizer": "the configuration makes store_param_remainders of it",
}

NAMES_OF_SETTINGS = re.compile(
    r"(^|\.)(_?\w*config|settings|transformer|log|of_model|"
    + "|".join(f.name for f in dataclasses.fields(Settings))
    + ")$"
)


class _Recorder(Namespace):
    """Arguments that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_read").add(name)
        return object.__getattribute__(self, name)


def test_every_flag_in_effect_reaches_the_settings() -> None:
    parser, read = build_parser(), set[str]()
    for more in LINES:
        line = parser.read(f"{MODEL} {RUN} {more}".split())
        assert not line.faults
        settings_from_args(_Recorder(**vars(line.args), _read=read), world_size=1)
    dests = {action.dest for action in parser._actions if action.option_strings} - {"help"}
    assert dests - read == SUBSTITUTED


def test_every_setting_is_read_outside_of_its_checks() -> None:
    reads = _reads()
    checked, not_read = 0, set[str]()
    for part in {*get_type_hints(Settings).values(), *get_type_hints(get_type_hints(Settings)["model"]).values()}:
        if not dataclasses.is_dataclass(part):
            continue
        own = {Path(inspect.getfile(kind)) for kind in part.__mro__[:-1]}
        refused = {name for name, (served, _) in getattr(part, "served", {}).items() if isinstance(served, tuple)}
        for field in dataclasses.fields(part):
            checked += 1
            if field.name not in refused and not any(
                path in own if receiver == "self" else NAMES_OF_SETTINGS.search(receiver)
                for receiver, path in reads.get(field.name, ())
            ):
                not_read.add(field.name)
    assert checked > 200
    assert not_read == set(NOT_READ)


def _reads() -> dict[str, set[tuple[str, Path]]]:
    """Return who reads an attribute of which receiver: by the attribute's name, (receiver, file)."""
    reads: dict[str, set[tuple[str, Path]]] = {}
    for path in PACKAGE.rglob("*.py"):
        if "cli" in path.relative_to(PACKAGE).parts or path.stem.endswith("_checks") or path.name == "arguments.py":
            continue
        nodes: list[ast.AST] = [ast.parse(path.read_text())]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef) and re.match(r"__post_init__$|_?check", node.name):
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                reads.setdefault(node.attr, set()).add((_receiver(node.value), path))
            nodes += ast.iter_child_nodes(node)
    return reads


def _receiver(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""
