"""What is read from a checkpoint is data, and is what was written: damage, foreign files and payloads are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.distributed.fsdp import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint import CheckpointReader
from megatron.core.distributed.fsdp.checkpoint.folder import OWNER, begin_folder
from tests.support.checkpoint_models import adamw, sharded_model, train, whole_state

DATA, METADATA, DESCRIPTION = "__0_0.distcp", ".metadata", "checkpoint.json"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Make this process the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a small model and its optimizer, and the state that it holds."""
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    save_checkpoint(model, optimizer, tmp_path / "a", extra_state={"iteration": 3})
    return tmp_path / "a", whole_state(model, optimizer)


class Loaded:
    """A model with other weights, to load into."""

    def __init__(self) -> None:
        self.model = sharded_model("optim_grads_params", seed=1, num_blocks=1)
        self.optimizer = adamw(self.model)
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        return whole_state(self.model, self.optimizer)

    def load(self, path: Path, **options: Any) -> dict[str, Any]:
        return load_checkpoint(self.model, self.optimizer, path, **options)

    def assert_refused(self, path: Path, message: str, error: type[Exception] = ValueError) -> None:
        """Check that loading raises, names something in the folder, and changes nothing."""
        with pytest.raises(error, match=message) as found:
            self.load(path)
        assert str(path) in str(found.value)
        assert self.state() == self.before


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def without_description(path: Path) -> None:
    """Make a checkpoint one that another program could have written."""
    (path / DESCRIPTION).unlink(missing_ok=True)
    metadata = FileSystemReader(path).read_metadata()
    metadata.storage_meta = None
    (path / METADATA).write_bytes(pickle.dumps(metadata))


# ---- nothing is executed ----------------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("own", [True, False])
def test_a_payload_in_the_metadata_is_not_run(saved: tuple[Path, dict[str, Any]], tmp_path: Path, own: bool) -> None:
    """Neither alone, nor hidden in metadata that are right, nor beside our own description."""
    path, _ = saved
    ran = tmp_path / "ran"
    if not own:
        without_description(path)
    hidden = FileSystemReader(path).read_metadata()
    hidden.planner_data = Payload(ran)
    for payload in (pickle.dumps(Payload(ran)), pickle.dumps(hidden)):
        (path / METADATA).write_bytes(payload)
        Loaded().assert_refused(path, r"checksum" if own else r"names posix\.mkdir.*nothing was run")
        with pytest.raises(ValueError, match=r"\.metadata"):
            CheckpointReader(path)
    assert not ran.exists()


def test_classes_of_torch_cannot_be_changed_by_a_pickle(saved: tuple[Path, dict[str, Any]]) -> None:
    """BUILD sets attributes of whatever lies on the stack, also of a class."""
    path, _ = saved
    without_description(path)
    pollute = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x05dirty\x88stb."
    (path / METADATA).write_bytes(pollute)
    Loaded().assert_refused(path, "must be the metadata of a checkpoint")
    assert not hasattr(dcp.Metadata, "dirty")


