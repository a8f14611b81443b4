"""Each flag is in effect, always so, or refused; none is ignored, and all faults of a command line are reported at once."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments import build_parser, check_command_line, parse_settings, settings_from_args
from megatron.training.cli.flag_parser import FlagError
from megatron.training.cli.flags_experts import layer_pattern
from megatron.training.cli.flags_of_before import REFUSED_BEFORE, RENAMED
from megatron.training.cli.substitutions import substitute
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS
from megatron.training.cli.words_of_flags import in_plain_words
from pretrain_gpt import main
from tests.support.launch_lines import (
    DEEPSEEK_V3,
    LLAMA3_8B,
    LLAMA3_8B_AS_SERVED,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B_AS_SERVED,
    SMALLEST,
)

MINIMAL = SMALLEST.split()


def _fates(line: str) -> dict[str, set[str]]:
    parser = build_parser()
    fates: dict[str, set[str]] = {"in effect": set(), "always so": set(), "said once": set(), "refused": set()}
    for flag in re.findall(r"--[a-z][a-z0-9-]*", line):
        found = [
            fate
            for fate, holds in (
                ("in effect", flag in parser._option_string_actions),
                ("always so", flag in parser.always_so),
                ("said once", flag in parser.said_once and flag not in parser.always_so),
                ("refused", parser.reason_against(flag) is not None),
            )
            if holds
        ]
        assert len(found) == 1, f"{flag} must have one fate, has {found}"
        fates[found[0]].add(flag)
    return fates


@pytest.mark.parametrize("line", [LLAMA3_8B, DEEPSEEK_V3], ids=["llama3_8b", "deepseek_v3"])
def test_each_flag_of_the_published_launch_lines_has_one_fate(line: str) -> None:
    fates = _fates(line)
    assert len(fates["in effect"]) > 50
    assert fates["always so"] and fates["said once"]


def test_a_launch_line_is_refused_with_every_reason_at_once() -> None:
    line = check_command_line([*DEEPSEEK_V3.split(), "--fim-data", "--mtp-detach-heads"], world_size=8)
    refused = {fate.flag for fate in line.fates if fate.kind == "refused"}
    assert refused and {text.split()[0] for text in line.faults} >= refused
    assert all(" is refused: " in text or " must be " in text for text in line.faults)


@pytest.mark.parametrize("line", [LLAMA3_8B, DEEPSEEK_V3], ids=["llama3_8b", "deepseek_v3"])
def test_a_published_line_starts_as_it_is(line: str) -> None:
    assert check_command_line(line.split(), world_size=8).faults == []


def test_the_launch_line_without_what_is_refused_is_in_effect() -> None:
    settings = parse_settings(LLAMA3_8B_AS_SERVED.split(), world_size=8)
    assert settings.batch.num_microbatches == 16
    assert settings.loop.train_iters == 1953125000 // 128
    assert settings.schedule.warmup_samples == 3906252
    assert settings.data.split == "99,1,0"
    assert settings.model.transformer.layernorm_zero_centered_gamma
    assert settings.model.padded_vocab_size(128256) == 128256
    assert settings.optimizer.decoupled_min_lr == 4.5e-5
    assert settings.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert settings.ddp.transport_kind == "symm" and settings.distributed.create_all_gather_group


def test_the_line_of_a_mixture_is_in_effect() -> None:
    """Scripts contain sequence parallelism over one rank, and the older flags for rotary positions."""
    settings = parse_settings(MIXTRAL_8X7B.split(), world_size=64)
    transformer = settings.model.transformer
    assert settings.tokenizer.kind == "Llama2Tokenizer"
    assert settings.model.position_embedding_type == "rope" and not transformer.sequence_parallel
    assert settings.grid.size("expt_dp") == 2 and settings.ddp.data_parallel_sharding_strategy == "optim"


def test_a_line_of_many_experts_is_in_effect() -> None:
    settings = parse_settings(QWEN3_30B_A3B_AS_SERVED.split(), world_size=32)
    transformer = settings.model.transformer
    assert settings.model.position_embedding_type == "rope" and settings.model.rotary_base == 1000000
    assert (transformer.recompute_granularity, transformer.sequence_parallel) == ("selective", True)
    assert (transformer.moe_router_topk, transformer.moe_z_loss_coeff, transformer.moe_router_dtype) == (
        8,
        1e-3,
        "fp32",
    )
    assert settings.grid.size("expt_tp") == 1 and settings.grid.size("expt_dp") == 2


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--hidden-size 4096", 16384),
        ("--hidden-size 4096 --swiglu", 10880),
        ("--hidden-size 16 --swiglu", 64),
        ("--hidden-size 4096 --swiglu --ffn-hidden-size 14336", 14336),
    ],
)
def test_a_gated_mlp_is_two_thirds_as_wide_unless_told(flags: str, width: int) -> None:
    """As in Megatron-LM, where a launch script may leave the width out."""
    transformer = parse_settings([*MINIMAL, *flags.split(), "--num-experts", "4"], world_size=1).model.transformer
    assert transformer.ffn_hidden_size == width and transformer.moe_ffn_hidden_size is None, "which means the same"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "learned_absolute"),
        ("--no-position-embedding", "none"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--position-embedding-type rope --no-position-embedding --rotary-percent 0.5", "rope"),
    ],
)
def test_positions_by_older_flags(flags: str, expected: str) -> None:
    assert parse_settings([*MINIMAL, *flags.split()], world_size=1).model.position_embedding_type == expected


def test_flags_that_name_a_fact_leave_the_settings_as_they_are() -> None:
    given = [*MINIMAL, "--use-megatron-fsdp", "--use-nccl-ub"]
    facts = [token for flag, so in build_parser().always_so.items() for token in (flag, *so.values[:1])]
    assert build_parser().parse_flags(given + facts) == build_parser().parse_flags(given)


@pytest.mark.parametrize(
    ("flag", "so"),
    [(f, so) for f, so in build_parser().always_so.items() if so.values and f not in build_parser().said_once],
)
def test_another_value_of_a_fact_is_refused(flag: str, so: Any) -> None:
    with pytest.raises(FlagError, match=f"{flag} must be .*got 7"):
        parse_settings([*MINIMAL, flag, "7"], world_size=1)
    with pytest.raises(FlagError, match=f"{flag} takes one value"):
        parse_settings([*MINIMAL, flag], world_size=1)


def test_values_may_follow_an_equals_sign() -> None:
    assert parse_settings([*MINIMAL, "--tensor-model-parallel-size=1", "--seed=7"], world_size=1).loop.seed == 7


def test_every_refusal_has_a_reason_and_is_not_served_elsewhere() -> None:
    parser = build_parser()
    for flag, reason in parser.refused.items():
        assert flag not in {*parser._option_string_actions, *parser.always_so, *parser.said_once}
        assert reason and parser.reason_against(flag) == reason
    for start, reason in parser.refused_families.items():
        assert reason and parser.reason_against(f"{start}of-its-kind") == reason


def test_unknown_flags_are_refused_with_the_nearest_name_and_abbreviations_are_unknown() -> None:
    with pytest.raises(FlagError) as caught:
        parse_settings([*MINIMAL, "--num-layer", "3", "--log-energy", "--no-such-thing"], world_size=1)
    assert "--num-layer is unknown; did you mean --num-layers?" in str(caught.value)
    assert "--log-energy is refused: " in str(caught.value)
    assert "--no-such-thing is unknown; see --help" in str(caught.value), "no far-fetched name"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("--DDP-impl FSDP", "must be local or torch, got FSDP: use --use-megatron-fsdp, which shards"),
        ("--checkpoint-activations", "old name; use --recompute-granularity full --recompute-method uniform"),
        ("--mmap-warmup 4", "--mmap-warmup takes no value, got 4"),
        ("--activation-func gelu", "the activation is GELU by default"),
        ("--num-key-value-heads 8", "no flag of Megatron-LM; use --group-query-attention --num-query-groups"),
        ("--zero-stage 3", "DeepSpeed is not used; --use-megatron-fsdp --data-parallel-sharding-strategy"),
        ("--deepspeed_config ds.json", "DeepSpeed is not used"),
        ("--enable-zero-bubble", "stages take turns by 1F1B or interleaved 1F1B"),
        ("--zero-bubble-v-schedule", "stages take turns by 1F1B or interleaved 1F1B"),
        ("--moe-train-capacity-factor 2", "no flag of Megatron-LM; use --moe-expert-capacity-factor"),
        ("--no-pipeline-parallel", "no flag of Megatron-LM; use nothing: there is one stage unless"),
        ("--tokenizer-type PretrainedFromHF", "it is no tokenizer of Megatron-LM; use HuggingFaceTokenizer with its"),
    ],
)
def test_names_of_old_and_other_launch_scripts_are_refused_with_what_to_use(line: str, remedy: str) -> None:
    (fault,) = build_parser().read(line.split()).faults
    assert remedy in fault and "did you mean" not in fault


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--moe-router-topkk 2", "--moe-router-topkk is unknown; did you mean --moe-router-topk?"),
        ("--fp8-formt hybrid", "--fp8-formt is unknown; did you mean --fp8-format?"),
        ("--embed-layernorm", "--embed-layernorm is unknown; see --help for the flags that are known"),
        ("--patch-size 14", "--patch-size is unknown; see --help for the flags that are known"),
        ("--load", "--load takes one value, got none"),
        ("--save-interval often", "--save-interval must be a whole number, got often"),
        ("--fsdp-memory-budget x", "--fsdp-memory-budget: must be bytes, a fraction, or auto, got x"),
        ("--fsdp-memory-budget 8e9", "--fsdp-memory-budget: must be bytes, a fraction, or auto, got 8e9"),
        ("--fsdp-forward-prefetch-depth x", "--fsdp-forward-prefetch-depth: must be a whole number, or auto, got x"),
        (
            "--suggested-communication-unit-size 1.5",
            "--suggested-communication-unit-size: must be a whole number, or auto, got 1.5",
        ),
        ("--num-experts 64 128", "--num-experts takes one value, got 64 128"),
    ],
)
def test_a_misspelling_is_told_from_a_flag_that_is_only_alike(line: str, fault: str) -> None:
    assert [in_plain_words(found) for found in build_parser().read(line.split()).faults] == [fault]


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--fp8-hybrid --bf16", "--fp8-format hybrid --bf16"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 1",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ),
        ("--use-custom-fsdp true", "--use-megatron-fsdp"),
        ("--train-data=a", "--train-data-path a"),
    ],
)
def test_old_names_of_the_same_are_taken_as_those_of_today(old: str, now: str) -> None:
    assert _outcome(old.split()) == _outcome(now.split()) != _outcome([])
    found = check_command_line([*MINIMAL, *old.split()], world_size=1)
    assert {fate.words for fate in found.fates if fate.flag in RENAMED} <= set(found.said_once)
    assert found.faults == [] and "is taken as --" in found.said_once[0]


def test_the_older_flag_of_decay_of_norms_is_in_effect() -> None:
    flags = ["--qk-layernorm", "--no-weight-decay-cond-type", "apply_wd_to_qk_layernorm"]
    assert parse_settings([*MINIMAL, *flags], world_size=1).optimizer.apply_wd_to_qk_layernorm


def test_old_flags_that_change_no_numbers_are_accepted() -> None:
    flags = "--DDP-impl local --data-impl mmap --mmap-warmup --use-contiguous-buffers-in-local-ddp true --use-dist-ckpt"
    line = check_command_line([*MINIMAL, *flags.split()], world_size=1)
    assert line.faults == [] and len(line.said_once) == 3
    assert _outcome(flags.split()) == _outcome([])


def test_old_names_lead_to_flags_that_are_known() -> None:
    """Each is one of Megatron-LM's own or ours, and no old name again; nobody is sent to a flag that is refused for good."""
    parser = build_parser()
    texts = {**REFUSED_BEFORE, **{flag: " ".join(names) for flag, names in RENAMED.items()}}
    for flag, text in texts.items():
        for other in re.findall(r"--[a-z][a-z0-9-]*[a-z0-9](?![\w.-]*\.)", text):
            known = other in parser._option_string_actions or other in UPSTREAM_FLAGS or other == "--no"
            assert known and other not in REFUSED_BEFORE and other not in RENAMED, (flag, other)


