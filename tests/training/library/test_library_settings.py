"""A script for Megatron-LM gets the settings and notices of ``pretrain_gpt.py`` with the same command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core.distributed.fsdp.checkpoint import write_alone
from megatron.training.arguments import (
    Settings,
    add_megatron_arguments,
    parse_and_validate_args,
    parse_args,
    parse_settings,
    validate_args,
)
from megatron.training.cli.flag_parser import FlagError
from megatron.training.global_vars import unset_global_variables
from megatron.training.library.flags import settings_of
from tests.support.golden_settings import changes, flat, golden_text
from tests.support.megatron_lines import LaunchLine
from tests.support.tiny_run import TINY


@pytest.fixture(autouse=True)
def _no_arguments_are_kept() -> Iterator[None]:
    yield
    unset_global_variables()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what sets this process's command line."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    return lambda line: monkeypatch.setattr("sys.argv", ["train.py", *line.split()])


def _add_own(parser: Any) -> Any:
    parser.add_argument("--own-flag", nargs="+", default=["a"])
    parser.set_defaults(lr=0.5)
    return parser


def test_launch_lines_have_the_settings_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_library(line: LaunchLine, ranks: int) -> Settings:
        monkeypatch.setattr("sys.argv", ["train.py", *line.argv])
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        unset_global_variables()
        return settings_of(parse_and_validate_args())

    assert changes(golden_text(by_library)) == ""


def test_launch_lines_have_these_settings_by_a_parser_of_the_caller() -> None:
    """It knows values, not whether they were typed: notices about flags at their defaults are not given."""

    def by_own_parser(line: LaunchLine, ranks: int) -> Settings:
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        try:
            args = parser.parse_args(line.argv)
        except SystemExit:  # a few lines have lists in quotes, flags of earlier versions and words that are no numbers
            return parse_settings(line.argv, world_size=ranks)
        args.rank, args.world_size = 0, ranks
        return settings_of(validate_args(args))

    rows = [row for row in changes(golden_text(by_own_parser)).splitlines() if row[0] in "+-"][2:]
    assert all(row.startswith(("-notice: --error-injection-type", "-notice: --rerun-mode")) for row in rows), rows


def test_the_model_comes_from_the_checkpoint(typed: Any, tmp_path: Path) -> None:
    saved = dict(parse_settings(f"{TINY} --swiglu".split()).megatron_lm.values)
    write_alone(tmp_path / "iter_0000003", [], {"extra_state.args": saved, "extra_state.architecture": {}})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    typed(f"{TINY} --load {tmp_path} --use-checkpoint-args")
    args = parse_and_validate_args()
    assert args.swiglu and settings_of(args).model.transformer.gated_linear_unit
    assert "swiglu is True, from the checkpoint" in settings_of(args).said_once.lines


def test_data_paths_come_from_a_file(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.3 one 0.7 two")
    typed(f"{TINY.replace('--mock-data', '')} --data-args-path {tmp_path / 'blend'}")
    assert settings_of(parse_and_validate_args()).data.data_path == ("0.3", "one", "0.7", "two")


@pytest.mark.parametrize("flag", ["--fsdp-memory-budget", "--fsdp-forward-prefetch-depth"])
def test_values_for_the_tuner_need_the_tuner(flag: str, typed: Any) -> None:
    typed(f"{TINY} --use-megatron-fsdp {flag} auto")
    with pytest.raises(FlagError, match=f"{flag} auto needs --fsdp-tune"):
        parse_and_validate_args()
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with pytest.raises(FlagError, match=f"{flag} auto needs --fsdp-tune"):
        validate_args(parser.parse_args(f"{TINY} {flag} auto".split()))


def test_arguments_have_megatron_lms_names(typed: Any) -> None:
    line = f"{TINY} --norm-epsilon 0.5 --log-straggler --step-batch-size-schedule 0:8"
    typed(f"{line} --own-flag b c")
    args = parse_and_validate_args(_add_own)
    assert settings_of(args).megatron_lm == parse_settings(line.split()).megatron_lm
    assert (args.layernorm_epsilon, args.log_straggler, args.own_flag) == (0.5, True, ["b", "c"])
    assert args.step_batch_size_schedule == "0:8", "get_num_microbatches reads it as a text"


def test_what_a_script_sets_is_in_effect_or_refused(typed: Any) -> None:
    line = f"{TINY.replace('--mock-data', '')} --hidden-dropout=0.2"
    typed(f"{line} --swiglu --window-size 8,0 --lr 0.1 --own-flag b c --no-such-flag 3")
    args = parse_args(_add_own, ignore_unknown_args=True)
    assert args.lr == 0.1, "the command line overrides the provider's defaults"
    args.swiglu, args.window_size, args.num_layers = False, (4, 0), 3
    args.num_experts, args.moe_layer_freq = 4, [0, 1, 1]
    args.data_path, args.wandb_project, args.wandb_exp_name = ["1", "c"], "--p", "two words"
    args = validate_args(args, {"padded_vocab_size": 128})
    typed_so = (
        f"{line} --window-size 4,0 --lr 0.1 --num-layers 3 --num-experts 4 --moe-layer-freq [0,1,1] "
        "--padded-vocab-size 128 --wandb-project=--p"
    )
    expected = parse_settings([*typed_so.split(), "--data-path", "1", "c", "--wandb-exp-name", "two words"])
    assert dict(flat(settings_of(args))) == dict(flat(expected))
    assert settings_of(args) is settings_of(args), "settings are made once"
    args.num_layers, args.moe_layer_freq = 4, 1
    assert settings_of(args).model.transformer.num_layers == 4
    args.log_energy = True
    with pytest.raises(FlagError, match="--log-energy is refused"):
        settings_of(args)
