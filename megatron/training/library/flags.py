"""The command line as code written for Megatron-LM reads it: a namespace with all of upstream's names."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import FLAG_GROUPS, Settings, build_parser, ddp_config, settings_from_args
from megatron.training.cli.flag_parser import FlagError
from megatron.training.cli.flags_hybrid import take_num_layers
from megatron.training.cli.refused_combinations import refusals_of
from megatron.training.cli.substitutions import substitute
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from megatron.training.cli.words_of_flags import in_plain_words
from megatron.training.launch.gpt_config import GPTConfig
from megatron.training.launch.rendezvous import rank_of_environment, world_size_of_environment
from megatron.training.library.state import set_global_variables

ArgumentsProvider = Callable[[Any], ArgumentParser | None]


def parse_args(extra_args_provider: ArgumentsProvider | None = None, ignore_unknown_args: bool = False) -> Namespace:
    """Parse this process's command line; flags that were not given have Megatron-LM's defaults, or those of docs/porting.md.

    Args:
        extra_args_provider: adds the caller's flags to a parser.
        ignore_unknown_args: leave out flags that nobody knows.

    Raises:
        FlagError: flags are unknown, malformed or refused; the message names all.
    """
    parser = build_parser()
    if extra_args_provider is not None:
        extra_args_provider(parser)
    line = parser.read(sys.argv[1:])
    ignored = {fate.words for fate in line.fates if fate.kind == "unknown"} if ignore_unknown_args else set()
    if faults := [fault for fault in line.faults if fault not in ignored]:
        raise FlagError("\n".join(faults))
    args = line.args
    for spelling, flag in UPSTREAM_FLAGS.items():
        dest = _dest(spelling)
        if not hasattr(args, dest):
            setattr(args, dest, flag.default)
    args.rank, args.world_size = rank_of_environment(), world_size_of_environment()
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return args


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all flags of Megatron-LM and this package to a parser, and return it.

    Unsupported flags parse too; ``validate_args`` refuses them, also if their values come from ``set_defaults``.
    """
    for add_flags in FLAG_GROUPS:
        add_flags(parser)
    known = set(parser._option_string_actions)
    for spelling, flag in UPSTREAM_FLAGS.items():
        if spelling in known:
            continue
        given: dict[str, Any] = {"dest": _dest(spelling), "default": flag.default}
        if flag.nargs == 0:
            given["action"] = "store_false" if flag.default is True or spelling.startswith("--no-") else "store_true"
        else:
            kind = {"int": int, "float": float}.get(flag.kind, str)
            given |= {"nargs": flag.nargs, "type": kind, "choices": flag.choices or None}
        parser.add_argument(spelling, **given, help=SUPPRESS)
    return parser


def _dest(spelling: str) -> str:
    return UPSTREAM_FLAGS[spelling].dest or spelling.lstrip("-").replace("-", "_")


def _take_values_of_upstream(args: Namespace) -> None:
    """Apply arguments that a script set by Megatron-LM's names, as if they came from the command line.

    Raises:
        FlagError: an argument has an unsupported value; the message lists all of them.
    """
    parser = build_parser()
    # ``parse_args`` sets the local rank itself, from torchrun's environment.
    names, words = {"local_rank", *(action.dest for action in parser._actions)}, {}
    for spelling, flag in UPSTREAM_FLAGS.items():
        dest = _dest(spelling)
        value = getattr(args, dest, flag.default)
        if dest in names or value is None or _word(value) == _word(flag.default):
            continue
        turns_on = not spelling.startswith(("--no-", "--disable-"))
        if flag.nargs != 0:
            values = value if isinstance(value, (list, tuple)) else [value]
            words[dest] = [spelling, *map(_word, values)]
        elif dest not in words or turns_on is bool(value):
            words[dest] = [spelling]
    line, defaults = parser.read([word for each in words.values() for word in each]), parser.parse_args([])
    if line.faults:
        raise FlagError("\n".join(line.faults))
    for dest, value in vars(line.args).items():
        if value != getattr(defaults, dest):
            setattr(args, dest, value)


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, torch.dtype):
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(value, str(value))
    return value.name if isinstance(value, Enum) else str(value)