def test_zero_intervals_ask_for_nothing() -> None:
    """As in Megatron-LM, whose launch scripts pass them on."""
    flags = "--exit-interval 0 --exit-duration-in-mins 0 --check-weight-hash-across-dp-replicas-interval 0"
    loop = parse_settings([*MINIMAL, *flags.split()], world_size=1).loop
    assert (loop.exit_interval, loop.exit_duration_mins, loop.check_weight_hash_interval) == (None, None, None)


def test_missing_data_are_one_fault() -> None:
    argv = [word for word in MINIMAL if word != "--mock-data"]
    (fault,) = check_command_line([*argv, "--split", "99,1,0", "--data-path"], world_size=1).faults
    assert fault.startswith("data must be given by --data-path")


@pytest.mark.parametrize(
    "extra", [["--num-layers", "two"], ["--optimizer", "lion"], ["stray"], ["--use-mcore-models", "1"]]
)
def test_malformed_command_lines_are_refused(extra: list[str]) -> None:
    with pytest.raises(FlagError):
        parse_settings([*MINIMAL, *extra], world_size=1)


def test_help_names_every_flag() -> None:
    parser = build_parser()
    text = parser.format_help()
    assert all(action.help for action in parser._actions)
    words = set(re.findall(r"--?[a-zA-Z][\w-]*", text))
    assert {*UPSTREAM_FLAGS, *parser._option_string_actions, *parser.refused} - words == set()


