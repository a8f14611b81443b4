"""The command line as code written for Megatron-LM reads it: a namespace with all of upstream's names.

Arguments remember the words that they come from. Whatever a script changes in them is put on the command line in place of what was
typed, and that line is checked as ``pretrain_gpt.py`` checks its own: there is one way from words to ``Settings``.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import Settings, build_parser, check_command_line, parse_settings
from megatron.training.cli.flag_parser import Fate, FlagError, FlagParser, split_by_flag
from megatron.training.cli.megatron_lm_args import joined, megatron_lm_args, name_of, with_values
from megatron.training.cli.served_flags import FLAG_GROUPS
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from megatron.training.cli.words_of_flags import in_plain_words
from megatron.training.launch.gpt_config import GPTConfig
from megatron.training.launch.rendezvous import rank_of_environment, world_size_of_environment
from megatron.training.library.state import set_global_variables
from megatron.training.telemetry.flops import flops_per_sample

ArgumentsProvider = Callable[[Any], ArgumentParser | None]

_ORIGIN = "_origin"


@dataclass(frozen=True)
class _Origin:
    """The command line that arguments come from, kept with them."""

    words: tuple[str, ...]
    """Without flags of the caller's own."""

    values: Mapping[str, Any]
    """What the words give each argument. Other values were set by the script."""

    settings: Settings | None = None
    """None before arguments are validated."""


def parse_args(extra_args_provider: ArgumentsProvider | None = None, ignore_unknown_args: bool = False) -> Namespace:
    """Parse this process's command line; flags that were not given have Megatron-LM's defaults, or those of docs/porting.md.

    Args:
        extra_args_provider: adds the caller's flags to a parser.
        ignore_unknown_args: leave out flags that nobody knows.

    Raises:
        FlagError: flags are unknown, malformed or refused; the message names all.
    """
    args, faults = _read_words(extra_args_provider, ignore_unknown_args)
    if faults:
        raise FlagError("\n".join(faults))
    return args


def _read_words(provider: ArgumentsProvider | None, ignore_unknown: bool) -> tuple[Namespace, list[str]]:
    """Read this process's command line, and return its arguments and faults."""
    own, parser = build_parser(), build_parser()
    if provider is not None:
        provider(parser)
    line = parser.read(sys.argv[1:])
    unknown = {fate.flag for fate in line.fates if fate.kind == "unknown"} if ignore_unknown else set[str]()
    left_out = unknown | parser._option_string_actions.keys() - own._option_string_actions.keys()
    parts = [
        [*([] if flag is None else [flag]), *given]
        for flag, given in split_by_flag(sys.argv[1:])
        if flag not in left_out
    ]
    origin = _origin_of_words(joined(parts), own)
    args = Namespace(**{**deepcopy(dict(origin.values)), **vars(line.args)})
    args.rank, args.world_size = rank_of_environment(), world_size_of_environment()
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    setattr(args, _ORIGIN, origin)
    faults = [in_plain_words(fate.words) for fate in line.fates if fate.is_fault and fate.flag not in unknown]
    return args, faults


def _origin_of_words(words: Sequence[str], parser: FlagParser) -> _Origin:
    line = parser.read(words)
    return _Origin(tuple(words), _values(parser, line.args, line.fates))


def _values(parser: FlagParser, args: Namespace, fates: Iterable[Fate]) -> dict[str, Any]:
    """Return the values of all arguments, by our names and Megatron-LM's."""
    ours = {action.dest: getattr(args, action.dest) for action in parser._actions if hasattr(args, action.dest)}
    found = {**megatron_lm_args(parser, ours, fates).values, **ours}
    # ``local_rank`` is torchrun's.
    return {name: deepcopy(value) for name, value in found.items() if name != "local_rank"}


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all flags of Megatron-LM and this package to a parser, and return it.

    Unsupported flags parse too; ``validate_args`` refuses them, also if their values come from ``set_defaults``.
    """
    for group in FLAG_GROUPS:
        group.add_to(parser)
    known = set(parser._option_string_actions)
    for spelling, flag in UPSTREAM_FLAGS.items():
        if spelling in known:
            continue
        given: dict[str, Any] = {"dest": name_of(spelling), "default": flag.default}
        if flag.nargs == 0:
            given["action"] = "store_false" if flag.default is True or spelling.startswith("--no-") else "store_true"
        else:
            kind = {"int": int, "float": float}.get(flag.kind, str)
            given |= {"nargs": flag.nargs, "type": kind, "choices": flag.choices or None}
        parser.add_argument(spelling, **given, help=SUPPRESS)
    return parser


def get_megatron_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Return the data-parallel settings of validated arguments.

    Raises:
        FlagError: see ``settings_of``.
    """
    return settings_of(args).ddp


