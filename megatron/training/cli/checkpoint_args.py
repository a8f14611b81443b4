"""``--use-checkpoint-args``: a command line that takes the model's settings, and others, from the checkpoint of ``--load``.

Which arguments are taken, and which of them also where the command line gives them, is Megatron-LM's list. They are put into the
command line as flags, so that all checks are those of typed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, is_complete
from megatron.training.cli.flag_parser import FlagParser, split_by_flag
from megatron.training.cli.megatron_lm_args import megatron_lm_args, name_of
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from megatron.training.formats.flags import flags_of
from megatron.training.formats.huggingface import CONFIG
from megatron.training.formats.recognise import find_foreign, folder_of_iteration

WHERE_NOT_GIVEN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "hybrid_layer_pattern",
    "padded_vocab_size",
)
"""Taken where the command line does not give them."""

ALWAYS = (
    "num_query_groups",
    "group_query_attention",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "layernorm_zero_centered_gamma",
    "normalization",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "hidden_dropout",
    "mtp_hybrid_override_pattern",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "spec",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "moe_latent_size",
    "tiktoken_pattern",
)
"""Taken also where the command line gives others."""

OF_TOKENIZER = ("tokenizer_model", "tokenizer_type")
OF_SPLIT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""Taken with ``--use-mp-args-from-checkpoint-args``."""

_OLD_NAMES = {
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "model_parallel_size": "tensor_model_parallel_size",
}


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
    if not found:
        what = "no checkpoint" if found is None else "a checkpoint without arguments"
        return CompletedLine(
            list(argv), (f"--use-checkpoint-args: {what} in {folder}, so the command line's are used",)
        )
    # A model of Hugging Face has no arguments but those of its model, which are all taken; of our runs flags of ours are.
    takes_all, upstream = (folder / CONFIG).is_file(), {name_of(flag) for flag in UPSTREAM_FLAGS}
    taken = [
        *ALWAYS,
        *(name for name in found if takes_all and name not in (*WHERE_NOT_GIVEN, *ALWAYS)),
        *(name for name in found if not takes_all and name not in upstream and hasattr(args, name)),
    ]
    if args.use_tokenizer_model_from_checkpoint_args:
        taken += OF_TOKENIZER
    if args.use_mp_args_from_checkpoint_args:
        taken += OF_SPLIT
    default = megatron_lm_args(parser, vars(parser.parse_args([])), []).values
    return _completed(argv, found, taken, default)


def _completed(
    argv: Sequence[str], saved: Mapping[str, Any], taken: Sequence[str], default: Mapping[str, Any]
) -> CompletedLine:
    given: dict[str, list[list[str]]] = {}
    kept: list[str] = []
    replaced = {name for name in taken if saved.get(name) is not None}
    for flag, values in split_by_flag(argv):
        name = name_of(flag) if flag is not None else ""
        words = [*([] if flag is None else [flag]), *values]
        given.setdefault(name, []).append(words)
        if name not in replaced:
            kept += words
    said = []
    for name in (*WHERE_NOT_GIVEN, *taken):
        value, typed = saved.get(name), given.get(name)
        if value is None or (name == "moe_ffn_hidden_size" and saved.get("num_experts") is None):
            continue
        if name not in taken and typed:
            said.append(f"{' '.join(typed[-1])} stays; the checkpoint has {name} {value}")
            continue
        words = [] if value == default.get(name) else list(_words(name, value))
        kept += words
        if words or typed:
            instead = f" in place of {' '.join(typed[-1])}" if typed and typed[-1] != words else ""
            said.append(f"{name} is {value}, from the checkpoint{instead}")
    return CompletedLine(kept, tuple(said))


def _words(name: str, value: Any) -> Iterator[str]:
    """Yield the flag, and its values, that gives a setting this value."""
    flags = [flag for flag in UPSTREAM_FLAGS if name_of(flag) == name]
    if not flags:  # a flag of ours, as ``_args_of_flags`` read it
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)
        return
    switches = [flag for flag in flags if UPSTREAM_FLAGS[flag].nargs == 0]
    if isinstance(value, bool) and switches:
        yield next((flag for flag in switches if flag.startswith(("--no-", "--disable-")) != value), switches[0])
        return
    yield flags[0]
    if isinstance(value, (list, tuple)) and UPSTREAM_FLAGS[flags[0]].nargs is not None:
        yield from map(str, value)
    else:
        yield str(value).replace(" ", "")


def _saved_args(folder: Path, step: int | None) -> dict[str, Any] | None:
    """Return the arguments that a checkpoint of any program has, by Megatron-LM's names; None where there is none."""
    foreign = find_foreign(folder, step)
    if foreign is not None:
        saved = dict(foreign.run.args) if foreign.run is not None else _args_of_flags(flags_of(foreign.architecture))
    else:
        path = folder_of_iteration(folder, step)
        if not is_complete(path):
            return None
        stored, names = CheckpointReader(path), [f"{EXTRA_STATE}args", f"{EXTRA_STATE}architecture"]
        values = stored.values([name for name in names if name in stored.entries])
        saved, architecture = (values.get(name) or {} for name in names)
        if saved and architecture:
            saved = {**_args_of_flags(flags_of(architecture)), **saved}
    if "disable_bias_linear" in saved:
        saved["add_bias_linear"] = not saved["disable_bias_linear"]
    return {**{_OLD_NAMES[name]: value for name, value in saved.items() if name in _OLD_NAMES}, **saved}


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