def test_every_spelling_of_megatron_lm_has_one_fate() -> None:
    """In effect, always so, said once, or refused with a reason; a flag may be always so at one value and said at others."""
    parser = build_parser()
    for flag in UPSTREAM_FLAGS:
        fates = (
            flag in parser._option_string_actions,
            flag in parser.always_so or flag in parser.said_once,
            parser.reason_against(flag) is not None,
        )
        assert sum(fates) == 1, flag
    assert len(UPSTREAM_FLAGS) == 878


def test_what_is_said_once_leaves_the_settings_as_they_are() -> None:
    """All flags of the table are accepted at a value of their kind, and each says its words."""
    parser = build_parser()
    flags = []
    for flag in parser.said_once:
        upstream = UPSTREAM_FLAGS.get(flag)
        always = parser.always_so[flag].values if flag in parser.always_so else ()
        choices = [choice for choice in (upstream.choices if upstream else ()) if choice not in always]
        values = [] if upstream is None or upstream.nargs == 0 else [*choices, "1"][:1]
        flags += [flag, *values]
    line = check_command_line([*MINIMAL, *flags], world_size=1)
    assert line.faults == [] and len(line.said_once) == len(parser.said_once)
    assert _outcome(flags) == _outcome([])


@pytest.mark.parametrize("switch", ["--bf16", "--no-rope-fusion", "--use-mcore-models", "--fp16", "--use-sharp"])
def test_switches_may_be_given_as_true_or_false(switch: str) -> None:
    """As the launchers of Megatron-LM's tests write them; ``false`` asks for nothing, of a refused flag too."""
    assert _outcome([switch, "false"]) == _outcome([]) and _outcome([switch, "False"]) == _outcome([])
    assert _outcome([switch, "true"]) == _outcome([switch]) and _outcome([switch, "True"]) == _outcome([switch])
    assert _outcome([switch, "1"])[0], "which is no word for it"