def get_megatron_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Return the data-parallel settings of validated arguments.

    Raises:
        ValueError, NotImplementedError: settings are out of range, contradict each other or are not served.
    """
    return ddp_config(args)


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check arguments and add what follows from them: sizes, dtypes, the number of data-parallel ranks.

    Args:
        defaults: values of arguments that are None.

    Raises:
        FlagError: arguments are refused, or contradict each other; the message names all.
    """
    for name, value in (defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    _take_values_of_upstream(args)
    take_num_layers(args)
    substitute(args)
    rows, _ = refusals_of(args)
    if rows:
        raise FlagError("\n".join(map(in_plain_words, rows)))
    settings = settings_of(args)
    transformer, batch = settings.model.transformer, settings.batch
    args.data_parallel_size, args.global_batch_size = batch.data_parallel_size, batch.global_batch_size
    args.params_dtype = transformer.params_dtype
    args.ffn_hidden_size, args.kv_channels = transformer.ffn_hidden_size, transformer.kv_channels
    args.num_query_groups = transformer.num_query_groups
    args.virtual_pipeline_model_parallel_size = transformer.virtual_pipeline_model_parallel_size
    args.consumed_train_samples = args.consumed_valid_samples = args.iteration = 0
    args.padded_vocab_size = getattr(args, "padded_vocab_size", None)
    return args


def parse_and_validate_args(
    extra_args_provider: ArgumentsProvider | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """Parse and check this process's command line, and remember it for ``get_args``; arguments as of the two functions."""
    args = validate_args(parse_args(extra_args_provider, ignore_unknown_args), args_defaults)
    set_global_variables(args, build_tokenizer=False)
    return args


def settings_of(args: Namespace) -> Settings:
    """Return the settings of a run with these arguments."""
    return settings_from_args(args, world_size=getattr(args, "world_size", None) or world_size_of_environment())


def core_transformer_config_from_args(args: Namespace, config_class: type[Any] | None = None) -> Any:
    """Return the model's ``TransformerConfig``.

    Args:
        config_class: a class that inherits from it; the arguments of the same names as its further fields are their values.
    """
    config = settings_of(args).model.transformer
    if config_class is None or config_class is TransformerConfig:
        return config
    wanted = [field.name for field in fields(config_class) if field.init]
    known = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    others = [name for name in wanted if name not in known]
    return config_class(**known, **{name: getattr(args, name) for name in others if hasattr(args, name)})


def hybrid_config_from_args(args: Namespace, model_config_cls: type[Any] | None = None) -> GPTConfig:
    """Return the settings of the hybrid model, which is a GPT model with ``hybrid_layer_pattern``; see ``gpt_config_from_args``."""
    return gpt_config_from_args(args, model_config_cls)


def gpt_config_from_args(args: Namespace, model_config_cls: type[Any] | None = None) -> GPTConfig:
    """Return the settings of the GPT model.

    Raises:
        NotImplementedError: ``model_config_cls`` is given.
    """
    if model_config_cls is not None:
        raise NotImplementedError(
            f"model_config_cls must be None, got {model_config_cls.__name__}; pass a model_provider"
        )
    return settings_of(args).model


@dataclass(frozen=True, kw_only=True)
class PretrainConfigContainer:
    """What ``pretrain`` is given of the command line."""

    args: Namespace
    settings: Settings
    model: Any
    """The settings of the model, where it is a GPT model that no ``model_provider`` builds."""


def pretrain_cfg_container_from_args(args: Namespace, model_cfg: Any = None) -> PretrainConfigContainer:
    """Return what ``pretrain`` is given of checked arguments."""
    return PretrainConfigContainer(args=args, settings=settings_of(args), model=model_cfg)