def get_megatron_optimizer_config(args: Namespace) -> tuple[OptimizerConfig, dict[Any, Any]]:
    """Return the optimizer's settings of validated arguments, and those of groups of parameters that differ.

    Raises:
        FlagError: see ``settings_of``.
    """
    config = settings_of(args).optimizer
    return config, get_standard_config_overrides(config)


def num_floating_point_operations(args: Namespace, batch_size: int) -> int:
    """Count the operations of forward and backward on so many samples; see ``FLOP_CONVENTION``.

    Raises:
        FlagError: see ``settings_of``.
    """
    settings, vocab_size = settings_of(args), args.padded_vocab_size
    length = settings.data.seq_length
    return batch_size * flops_per_sample(settings.model.transformer, seq_length=length, vocab_size=vocab_size)


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check arguments and add what follows from them: sizes, dtypes, the number of data-parallel ranks.

    Args:
        defaults: values of arguments that are None.

    Raises:
        FlagError: arguments are refused, or contradict each other; the message names all.
    """
    return _validated(args, defaults or {}, [])


def _validated(args: Namespace, defaults: Mapping[str, Any], faults: Sequence[str]) -> Namespace:
    """Check arguments; ``faults`` are those that are known."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    parser, words = build_parser(), _words_of(args)
    line = check_command_line(words, world_size=_world_size(args))
    if faults or line.settings is None:
        raise FlagError("\n".join(dict.fromkeys((*faults, *line.faults))))
    settings, values = line.settings, _values(parser, line.args, line.fates)
    vars(args).update(values)
    transformer, batch = settings.model.transformer, settings.batch
    args.data_parallel_size, args.global_batch_size = batch.data_parallel_size, batch.global_batch_size
    args.params_dtype = transformer.params_dtype
    args.ffn_hidden_size, args.kv_channels = transformer.ffn_hidden_size, transformer.kv_channels
    args.num_query_groups = transformer.num_query_groups
    args.virtual_pipeline_model_parallel_size = transformer.virtual_pipeline_model_parallel_size
    args.consumed_train_samples = args.consumed_valid_samples = args.iteration = 0
    setattr(args, _ORIGIN, _Origin(words, {name: deepcopy(getattr(args, name)) for name in values}, settings))
    return args


def parse_and_validate_args(
    extra_args_provider: ArgumentsProvider | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """Parse and check this process's command line, and remember it for ``get_args``; arguments as of the two functions."""
    args, faults = _read_words(extra_args_provider, ignore_unknown_args)
    args = _validated(args, args_defaults or {}, faults)
    set_global_variables(args, build_tokenizer=False)
    return args


def settings_of(args: Namespace) -> Settings:
    """Return the settings of a run with these arguments.

    Raises:
        FlagError: arguments that a script has changed since they were validated are refused, or contradict each other.
    """
    origin = _origin_of(args)
    if origin.settings is not None and not _changed(args, origin):
        return origin.settings
    return parse_settings(_words_of(args), world_size=_world_size(args))


def _world_size(args: Namespace) -> int:
    return getattr(args, "world_size", None) or world_size_of_environment()


def _origin_of(args: Namespace) -> _Origin:
    """Return where arguments come from: those of a caller's own parser from a command line without flags."""
    origin: _Origin | None = getattr(args, _ORIGIN, None)
    return origin or _origin_of_words([], build_parser())


def _changed(args: Namespace, origin: _Origin) -> dict[str, Any]:
    """Return the values that the script has set."""
    values = vars(args)
    return {name: values[name] for name, value in origin.values.items() if values.get(name, value) != value}


def _words_of(args: Namespace) -> tuple[str, ...]:
    """Return the command line that gives these arguments.

    Raises:
        FlagError: a value is none that a flag gives.
    """
    origin = _origin_of(args)
    return with_values(origin.words, _changed(args, origin), build_parser())


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