@pytest.mark.parametrize("switch", ["--bf16", "--no-rope-fusion", "--mock-data", "--swiglu"])
def test_the_last_word_of_a_switch_counts(switch: str) -> None:
    """A launcher that adds ``false`` to a line that has the switch already."""
    assert _outcome([switch, switch, "false"]) == _outcome([switch, "false", switch, "false"])
    assert vars(_outcome([switch, switch, "false"])[1]) == vars(build_parser().read(_without(switch)).args)
    assert _outcome([switch, "false", switch]) == _outcome([switch])


def _without(switch: str) -> list[str]:
    return [word for word in MINIMAL if word != switch]


def _outcome(flags: list[str]) -> tuple[int, Namespace]:
    """The number of faults, and the settings of the flags in effect."""
    line = build_parser().read([*MINIMAL, *flags])
    return len(line.faults), line.args


@pytest.mark.parametrize(
    "flags", ["--softmax-type vanilla", "--hysteresis 2", "--no-rl-partial-rollouts", "--fp8-interval 1"]
)
def test_a_refused_flag_at_its_default_asks_for_nothing(flags: str) -> None:
    assert _outcome(flags.split()) == _outcome([])


def test_manual_registration_needs_symmetric_memory() -> None:
    with pytest.raises(FlagError, match="--fsdp-manual-registration needs --use-nccl-ub"):
        parse_settings([*MINIMAL, "--use-megatron-fsdp", "--fsdp-manual-registration"], world_size=1)
    parse_settings([*MINIMAL, "--use-megatron-fsdp", "--fsdp-manual-registration", "--use-nccl-ub"], world_size=1)


@pytest.mark.parametrize("version", ["1", "2"])
def test_both_versions_of_the_engine_are_the_one_that_is_here(version: str) -> None:
    assert _outcome(["--megatron-fsdp-version", version]) == _outcome([])


def test_faults_of_all_kinds_come_at_once() -> None:
    """Malformed, unknown, refused, contradicting flags, and what two components refuse."""
    argv = [
        *MINIMAL,
        "--lr",
        "fast",
        "--no-such-thing",
        "--log-energy",
        "--lr-warmup-fraction",
        "2",
        "--hidden-size",
        "18",
    ]
    line = check_command_line([*argv, "--global-batch-size", "3", "--normalization", "None"], world_size=2)
    openings: tuple[str, ...] = (
        "--lr must be a number, got fast",
        "--no-such-thing is unknown",
        "--log-energy is refused",
        "--normalization must be one of LayerNorm, RMSNorm, got",
    )
    openings += ("--lr-warmup-fraction must be", "--global-batch-size must be", "--save-interval must be")
    assert len(line.faults) == 6
    assert all(fault.startswith(openings) and "\n" not in fault for fault in line.faults)
    two = check_command_line([*MINIMAL, "--hidden-size", "18", "--hidden-dropout", "2"], world_size=1)
    assert [fault.split()[0] for fault in two.faults] == ["--hidden-size", "--hidden-dropout"]