def test_a_damaged_byte_takes_no_memory(saved: tuple[Path, dict[str, Any]]) -> None:
    """The C code that unpickles makes room for as many objects, or bytes, as a pickle announces: up to gigabytes."""
    path, _ = saved
    without_description(path)
    whole = pickle.dumps(FileSystemReader(path).read_metadata(), protocol=2)
    shared: list[Any] = ["strided"]
    for _ in range(16):
        shared = [shared, shared]
    many, long = struct.pack("<I", 1 << 23), struct.pack("<Q", 1 << 25)
    layout = b"ctorch.serialization\n_get_layout\n"
    damaged = (
        whole.replace(b"q\0", b"r" + many, 1),
        b"\x80\x02}p8388608\n.",
        b"\x80\x05\x96" + long + b"x.",
        b"\x80\x04\x8e" + long + b"x.",
        b"\x80\x02" + layout + pickle.dumps((shared,), 2)[2:-1] + b"R.",
    )
    for content in damaged:
        (path / METADATA).write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=re.escape(f"{path / METADATA} must be the metadata of a checkpoint")):
                CheckpointReader(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, content[:20]
        finally:
            tracemalloc.stop()


def test_checkpoints_of_pytorch_are_read_and_pytorch_reads_ours(tmp_path: Path) -> None:
    """The closed list of classes has all that DCP writes: nested states, plain values, every kind of tensor."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    state: dict[str, Any] = {
        "nest": {"deep": [torch.arange(6.0).view(2, 3), {"x": 1}], "text": "plain"},
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        **{str(dtype): torch.tensor([[1, 0, 1]]).to(dtype) for dtype in dtypes},
    }
    dcp.save(state, checkpoint_id=tmp_path / "a")
    reader = CheckpointReader(tmp_path / "a")
    assert not reader.has_checksums
    assert torch.equal(reader.tensor("nest.deep.0"), state["nest"]["deep"][0])
    assert reader.tensor("none").shape == (0, 3) and reader.tensor("scalar").item() == 2.5
    for dtype in dtypes:
        got = reader.tensor(str(dtype))
        assert got.dtype == dtype and torch.equal(got.view(torch.uint8), state[str(dtype)].view(torch.uint8))
    assert reader.values(["nest.text", "nest.deep.1.x"]) == {"nest.text": "plain", "nest.deep.1.x": 1}


@pytest.mark.parametrize("name", ["../outside.distcp", "/outside.distcp", "", ".."])
def test_files_outside_the_folder_are_not_read(saved: tuple[Path, dict[str, Any]], name: str) -> None:
    path, _ = saved
    without_description(path)
    metadata = FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    Loaded().assert_refused(path, "must name a file in the folder")


# ---- what is read is what was written ---------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_refused_or_without_effect(saved: tuple[Path, dict[str, Any]]) -> None:
    """Also in a checkpoint without our checksums, by those that torch.save writes."""
    path, wanted = saved
    draw = random.Random(0)
    for own in (True, False):
        if not own:
            without_description(path)
        for file in sorted(set(path.iterdir()) - {path / OWNER}):
            whole = file.read_bytes()
            for _ in range(40):
                bit = draw.randrange(8 * len(whole))
                flip(file, bit)
                loaded = Loaded()
                try:
                    loaded.load(path)
                except (ValueError, FileNotFoundError) as error:
                    assert str(path) in str(error) and loaded.state() == loaded.before, (file, bit, error)
                else:
                    assert not own, (file.name, bit)
                    assert loaded.state() == wanted, (file.name, bit)
                file.write_bytes(whole)


def test_cut_missing_and_exchanged_files_are_named(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, wanted = saved
    other = tmp_path / "b"
    model = sharded_model("optim_grads_params", seed=2, num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    save_checkpoint(model, optimizer, other, extra_state={"iteration": 4})
    loaded = Loaded()
    for name in (DATA, METADATA, DESCRIPTION):
        whole = (path / name).read_bytes()
        for cut in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
            (path / name).write_bytes(cut)
            loaded.assert_refused(path, name, Exception)
        if (other / name).read_bytes() != whole:  # .metadata of the same layout are the same
            shutil.copy(other / name, path / name)
            loaded.assert_refused(path, "checksum|another save")
        (path / name).unlink()
        loaded.assert_refused(path, name, Exception)
        (path / name).write_bytes(whole)
    shutil.copy(path / DATA, path / "__7_0.distcp")
    loaded.assert_refused(path, r"__7_0\.distcp.*not of this checkpoint")
    (path / "__7_0.distcp").unlink()
    loaded.load(path)
    assert loaded.state() == wanted


@pytest.mark.parametrize("change", ["lost", "twice", "shifted", "outside"])
def test_each_element_must_be_stored_once(saved: tuple[Path, dict[str, Any]], change: str) -> None:
    """A lost chunk would leave the initial values where it was."""
    path, _ = saved
    without_description(path)
    metadata = FileSystemReader(path).read_metadata()
    stored = metadata.state_dict_metadata["blocks.0.up.weight"]
    chunk = stored.chunks[0]
    rows, columns = chunk.sizes
    half = type(chunk)(chunk.offsets, torch.Size([rows // 2, columns]))
    rest = type(chunk)(torch.Size([rows // 2, 0]), torch.Size([rows - rows // 2, columns]))
    shifted = type(chunk)(torch.Size([rows // 2 - 1, 0]), rest.sizes)
    outside = type(chunk)(torch.Size([rows // 2, 1]), rest.sizes)
    stored.chunks[:] = {"lost": [half], "twice": [chunk, half], "shifted": [half, shifted], "outside": [half, outside]}[
        change
    ]
    index = next(key for key in metadata.storage_data if key.fqn == "blocks.0.up.weight")
    for found in stored.chunks:
        metadata.storage_data[type(index)(index.fqn, found.offsets)] = metadata.storage_data[index]
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    Loaded().assert_refused(path, r"blocks\.0\.up\.weight.* each of its elements once")


def test_a_description_that_was_forged_is_still_only_data(saved: tuple[Path, dict[str, Any]]) -> None:
    """Whatever stands in it, loading raises a ValueError that names it, or loads."""
    path, _ = saved
    file = path / DESCRIPTION
    whole = json.loads(file.read_text())
    values: tuple[Any, ...] = (None, [], {}, "x", -1, 1.5, [[]], {"a": 1}, [["../x", 1, 1]], 10**30)
    for value in values:
        for key in whole["content"]:
            content = {**whole, "content": {**whole["content"], key: value}}
            file.write_text(json.dumps(content, separators=(",", ":")))
            Loaded().assert_refused(path, DESCRIPTION)
    file.write_text("[" * 100_000)
    Loaded().assert_refused(path, DESCRIPTION)


# ---- only what we wrote is removed ------------------------------------------------------------------------------


def test_folders_that_are_only_named_like_leftovers_are_kept(tmp_path: Path) -> None:
    """A user's folder may have any name; a marker that a save wrote inside decides."""
    kept = [tmp_path / f"thesis.{kind}-0123456789ab" for kind in ("tmp", "old")]
    for folder in kept:
        folder.mkdir()
        (folder / "chapter").write_text("text")
    dead = begin_folder(tmp_path / "b")
    os.close(dead.lock)  # as the system does for a killed process
    copied = tmp_path / "mine.tmp-0123456789ab"
    shutil.copytree(dead.beside, copied)
    begin_folder(tmp_path / "a").discard()
    assert {entry.name for entry in tmp_path.iterdir()} == {*(folder.name for folder in kept), copied.name}
    assert all((folder / "chapter").read_text() == "text" for folder in kept)


def test_a_users_file_in_a_folder_that_is_removed_stays(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    (path / "notes.txt").write_text("best run")
    model = sharded_model("optim_grads_params", num_blocks=1)
    save_checkpoint(model, None, path)
    (left,) = (entry for entry in tmp_path.iterdir() if entry.name != "a")
    assert [entry.name for entry in left.iterdir()] == ["notes.txt"]
    save_checkpoint(model, None, tmp_path / "b")
    assert (left / "notes.txt").read_text() == "best run"
