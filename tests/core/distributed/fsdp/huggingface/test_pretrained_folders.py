"""Hugging Face folders into sharded models and out of them, on two ranks and without ``transformers``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron.core.distributed.fsdp import FsdpModule, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.huggingface import (
    INDEX,
    conversion,
    fully_shard_pretrained,
    load_pretrained,
    open_folder,
    save,
    save_pretrained,
)
from tests.support import pretrained_models
from tests.support.pretrained_models import TinyModel, files_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
TOKENS = torch.arange(12).view(2, 6)


def _folder() -> Path:
    """Return a new folder that both ranks see."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


def _plain(dtype: torch.dtype = torch.float32) -> TinyModel:
    model = TinyModel().to(dtype)
    torch.manual_seed(3)
    model.initialize_weights()
    return model


def _sharded(*, seed: int = 3, dtype: torch.dtype = torch.float32, **settings: Any) -> TinyModel:
    """Return a sharded model that was built on the meta device."""
    vars(conversion)["library"] = pretrained_models.library
    with torch.device("meta"):
        model = TinyModel(new_head=bool(settings.pop("new_head", False))).to(dtype)
    torch.manual_seed(seed)
    return fully_shard_pretrained(model, **settings)


def _saved(change: dict[str, torch.Tensor | None] | None = None) -> Path:
    """Return a folder with the file of the plain model, with changes."""
    folder = _folder()
    tensors = {**files_of(_plain()), **(change or {})}
    if dist.get_rank() == 0:
        save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    dist.barrier()
    return folder


def _equal(model: TinyModel, plain: TinyModel) -> bool:
    own = dict(model.named_parameters())
    return all(torch.equal(own[name].full_tensor(), p.to(own[name].dtype)) for name, p in plain.named_parameters())  # type: ignore[attr-defined]


def _refused(error: type[Exception], *words: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(error, match=".*".join(words))


@CHECKS.on(2)
def units_are_layers_and_values_are_those_of_the_unsharded_model() -> None:
    """Also where ``_init_weights`` writes to one row, and in 16 bits, in which other numbers are drawn."""
    for dtype in (torch.float32, torch.bfloat16):
        model, plain = _sharded(dtype=dtype), _plain(dtype)
        units = [type(m).__bases__[1].__name__ for m in model.modules() if isinstance(m, FsdpModule)]
        assert units == ["TinyModel", "Layer", "Layer"], units
        assert _equal(model, plain)
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model(TOKENS), plain(TOKENS))


@CHECKS.on(2)
def what_was_loaded_is_what_was_saved() -> None:
    folder = _saved()
    for initialize in (True, False):
        model = _sharded(seed=8, initialize=initialize)
        report = load_pretrained(model, folder)
        assert _equal(model, _plain())
        assert torch.equal(model(TOKENS), _plain()(TOKENS))
        assert report.read_nbytes < report.stored_nbytes and not report.initialized and not report.unused


@CHECKS.on(2)
def ranks_read_their_own_rows_but_of_what_is_calculated() -> None:
    """``down`` is doubled in the files: both ranks read it whole. All else is read once by all ranks together."""
    report = load_pretrained(_sharded(initialize=False), _saved())
    both = torch.tensor(report.read_nbytes)
    dist.all_reduce(both)
    doubled = sum(t.nbytes for name, t in files_of(_plain()).items() if "doubled_down" in name)
    assert report.stored_nbytes <= both <= report.stored_nbytes + doubled
    assert report.temporary_nbytes in (0, doubled)  # two copies of one layer's, where a rank holds rows of it


@CHECKS.on(2)
def saved_files_are_those_of_the_unsharded_model() -> None:
    plain, folder = files_of(_plain()), _folder() / "deep" / "folder"
    model = _sharded()
    for limit, several in ((600, True), (10**9, False)):
        save_pretrained(model, folder, max_shard_nbytes=limit)
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert (len(files) > 3) == several == (folder / INDEX).exists()
        assert not list(folder.glob("*.unfinished"))
        tensors = {name: t for file in files for name, t in load_file(folder / file).items()}
        assert tensors.keys() == plain.keys(), (sorted(tensors), sorted(plain))
        assert all(torch.equal(tensors[name], plain[name]) for name in plain)
        assert set(open_folder(folder).entries) == set(plain)
        dist.barrier()
    config = json.loads((folder / "config.json").read_text())
    assert config == {"architectures": ["TinyModel"], "dtype": "float32"}