def test_all_reasons_are_said_in_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Few on a line each; many together, flags that are refused for the same reason once."""
    assert main([*MINIMAL, "--lr", "fast", "--log-energy"]) == 2
    start = "pretrain_gpt.py: error: "
    assert [line.removeprefix(start) for line in capsys.readouterr().err.splitlines()] == [
        "--lr must be a number, got fast",
        "--log-energy is refused: energy is not measured",
    ]
    many = "--retro-workdir x --retro-add-retriever --vision-pretraining --no-such-thing --hidden-size y --lr fast --log-energy"
    assert main([*MINIMAL, *many.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(start) for line in lines)
    assert lines[0].startswith(
        f"{start}6 reasons: (1) --retro-workdir, --retro-add-retriever are refused: retrieval models"
    )
    for reason in (
        "(2) --vision-pretraining is refused",
        "--no-such-thing is unknown",
        "--hidden-size must be a whole number",
    ):
        assert reason in lines[0]
    assert lines[1] == f"{start}tools/check_launch.py prints each on a line of its own"


@pytest.mark.parametrize(
    ("flags", "opening"),
    [
        ("--num-attention-heads 5", "--hidden-size must be a multiple of --num-attention-heads, got 16 and 5"),
        ("--tensor-model-parallel-size 3", "the number of ranks must be a multiple of --tensor-model-parallel-size *"),
        ("--split 0,0,0", "--split must be parts of the data, such as 969,30,1, got 0,0,0"),
        ("--split a", "--split must be parts of the data, such as 969,30,1, got a"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size must be 1 without --num-experts, got 2"),
        ("--fp8-format hybrid --bf16 --num-experts 4", "--fp8-format must go with --moe-grouped-gemm"),
        ("--hybrid-layer-pattern M* -", "--hybrid-layer-pattern takes one value, got M* -"),
    ],
)
def test_mistakes_are_named_in_the_words_of_the_command_line(flags: str, opening: str) -> None:
    """In one line each, by flags, and without names of fields or classes."""
    faults = check_command_line([*MINIMAL, *flags.split()], world_size=2).faults
    assert any(fault.startswith(opening) for fault in faults), faults
    assert not any(re.search(r"Config|\b[a-z]+_[a-z_]+\b", fault) for fault in faults), faults


class _RecordingNamespace(Namespace):
    """A namespace that records which flags were read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_read").add(name)
        return object.__getattribute__(self, name)


def _read_flags(argv: list[str]) -> set[str]:
    args = build_parser().parse_flags(argv)
    read: set[str] = set()
    recording = _RecordingNamespace()
    recording._read = read
    recording.__dict__.update(vars(args))
    substitute(recording)
    settings_from_args(recording, world_size=1)
    return read


def test_every_flag_is_read_into_the_settings() -> None:
    everything = _read_flags(MINIMAL) | _read_flags([*MINIMAL, "--swiglu", "--group-query-attention"])
    everything |= _read_flags([*MINIMAL, "--use-torch-fsdp2"]) | _read_flags([*MINIMAL, "--multi-latent-attention"])
    everything |= _read_flags(
        [*MINIMAL, "--weight-decay-incr-style", "linear", "--start-weight-decay", "0", "--end-weight-decay", "1"]
    )
    dests = {action.dest for action in build_parser()._actions if action.dest != "help"}
    # Files that stand for other flags (test_data_args.py).
    assert dests - everything == {"data_args_path", "per_split_data_args_path"}


def test_every_setting_is_read_by_a_component() -> None:
    """A field that no code reads would be a flag that is accepted and ignored."""
    settings = parse_settings(MINIMAL, world_size=1)
    megatron = Path(__file__).resolve().parents[3] / "megatron"
    mapping = {megatron / "training/arguments.py", *(megatron / "training/cli").glob("*.py")}
    components = {
        *(megatron / "training").rglob("*.py"),
        *(megatron / "core/optimizer").glob("*.py"),
        *(megatron / "core/tokenizers").glob("*.py"),
        megatron / "core/full_cuda_graph.py",
    }
    text = "\n".join(path.read_text() for path in components - mapping)
    for part in dataclasses.fields(settings):
        if part.name in ("ddp", "grid", "said_once"):
            continue  # the engine's own, geometry, and words: their tests see to it
        component = getattr(settings, part.name)
        # Fields of Megatron-Core that have one value alone: tests/core/test_checked_config.py sees to them.
        fixed = getattr(type(component), "served", {})
        for field in dataclasses.fields(component):
            if field.name in fixed:
                continue
            assert re.search(rf"\.{field.name}\b|\"{field.name}\"", text), f"{part.name}.{field.name} is never read"


def test_ranks_that_split_the_model_share_samples() -> None:
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    flags += " --attention-dropout 0 --use-tp-pp-dp-mapping"
    settings = parse_settings([*MINIMAL, *flags.split()], world_size=16)
    assert (settings.batch.data_parallel_size, settings.batch.global_batch_size) == (2, 4)
    assert settings.grid.groups("dp").tolist()[0] == [0, 8] and settings.grid.groups("pp").tolist()[0] == [0, 4]
    transformer = settings.model.transformer
    assert transformer.sequence_parallel and transformer.cp_comm_type is None, "which means p2p"
    by_layer = parse_settings([*MINIMAL, *flags.split(), "--cp-comm-type", "p2p", "all_gather"], world_size=16)
    assert by_layer.model.transformer.cp_comm_type == ["p2p", "all_gather"]


