"""A launch line is completed by what was tuned for it: what it does not name, and nothing that changes numbers unasked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core.distributed.fsdp.tuner import Measured, Visit, choices_in_words
from megatron.training.arguments import Settings, parse_settings
from megatron.training.cli.flag_parser import FlagError
from megatron.training.launch.pretrain import set_up, training_step
from megatron.training.launch.refusals import StartRefusedError
from megatron.training.launch.rendezvous import meet
from megatron.training.tuner.flags_of_choices import flags_of, named_on
from megatron.training.tuner.planned import plan_nbytes
from megatron.training.tuner.tuned import Refusals, choices_of, tuned, what_it_is
from tests.support.tiny_run import SHARDED, TINY

_LINE = f"{TINY} {SHARDED} --fsdp-tune"
_VISIT = Visit(
    seconds=(1.0,),
    peak_nbytes=0,
    spare_nbytes=2**40,
    total_nbytes=2**40,
    facts={"transports": ["gloo"], "unsharded_nbytes": 2**30, "largest_unit_nbytes": 2**20, "largest_unit_numel": 7},
)


def _settings(line: str, world_size: int = 2) -> Settings:
    return parse_settings(line.split(), world_size=world_size)


def _names(line: str, world_size: int = 2) -> set[str]:
    """What may be chosen for a launch line."""
    settings = _settings(line, world_size)
    best = Measured(name="as given", settings={}, visits=[_VISIT])
    choices = choices_of(settings, settings.launch_line.words)
    return {name for choice in choices for option in choice.options_beside(best) for name in option}


_ALL = {
    "fsdp_transport",
    "create_all_gather_group",
    "fsdp_forward_prefetch_depth",
    "fsdp_backward_prefetch_depth",
    "suggested_communication_unit_size",
    "fsdp_memory_budget",
}


def test_what_a_launch_line_names_stays() -> None:
    assert _names(_LINE) == _names(f"{_LINE} --fsdp-transport auto") == _ALL
    assert _names(f"{_LINE} --overlap-param-gather --fsdp-memory-budget 1000") == _ALL - {
        "overlap_param_gather",
        "fsdp_memory_budget",
    }
    assert named_on(["--fsdp-transport=auto", "--use-nccl-ub", "--micro-batch-size", "2"]) == {"fsdp_transport"}


def test_auto_leaves_single_settings_to_the_tuner_alone() -> None:
    autos = "--overlap-param-gather --fsdp-memory-budget auto --fsdp-forward-prefetch-depth=auto"
    assert _names(f"{_LINE} {autos}") == {"fsdp_memory_budget", "fsdp_forward_prefetch_depth"}
    assert _names(f"{_LINE} --suggested-communication-unit-size auto --fsdp-transport auto") == {
        "suggested_communication_unit_size",
        "fsdp_transport",
    }
    ddp = _settings(f"{_LINE} {autos}").ddp
    assert (ddp.fsdp_memory_budget, ddp.fsdp_forward_prefetch_depth) == (None, 1), "until it has chosen"
    with pytest.raises(FlagError, match="--fsdp-memory-budget auto needs --fsdp-tune, which chooses a value"):
        _settings(f"{TINY} {SHARDED} {autos}")


def test_the_order_of_sums_changes_only_on_the_users_word() -> None:
    """Other transports add in another order: those may be chosen that "auto" may choose."""
    assert "fsdp_transport" not in _names(f"{_LINE} --fsdp-transport nccl")
    assert "fsdp_transport" not in _names(f"{_LINE} --deterministic-mode")
    also = _names(f"{_LINE} --fsdp-tune-also micro-batch-size in-place-gradients layers-per-unit")
    in_place = {"gradient_accumulation_fusion_min_numel", "no_gradient_accumulation_fusion"}
    assert also - _ALL == {"micro_batch_size", "fsdp_layers_per_unit"} | in_place
    given = "--fsdp-tune-also layers-per-unit --fsdp-layers-per-unit 3"
    assert "fsdp_layers_per_unit" not in _names(f"{_LINE} {given}")
    assert not in_place & _names(f"{_LINE} --fsdp-tune-also in-place-gradients --no-gradient-accumulation-fusion")


def test_only_what_can_matter_is_measured() -> None:
    assert "fsdp_memory_budget" not in _names(_LINE.replace("optim_grads_params", "optim_grads"))
    assert _names(f"{_LINE} --context-parallel-size 2") == _ALL, "which shard weights like data-parallel ranks"
    assert _names(_LINE, world_size=1) == {"fsdp_memory_budget"}, "one rank may cast weights for each pass"
    assert _names(_LINE.replace("optim_grads_params", "optim_grads"), world_size=1) == set()


def test_a_micro_batch_that_cannot_fit_is_not_tried() -> None:
    """Its memory is planned; with a device of 1 GiB the tiny model fits, with one of 1 MiB it does not."""
    words, asked = _LINE.replace("--fsdp-tune", "").split(), list[int]()

    def plan(words: list[str], *, world_size: int) -> int | None:
        planned = plan_nbytes(words, world_size)
        assert planned is not None
        asked.append(planned)
        return planned

    larger = {"micro_batch_size": 4}
    assert Refusals(words, 2, 2**34, plan)(larger) is None
    assert re.match(
        r"it is planned to take .* GiB, and a device has 0\.0", Refusals(words, 2, 2**20, plan)(larger) or ""
    )
    assert len(asked) == 2 and 2**20 < asked[0] < 2**34
    assert Refusals(words, 2, None, plan)(larger) is None and Refusals(words, 2, 1, plan)({}) is None
    off = Refusals([*words, "--no-overlap-param-gather"], 2, None)({"fsdp_forward_prefetch_depth": 2})
    assert "must be left out with --no-overlap-param-gather" in (off or "")


def test_a_graph_is_a_choice_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _LINE.replace("--distributed-backend gloo", "")
    assert "cuda_graph_impl" not in _names(line)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "cuda_graph_impl" in _names(line)
    assert "cuda_graph_impl" not in _names(f"{line} --cuda-graph-impl none")


def _tuned(line: str) -> Settings:
    settings = _settings(line, world_size=1)
    return tuned(
        settings,
        meet(settings.distributed.timeout),
        set_up=set_up,
        make_step=training_step,
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        forward_step=pretrain_gpt.forward_step,
    )


def _write(file: Path, line: str, chosen: dict[str, Any], **of: str) -> None:
    """Write what an earlier run has chosen for this line on one rank."""
    own = {"number of ranks": "1", "ranks on each host": "1", "devices": "CPU", "version of torch": torch.__version__}
    settings = _settings(line, world_size=1)
    own["choices"] = choices_in_words(choices_of(settings, settings.launch_line.words))
    entry = {
        "of": {**own, **what_it_is(settings), **of},
        "settings": chosen,
        "reason": "it was faster",
        "when": "2026-11-23",
        "measured": [["as given", "1 ms"]],
    }
    form = "settings chosen by the tuner of fully sharded data parallelism"
    file.write_text(json.dumps({"format": form, "version": 1, "entries": [entry]}))


def test_a_file_completes_the_launch_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuned.json"
    line = f"{TINY} {SHARDED} --fsdp-tune {file}"
    _write(
        file,
        line,
        {"overlap_param_gather": True, "fsdp_forward_prefetch_depth": 3, "suggested_communication_unit_size": 5000},
    )
    settings = _tuned(f"{line} --lr 1e-5 --log-interval 7 --train-iters 9")
    assert (settings.ddp.fsdp_forward_prefetch_depth, settings.ddp.suggested_communication_unit_size) == (3, 5000)
    assert settings.loop.train_iters == 9
    said = capsys.readouterr().out
    assert (
        f"the settings of {file}, measured 2026-11-23: --overlap-param-gather --fsdp-forward-prefetch-depth 3" in said
    )
    assert _settings(f"{TINY} --save {tmp_path} --fsdp-tune").tuning.file == str(tmp_path / "fsdp_tuned.json")


def test_a_file_cannot_set_what_the_tuner_does_not_choose(tmp_path: Path) -> None:
    """It is data: not a way to change the model, or what is loaded."""
    file = tmp_path / "tuned.json"
    line = f"{TINY} {SHARDED} --fsdp-tune {file}"
    for chosen in (
        {"load": "/x"},
        {"micro_batch_size": "--load"},
        {"micro_batch_size": "2"},
        {"fsdp_transport": "--save=/x"},
        {"fsdp_transport": "nccl --save /x"},
        {"fsdp_forward_prefetch_depth": -1},
        {"cuda_graph_impl": ["none", "--save=/x"]},
        {"fsdp_memory_budget": [1]},
        {"overlap_param_gather": 0},
    ):
        _write(file, line, chosen)
        with pytest.raises(
            StartRefusedError, match=r"tuned.json: (tuned settings must be among|\w+, which is --\S+, must be )"
        ):
            _tuned(line)


def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text("{")
    with pytest.raises(StartRefusedError, match=r"--fsdp-tune .*tuned.json: .* must be a file of tuned settings"):
        _tuned(f"{TINY} {SHARDED} --fsdp-tune {file}")


@pytest.mark.parametrize(
    "other",
    [
        "--hidden-size 64",
        "--micro-batch-size 1",
        "--bf16",
        "--seq-length 8",
        "--optimizer sgd",
        "--tokenizer-type NullTokenizer --vocab-size 50000",
    ],
)
def test_another_run_has_other_settings(other: str) -> None:
    assert what_it_is(_settings(_LINE)) != what_it_is(_settings(f"{_LINE} {other}"))
    assert what_it_is(_settings(_LINE)) == what_it_is(_settings(f"{_LINE} --lr 1 --train-iters 9 --save x --seed 3"))


def test_tokenizers_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    """The vocabulary is the largest layer of a small model; its files may lie anywhere."""
    described = []
    for folder, text in (("a", "{}"), ("b", "{}"), ("c", '{"of another model": 1}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
        line = f"{_LINE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / folder}"
        described.append(what_it_is(_settings(line)))
    assert described[0] == described[1] != described[2]


def test_settings_become_flags_that_users_may_type() -> None:
    assert flags_of({"overlap_grad_reduce": True, "cuda_graph_impl": "full_iteration", "fsdp_memory_budget": 7}) == [
        "--overlap-grad-reduce",
        "--cuda-graph-impl",
        "full_iteration",
        "--fsdp-memory-budget",
        "7",
    ]