@CHECKS.on(2)
def a_flipped_bit_is_refused_before_anything_changes() -> None:
    """Of what was saved here, by ranks that wrote and summed different parts; another program's files say what to do."""
    folder, model = _folder(), _sharded()
    for limit in (10**9, 600):
        save_pretrained(model, folder, max_shard_nbytes=limit)
        names = sorted(path.name for path in folder.glob("*.safetensors*"))
        for name in names:
            whole, before = (folder / name).read_bytes(), _sharded(seed=8)
            for place in (9, len(whole) // 2, len(whole) - 1):
                dist.barrier()
                if dist.get_rank() == 0:
                    (folder / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
                dist.barrier()
                with _refused(ValueError, f"{folder}/"):
                    load_pretrained(before, folder)
                assert not _equal(before, _plain())
            dist.barrier()
            if dist.get_rank() == 0:
                (folder / name).write_bytes(whole)
            dist.barrier()
        loaded = _sharded(seed=8)
        load_pretrained(loaded, folder)
        assert _equal(loaded, _plain())
    dist.barrier()
    if dist.get_rank() == 0:
        for name in (*names, INDEX):
            (folder / name).unlink(missing_ok=True)
        save_file(files_of(_plain()), folder / "model.safetensors")
    dist.barrier()
    with _refused(ValueError, "remove checksums.json"):
        load_pretrained(_sharded(seed=8), folder)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "checksums.json").unlink()
    dist.barrier()
    load_pretrained(_sharded(seed=8), folder)


@CHECKS.on(2)
def files_have_the_dtype_from_before_unless_another_is_asked_for() -> None:
    bf16 = torch.bfloat16
    by_policy: dict[str, Any] = {
        "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None, param_dtype=bf16)
    }
    cases: list[Any] = [
        (bf16, {}, None, bf16),
        (bf16, {}, torch.float32, torch.float32),
        (torch.float32, by_policy, None, torch.float32),
    ]
    for dtype, settings, asked, expected in cases:
        folder = _folder()
        save_pretrained(_sharded(dtype=dtype, **settings), folder, dtype=asked)
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {expected}
        again = _sharded(seed=9, dtype=dtype, initialize=False, **settings)
        load_pretrained(again, folder)
        assert _equal(again, _plain(dtype))


@CHECKS.on(2)
def missing_unexpected_and_misshaped_tensors_are_named() -> None:
    model = _sharded(seed=4)
    before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"body.layers.1.norm.weight": None}, r"missing in the checkpoint: layers.1.norm.weight \(1\)"),
        ({"body.layers.9.norm.weight": torch.ones(8)}, "not in the model: layers.9.norm.weight"),
        ({"body.embedding.weight": torch.ones(20, 8)}, r"embedding.weight \(saved \[20, 8\], model \[21, 8\]\)"),
        ({"body.layers.0.experts.1.up": torch.ones(7, 8)}, "layers.0.gate_up must be made of"),
        ({"body.layers.0.experts.2.up": None}, "layers.0.gate_up must be made of"),
        ({"head.weight": torch.ones(21, 8)}, "embedding.weight and head.weight"),
    ]
    for change, words in cases:
        with _refused(ValueError, words):
            load_pretrained(model, _saved(change))
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))  # type: ignore[attr-defined]
    with _refused(FileNotFoundError, "must have safetensors files"):
        load_pretrained(model, _folder())
    with _refused(TypeError, "must be a PreTrainedModel"):
        load_pretrained(torch.nn.Linear(2, 2), _folder())


@CHECKS.on(2)
def a_new_head_gets_initial_values_if_that_is_meant() -> None:
    extra = {"body.layers.9.norm.weight": torch.ones(8)}
    folder = _saved(extra)  # type: ignore[arg-type]
    model = _sharded(initialize=False, new_head=True)
    torch.manual_seed(6)
    report = load_pretrained(model, folder, initialize_missing=True, ignore_unexpected=True)
    assert report.initialized == ("score.weight", "score.bias") and report.unused == ("layers.9.norm.weight",)
    assert _equal(model, _plain())
    assert 0.05 < model.score.weight.full_tensor().std() < 0.6  # type: ignore[attr-defined]


@CHECKS.on(2)
def tied_heads_may_be_in_the_files_twice() -> None:
    model = _sharded(initialize=False)
    load_pretrained(model, _saved({"head.weight": _plain().embedding.weight.detach().clone()}))
    assert _equal(model, _plain())


@CHECKS.on(2)
def a_save_that_fails_on_one_rank_leaves_no_model_behind() -> None:
    """A file of the right length whose rows nobody wrote would load as zeros."""
    folder = _folder()
    model = _sharded()
    original = save._Save._open
    if dist.get_rank() == 1:
        save._Save._open = _cannot_open  # type: ignore[method-assign, assignment]
    try:
        with _refused(OSError, "no space"):
            save_pretrained(model, folder)
    finally:
        save._Save._open = original  # type: ignore[method-assign]
    assert not list(folder.glob("*.safetensors"))


def _cannot_open(*_: object) -> Any:
    raise OSError("no space")


@CHECKS.on(2)
def classes_that_no_module_has_are_refused() -> None:
    with torch.device("meta"):
        model = TinyModel()
    with _refused(ValueError, "must have modules of the classes .'Block'."):
        fully_shard_pretrained(model, units=["Block"])
    assert all(module._is_fsdp_managed_module for module in _sharded().modules())
    with _refused(ValueError, "init_fn is the model's own"):
        fully_shard_pretrained(model, init_fn=print)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_pretrained_folders(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