def test_experts_and_their_router_reach_the_model() -> None:
    flags = "--num-experts 4 --moe-layer-freq ([0]+[1]*1) --moe-router-topk 3 --moe-aux-loss-coeff 0.1"
    settings = parse_settings([*MINIMAL, *flags.split(), "--expert-model-parallel-size", "2"], world_size=4)
    transformer = settings.model.transformer
    assert (transformer.num_moe_experts, transformer.moe_layer_freq, transformer.moe_router_topk) == (4, [0, 1], 3)
    assert transformer.moe_aux_loss_coeff == 0.1 and settings.grid.size("expt_dp") == 2
    flags = "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 1e-2"
    transformer = parse_settings([*MINIMAL, *flags.split()], world_size=1).model.transformer
    assert transformer.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
    assert transformer.moe_aux_loss_coeff == [0.1, 0.01]


def test_hybrid_sharding_reaches_the_engine() -> None:
    flags = "--use-megatron-fsdp --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"
    settings = parse_settings([*MINIMAL, *flags.split()], world_size=4)
    ddp = settings.ddp
    assert (ddp.num_distributed_optimizer_instances, ddp.outer_dp_sharding_strategy) == (2, "optim")
    assert settings.grid.groups("intra_dp_cp").tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("text", "expected"), [("2", 2), ("[0,1]", [0, 1]), ("([0]*3 + [1]*2)", [0, 0, 0, 1, 1]), ("[0,1]*2", [0, 1] * 2)]
)
def test_a_pattern_of_layers_is_a_number_or_a_sum_of_lists(text: str, expected: Any) -> None:
    assert layer_pattern(text) == expected


@pytest.mark.parametrize("text", ["", "1+1", "[1]*[1]", "['1']", "[0]*99999999", "__import__('os')", "[[1]]"])
def test_another_pattern_of_layers_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number or an expression"):
        layer_pattern(text)


def test_the_model_has_the_ids_that_are_asked_for() -> None:
    def ids(flags: str, *, tensor_ranks: int = 1) -> int:
        argv = [*MINIMAL, *flags.split(), "--tensor-model-parallel-size", str(tensor_ranks)]
        return parse_settings(argv, world_size=tensor_ranks).model.padded_vocab_size(257)

    assert (ids(""), ids("--make-vocab-size-divisible-by 10"), ids("--no-pad-vocab-size")) == (384, 260, 257)
    assert ids("--padded-vocab-size 300") == ids("--no-pad-vocab-size --padded-vocab-size 300") == 300
    with pytest.raises(ValueError, match="--padded-vocab-size must be at least the 257 ids of the tokenizer, got 256"):
        ids("--padded-vocab-size 256")
    with pytest.raises(
        ValueError, match=r"--no-pad-vocab-size needs ids that --tensor-model-parallel-size \(4\) divides, got 257"
    ):
        ids("--no-pad-vocab-size", tensor_ranks=4)
    # The ranks divide the number, and where they divide the multiple, it does not depend on them.
    assert ids("", tensor_ranks=4) == ids("") == 384
    assert ids("--make-vocab-size-divisible-by 1", tensor_ranks=4) == 260
    assert ids("--make-vocab-size-divisible-by 10", tensor_ranks=4) == 260
    assert ids("--make-vocab-size-divisible-by 6", tensor_ranks=4) == 264
    argv = [*MINIMAL, "--tensor-model-parallel-size", "4"]
    assert parse_settings(argv, world_size=4).model.upstream_vocab_size(257) == 512, "in Megatron-LM"


