"""``--use-checkpoint-args``: a command line that takes the model's settings, and others, from the checkpoint of ``--load``.

Which arguments are taken, and which of them also where the command line gives them, is Megatron-LM's list: nothing else that a
file holds gets into the command line, and no value that is of another type or out of range. They are put there as flags, so
that all further checks are those of typed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, is_complete
from megatron.training.cli.flag_parser import FlagParser, split_by_flag
from megatron.training.cli.megatron_lm_args import joined, name_of, words_of
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from megatron.training.formats.flags import flags_of
from megatron.training.formats.huggingface_config import CONFIG
from megatron.training.formats.recognise import find_foreign, folder_of_iteration
from megatron.training.formats.value_kinds import (
    ANY,
    ARCHITECTURE,
    FLAG,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_WIDTH,
    NULL,
    PATTERN,
    PATTERN_TEXT,
    TEXT,
    Kind,
    checked,
    checked_entry,
    number,
    one_of,
    several,
    whole,
)


def _one_of_the_choices(flag: str) -> Kind:
    return one_of(*UPSTREAM_FLAGS[flag].choices)


_WIDTH, _LAYERS, _SIZE = whole(1, MAX_WIDTH), whole(0, MAX_LAYERS), whole(1, MAX_SIZE)
_RANKS = whole(1, 1 << 20)

WHERE_NOT_GIVEN: Mapping[str, Kind] = {
    "num_layers": whole(1, MAX_LAYERS),
    "hidden_size": _WIDTH,
    "ffn_hidden_size": _WIDTH,
    "seq_length": _SIZE,
    "num_attention_heads": _WIDTH,
    "kv_channels": _WIDTH,
    "max_position_embeddings": _SIZE,
    "hybrid_layer_pattern": PATTERN_TEXT,
    "padded_vocab_size": _SIZE,
}
"""Taken where the command line does not give them."""

ALWAYS: Mapping[str, Kind] = {
    "num_query_groups": _WIDTH,
    "group_query_attention": FLAG,
    "position_embedding_type": _one_of_the_choices("--position-embedding-type"),
    "add_position_embedding": FLAG,
    "use_rotary_position_embeddings": FLAG,
    "rotary_base": number(above=0),
    "rotary_percent": number(least=0, most=1),
    "rotary_interleaved": FLAG,
    "add_bias_linear": FLAG,
    "add_qkv_bias": FLAG,
    "squared_relu": FLAG,
    "swiglu": FLAG,
    "untie_embeddings_and_output_weights": FLAG,
    "layernorm_zero_centered_gamma": FLAG,
    "normalization": _one_of_the_choices("--normalization"),
    "apply_query_key_layer_scaling": FLAG,
    "attention_dropout": number(least=0, most=1),
    "hidden_dropout": number(least=0, most=1),
    "mtp_hybrid_override_pattern": PATTERN_TEXT,
    "mtp_num_layers": _LAYERS,
    "mtp_use_repeated_layer": FLAG,
    "spec": TEXT | several(TEXT, most=2),
    "num_experts": _LAYERS,
    "moe_layer_freq": PATTERN,
    "moe_ffn_hidden_size": _WIDTH,
    "moe_router_topk": _LAYERS,
    "moe_router_pre_softmax": FLAG,
    "moe_grouped_gemm": FLAG,
    "moe_single_grouped_weight": FLAG,
    "moe_single_grouped_bias": FLAG,
    "moe_shared_expert_intermediate_size": whole(0, MAX_WIDTH),
    "moe_router_score_function": _one_of_the_choices("--moe-router-score-function"),
    "moe_router_enable_expert_bias": FLAG,
    "moe_router_topk_scaling_factor": number(),
    "heterogeneous_layers_config_path": TEXT,
    "heterogeneous_layers_config_encoded_json": ANY,
    "moe_latent_size": _WIDTH,
    "tiktoken_pattern": _one_of_the_choices("--tiktoken-pattern"),
}
"""Taken also where the command line gives others."""

OF_TOKENIZER: Mapping[str, Kind] = {
    "tokenizer_model": TEXT,
    "tokenizer_type": _one_of_the_choices("--tokenizer-type"),
}
OF_SPLIT: Mapping[str, Kind] = dict.fromkeys(
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), _RANKS
)
"""Taken with ``--use-mp-args-from-checkpoint-args``."""

_OLD_NAMES = {
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "model_parallel_size": "tensor_model_parallel_size",
}

_SAVED: Mapping[str, Kind] = {
    **WHERE_NOT_GIVEN,
    **ALWAYS,
    **OF_TOKENIZER,
    **OF_SPLIT,
    **{old: ALWAYS.get(name) or OF_SPLIT[name] for old, name in _OLD_NAMES.items()},
    "disable_bias_linear": FLAG,
}
"""The arguments of a run that are taken, and nothing else."""


@dataclass(frozen=True)
class CompletedLine:
    """A command line with what a checkpoint adds."""

    argv: list[str]
    said: tuple[str, ...] = ()
    """What was taken, and what stands instead."""

    faults: tuple[str, ...] = ()


def with_checkpoint_args(argv: Sequence[str], parser: FlagParser) -> CompletedLine:
    """Complete a command line by ``--use-checkpoint-args``; without that flag it stays as it is.

    Ranks: each alone; reads the checkpoint's metadata.
    """
    typed = parser.read(argv)
    args = typed.args
    if not getattr(args, "use_checkpoint_args", False):
        return CompletedLine(list(argv))
    if getattr(args, "load", None) is None:
        return CompletedLine(list(argv), faults=("--use-checkpoint-args needs --load, got none",))
    folder = Path(args.load)
    try:
        found = _saved_args(folder, getattr(args, "ckpt_step", None))
    except (OSError, ValueError, NotImplementedError) as error:
        return CompletedLine(list(argv), faults=tuple(str(error).splitlines()))
    if found is None or not found[0]:
        what = "no checkpoint" if found is None else "a checkpoint without arguments"
        return CompletedLine(
            list(argv), (f"--use-checkpoint-args: {what} in {folder}, so the command line's are used",)
        )
    saved, of_model = found
    # Flags of ours come from the settings of a model alone; of Megatron-LM's those of its list, of Hugging Face's models all.
    upstream = {name_of(flag) for flag in UPSTREAM_FLAGS}
    takes_all = (folder / CONFIG).is_file()
    taken = [*ALWAYS, *(name for name in of_model if name not in _SAVED and (takes_all or name not in upstream))]
    if args.use_tokenizer_model_from_checkpoint_args:
        taken += OF_TOKENIZER
    if args.use_mp_args_from_checkpoint_args:
        taken += OF_SPLIT
    return _completed(argv, saved, taken, parser)


def _completed(
    argv: Sequence[str], saved: Mapping[str, Any], taken: Sequence[str], parser: FlagParser
) -> CompletedLine:
    given: dict[str, list[list[str]]] = {}
    kept: list[list[str]] = []
    replaced = {name for name in taken if saved.get(name) is not None}
    for flag, values in split_by_flag(argv):
        name = name_of(flag) if flag is not None else ""
        words = [*([] if flag is None else [flag]), *values]
        given.setdefault(name, []).append(words)
        if name not in replaced:
            kept.append(words)
    said = []
    for name in (*WHERE_NOT_GIVEN, *taken):
        value, typed = saved.get(name), given.get(name)
        if value is None or (name == "moe_ffn_hidden_size" and saved.get("num_experts") is None):
            continue
        if name not in taken and typed:
            said.append(f"{' '.join(typed[-1])} stays; the checkpoint has {name} {value}")
            continue
        words = words_of(name, value, parser)
        kept.append(words)
        if words or typed:
            instead = f" in place of {' '.join(typed[-1])}" if typed and typed[-1] != words else ""
            said.append(f"{name} is {value}, from the checkpoint{instead}")
    return CompletedLine(joined(kept), tuple(said))


def _saved_args(folder: Path, step: int | None) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the arguments that a checkpoint of any program has, by Megatron-LM's names; None where there is none.

    Returns:
        All of them, {} where it has none, and those that its model's settings give.

    Raises:
        ValueError: an argument is of another type or out of range; names the file and the key.
    """
    foreign, of_model = find_foreign(folder, step), dict[str, Any]()
    if foreign is not None and foreign.run is None:
        of_model = _args_of_flags(flags_of(foreign.architecture))
        return of_model, of_model
    if foreign is not None and foreign.run is not None:
        run = foreign.run
        saved = checked({**run.args, **dict.fromkeys(run.not_plain, _NOT_PLAIN)}, _TAKEN, run.file or run.path)
    else:
        path = folder_of_iteration(folder, step)
        if not is_complete(path):
            return None
        stored = CheckpointReader(path)
        saved = checked_entry(stored, f"{EXTRA_STATE}args", _TAKEN)
        if settings := checked_entry(stored, f"{EXTRA_STATE}architecture", ARCHITECTURE):
            of_model = _args_of_architecture(settings, path)
        saved = {**of_model, **saved} if saved else saved
    if "disable_bias_linear" in saved:
        saved["add_bias_linear"] = not saved["disable_bias_linear"]
    return {**{_OLD_NAMES[name]: value for name, value in saved.items() if name in _OLD_NAMES}, **saved}, of_model


_NOT_PLAIN = object()
_TAKEN = {name: kind | NULL for name, kind in _SAVED.items()}


def _args_of_architecture(settings: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the arguments that the settings of a run of ours give."""
    try:
        return _args_of_flags(flags_of(settings))
    except KeyError as error:
        raise ValueError(f"{where}: {EXTRA_STATE}architecture must have {error.args[0]}, got none") from error


def _args_of_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command line of the model alone; what it does not name has Megatron-LM's default."""
    found: dict[str, Any] = {
        name_of(flag): upstream.default for flag, upstream in UPSTREAM_FLAGS.items() if name_of(flag) in ALWAYS
    }
    for flag, values in split_by_flag(words):
        if flag is not None:
            upstream = UPSTREAM_FLAGS.get(flag)  # None: a flag of ours, whose switches are off where they are not given
            if upstream is not None and upstream.nargs == 0:
                found[name_of(flag)] = not upstream.default
            else:
                found[name_of(flag)] = values[0] if values else True
    return {name: value for name, value in found.items() if name not in ("attention_dropout", "hidden_dropout")}