def test_a_line_that_names_no_tokenizer_has_gpt2s_where_its_files_are_given() -> None:
    """As in Megatron-LM, whose launch lines rely on it; without files text is bytes, which needs none."""
    files = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
    assert parse_settings([*MINIMAL, *files], world_size=1).tokenizer.kind == "GPT2BPETokenizer"
    assert parse_settings(MINIMAL, world_size=1).tokenizer.kind == "ByteLevelTokenizer"
    shrunk = [*MINIMAL, *files, "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    settings = parse_settings(shrunk, world_size=1)
    assert settings.tokenizer.kind == "NullTokenizer"
    assert settings.tokenizer.not_read() == ["vocab_file", "merge_file"]


def test_schedule_counts_samples_whatever_it_was_given_in() -> None:
    by_iterations = parse_settings([*MINIMAL, "--lr-warmup-iters", "1", "--lr-decay-iters", "3"], world_size=2)
    assert (by_iterations.schedule.warmup_samples, by_iterations.schedule.decay_samples) == (4, 12)
    assert by_iterations.schedule.weight_decay_incr_samples == 16
    by_fraction = parse_settings([*MINIMAL, "--lr-warmup-fraction", "0.25"], world_size=2)
    assert by_fraction.schedule.warmup_samples == 4.0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (torch.float32, torch.float32, torch.float32)),
        (["--bf16"], (torch.float32, torch.float32, torch.float32)),
        (["--bf16", "--grad-reduce-in-bf16"], (torch.float32, torch.bfloat16, torch.bfloat16)),
        (["--bf16", "--megatron-fsdp-grad-comm-dtype", "bf16"], (torch.float32, torch.float32, torch.bfloat16)),
        (["--bf16", "--megatron-fsdp-main-grads-dtype", "bf16"], (torch.float32, torch.bfloat16, torch.bfloat16)),
        (["--bf16", "--megatron-fsdp-main-params-dtype", "auto"], (torch.bfloat16, torch.float32, torch.float32)),
        (["--bf16", "--accumulate-allreduce-grads-in-fp32"], (torch.float32, torch.float32, torch.float32)),
        (["--bf16", "--use-precision-aware-optimizer"], (torch.bfloat16, torch.float32, torch.float32)),
        (
            ["--bf16", "--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"],
            (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ),
    ],
)
def test_dtypes_of_main_weights_and_gradients(flags: list[str], expected: tuple[torch.dtype, ...]) -> None:
    ddp = parse_settings([*MINIMAL, *flags], world_size=1).ddp
    got = (ddp.megatron_fsdp_main_params_dtype, ddp.megatron_fsdp_main_grads_dtype, ddp.megatron_fsdp_grad_comm_dtype)
    assert got == expected


def test_the_precision_aware_optimizer_keeps_remainders() -> None:
    flags = ["--bf16", "--use-precision-aware-optimizer"]
    assert parse_settings([*MINIMAL, *flags], world_size=1).optimizer.store_param_remainders
    assert not parse_settings([*MINIMAL, "--bf16"], world_size=1).optimizer.store_param_remainders


@pytest.mark.parametrize(("kind", "remainders"), [(["--bf16"], True), (["--fp16"], False), ([], True)])
def test_the_precision_aware_optimizer_keeps_moments_in_fewer_bits(kind: list[str], remainders: bool) -> None:
    """Whatever the model's dtype: there are bf16 weights with remainders in bf16 models alone."""
    flags = [*kind, "--use-precision-aware-optimizer", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16"]
    settings = parse_settings([*MINIMAL, *flags], world_size=1)
    config = settings.optimizer
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype) == (torch.uint8, torch.float16)
    assert config.store_param_remainders == remainders
    assert (settings.ddp.megatron_fsdp_main_params_dtype == torch.bfloat16) == (kind == ["--bf16"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--bf16 --exp-avg-dtype bf16",
            "--exp-avg-dtype must be fp32 without --use-precision-aware-optimizer, got bf16",
        ),
        (
            "--bf16 --exp-avg-sq-dtype fp8",
            "--exp-avg-sq-dtype must be fp32 without --use-precision-aware-optimizer, got fp8",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload",
            "--exp-avg-dtype and --exp-avg-sq-dtype must be fp32 with --optimizer-cpu-offload, got bf16 and fp32",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer muon",
            "needs --optimizer adam, got muon",
        ),
    ],
)
def test_moments_in_fewer_bits_are_refused_where_they_are_not_kept(flags: str, words: str) -> None:
    faults = check_command_line([*MINIMAL, *flags.split()], world_size=1).faults
    assert len(faults) == 1 and words in faults[0], faults


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ([], "no_shard"),
        (["--use-distributed-optimizer"], "optim"),
        (["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"], "optim_grads"),
        (["--use-megatron-fsdp"], "optim_grads_params"),
        (["--use-megatron-fsdp", "--use-distributed-optimizer"], "optim_grads_params"),
        (["--use-torch-fsdp2"], "optim_grads_params"),
        (["--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"], "optim_grads"),
    ],
)
def test_what_is_sharded(flags: list[str], strategy: str) -> None:
    assert parse_settings([*MINIMAL, *flags], world_size=1).ddp.data_parallel_sharding_strategy == strategy


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], "auto"),
        (["--use-nccl-ub"], "symm"),
        (["--use-nccl-ub", "--fsdp-transport", "symm"], "symm"),
        (["--fsdp-transport", "nccl"], "nccl"),
        (["--fsdp-transport", "peer_copy"], "peer_copy"),
    ],
)
def test_what_moves_bytes(flags: list[str], kind: str) -> None:
    assert parse_settings([*MINIMAL, *flags], world_size=1).ddp.transport_kind == kind


@pytest.mark.parametrize(("text", "budget"), [("0.25", 0.25), ("8589934592", 2**33)])
def test_a_memory_budget_is_bytes_or_a_fraction(text: str, budget: float) -> None:
    flags = [*MINIMAL, "--use-megatron-fsdp", "--fsdp-memory-budget"]
    assert parse_settings([*flags, text], world_size=2).ddp.fsdp_memory_budget == budget
    with pytest.raises(FlagError, match="--fsdp-memory-budget must be bytes, or a fraction"):
        parse_settings([*flags, "1.25"], world_size=1)


def test_errors_of_components_name_what_must_hold() -> None:
    with pytest.raises(FlagError, match="multiple of --micro-batch-size"):
        parse_settings([*MINIMAL, "--global-batch-size", "6"], world_size=2)
    with pytest.raises(FlagError, match="--hidden-size must be a multiple of --num-attention-heads"):
        parse_settings([*MINIMAL, "--num-attention-heads", "3"], world_size=1)


def test_the_parser_is_no_place_for_defaults_of_dataclasses_to_hide() -> None:
    """argparse would take a later default over an explicit None."""
    assert isinstance(build_parser(), argparse.ArgumentParser)
    assert parse_settings(MINIMAL, world_size=3).batch.global_batch_size == 6


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("--step-batch-size-schedule 0:4 --global-batch-size 4", ()),
        # seq-length 8: tokens are turned into samples
        ("--step-batch-size-schedule '1K:8,0:4,0.01M:16'", ((0, 4), (125, 8), (1250, 16))),
        ("--rampup-batch-size 4 2 9 --global-batch-size 10", ((0, 4), (3, 6), (6, 8), (9, 10))),
        ("--rampup-batch-size 4 2 1 --global-batch-size 8", ((0, 4), (1, 8))),
        ("--rampup-batch-size 4 2 9 --global-batch-size 4", ()),
    ],
)
def test_batch_sizes_that_grow(flags: str, schedule: tuple[tuple[int, int], ...]) -> None:
    settings = parse_settings([*MINIMAL, *shlex.split(flags)], world_size=1)
    assert settings.batch.schedule == schedule
    assert settings.loop.train_iters == 4
    # Schedules count an iteration as one of the full batch, as in Megatron-LM.
    lengths = (settings.schedule.decay_samples, settings.schedule.weight_decay_incr_samples)
    assert lengths == (4 * settings.batch.global_batch_size,) * 2


@pytest.mark.parametrize(
    "flags",
    [
        "--step-batch-size-schedule 4",
        "--step-batch-size-schedule 8:4",
        "--step-batch-size-schedule 0:4,0:8",
        "--step-batch-size-schedule 0:4,1K:8 --global-batch-size 4",
        "--rampup-batch-size 4 3 9 --global-batch-size 8",
        "--rampup-batch-size 4 2 9",
        "--eval-global-batch-size 3",
    ],
)
def test_batch_sizes_that_cannot_grow_so_are_refused(flags: str) -> None:
    with pytest.raises(FlagError, match=rf"{'--global-batch-size' if '1K' in flags else flags.split()[0]} must be"):
        parse_settings([*MINIMAL, *flags.split()], world_size=1)


@pytest.mark.parametrize(
    ("flags", "faults"),
    [
        ("-num-layers 3", ["-num-layers is unknown; did you mean --num-layers?"]),
        ("\N{EM DASH}num-layers=3", ["\N{EM DASH}num-layers is unknown; did you mean --num-layers?"]),
        ("--bf16 # comment", ["--bf16 takes no value, got # comment"]),
        ("--lr -1e-4", ["--min-lr must be from 0 to the learning rate, got 0.0 and -0.0001"]),
        ("--adam-eps -1", ["--adam-eps must not be negative, got -1.0"]),
        ("--init-method-std nan", ["--init-method-std must not be negative, got nan"]),
        ("--weight-decay -0.1", ["--weight-decay must not be negative, got -0.1"]),
        ("--tensor-model-parallel-size 0", ["--tensor-model-parallel-size must be at least 1, got 0"]),
        (
            "--context-parallel-size 0 --tensor-model-parallel-size 2 --sequence-parallel",
            ["--context-parallel-size must be at least 1, got 0"],
        ),
        ("--fp16 --bf16", ["--fp16 and --bf16 exclude each other; give one"]),
        (
            "--nproc_per_node 8",
            ["--nproc_per_node is refused: torchrun takes it: give it before the name of the script"],
        ),
    ],
)
def test_slips_are_one_fault_in_plain_words(flags: str, faults: list[str]) -> None:
    assert check_command_line([*MINIMAL, *flags.split()], world_size=1).faults == faults
