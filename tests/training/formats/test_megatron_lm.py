"""Megatron-LM's checkpoints are read as they lie on disk: the losses are those that it computed with these weights."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.checkpoint import CheckpointReader
from megatron.training.formats.flags import flags_of
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.recognise import find_foreign
from tests.support.megatron_lm_folders import (
    losses_of,
    save_alone,
    weights_and_architecture,
    write_fsdp_dtensor,
    write_legacy,
    write_legacy_chunks,
    write_torch_dist,
)
from tools.checkpoint import convert

DENSE, EXPERTS = ("gpt2_like", "llama_like", "qwen_like"), ("moe_top2",)


def _found(folder: Path) -> ForeignCheckpoint:
    found = find_foreign(folder)
    assert found is not None
    return found


def _check(name: str, found: ForeignCheckpoint, weights: dict[str, torch.Tensor], architecture: dict[str, Any]) -> None:
    reader = found.reader(architecture)
    assert set(reader.entries) == set(weights)
    assert all(torch.equal(reader.tensor(key), value) for key, value in weights.items())
    losses, expected = losses_of(name, reader, architecture)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norms_in_linears", [True, False], ids=["norms in linears", "norms"])
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_torch_dist(name: str, norms_in_linears: bool, tmp_path: Path) -> None:
    weights, architecture = weights_and_architecture(name)
    found = _found(write_torch_dist(tmp_path, weights, norms_in_linears=norms_in_linears))
    assert found.kind == "Megatron-LM, torch_dist" and found.path == tmp_path / "iter_0000007"
    _check(name, found, weights, architecture)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_fsdp_dtensor(name: str, tmp_path: Path) -> None:
    weights, architecture = weights_and_architecture(name)
    gated, tied = architecture["gated_linear_unit"], architecture["share_embeddings_and_output_weights"]
    found = _found(write_fsdp_dtensor(tmp_path, weights, gated=gated, tied=tied))
    assert found.kind == "Megatron-LM, fsdp_dtensor"
    _check(name, found, weights, architecture)


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", DENSE)
def test_legacy_folders_by_tensor_and_pipeline_rank(name: str, num_ranks: int, num_stages: int, tmp_path: Path) -> None:
    weights, architecture = weights_and_architecture(name)
    gated = architecture["gated_linear_unit"]
    folder = write_legacy(tmp_path, weights, gated=gated, num_ranks=num_ranks, num_stages=num_stages)
    found = _found(folder)
    assert found.kind == "Megatron-LM, torch"
    _check(name, found, weights, architecture)


@pytest.mark.parametrize("name", DENSE)
def test_legacy_folders_of_ranks_with_several_stages(name: str, tmp_path: Path) -> None:
    weights, architecture = weights_and_architecture(name)
    found = _found(write_legacy_chunks(tmp_path, weights, gated=architecture["gated_linear_unit"], num_ranks=2))
    _check(name, found, weights, architecture)


def test_a_release_and_a_step_are_found(tmp_path: Path) -> None:
    weights, _ = weights_and_architecture("gpt2_like")
    write_torch_dist(tmp_path, weights)
    assert find_foreign(tmp_path, 7) is not None and find_foreign(tmp_path, 8) is None
    os.rename(tmp_path / "iter_0000007", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert _found(tmp_path).path == tmp_path / "release"
    assert _found(tmp_path / "release").path == tmp_path / "release"


def test_a_vocabulary_that_was_padded_for_more_ranks_is_cut_and_one_for_fewer_is_padded(tmp_path: Path) -> None:
    """Megatron-LM pads to a multiple of the tensor-parallel ranks, so the rows depend on the split there."""
    weights, architecture = weights_and_architecture("llama_like")
    reader = _found(write_torch_dist(tmp_path, weights)).reader({**architecture, "padded_vocab_size": 64})
    assert torch.equal(reader.tensor("output_layer.weight"), weights["output_layer.weight"][:64])
    reader = _found(tmp_path).reader({**architecture, "padded_vocab_size": 128})
    padded = reader.tensor("embedding.word_embeddings.weight")
    own = weights["embedding.word_embeddings.weight"]
    assert torch.equal(padded[: len(own)], own) and torch.equal(padded[len(own) :], own[-1:].expand(128 - len(own), -1))


@pytest.mark.parametrize("kind", ["torch_dist", "fsdp_dtensor", "torch"])
def test_another_model_is_refused_by_the_names_of_its_tensors(kind: str, tmp_path: Path) -> None:
    weights, architecture = weights_and_architecture("llama_like")
    if kind == "torch_dist":
        write_torch_dist(tmp_path, weights)
    elif kind == "torch":
        write_legacy(tmp_path, weights, gated=True, num_ranks=2, num_stages=1)
    else:
        write_fsdp_dtensor(tmp_path, weights, gated=True, tied=False)
    with pytest.raises(ValueError, match=r"missing: .*linear_qkv\.bias"):
        _found(tmp_path).reader({**architecture, "add_qkv_bias": True})
    with pytest.raises(ValueError, match=r"of another shape: .*linear_fc2\.weight"):
        _found(tmp_path).reader({**architecture, "ffn_hidden_size": 64})
    with pytest.raises(ValueError, match="Nothing was changed"):
        _found(tmp_path).reader({**architecture, "num_layers": 1})


def test_what_an_archive_names_is_not_run(tmp_path: Path) -> None:
    """A legacy file is a pickle; what it would call comes as an inert record."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    weights, architecture = weights_and_architecture("gpt2_like")
    write_legacy(tmp_path, weights, gated=False, num_ranks=1, num_stages=1)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "rng_state": Attack()}, path)
    _check("gpt2_like", _found(tmp_path), weights, architecture)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "iter_0000007/common.pt", "iter_0000007/metadata.json"])
def test_what_is_no_file_is_not_taken_for_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    """A link that leads nowhere, such as a pruned cache leaves, would turn a run into weights, or a model into nothing."""
    weights, _ = weights_and_architecture("gpt2_like")
    path = write_torch_dist(tmp_path, weights) / name
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"^{path} must be a regular file, got a symbolic link to nowhere"):
        find_foreign(tmp_path)


def test_a_damaged_common_state_is_named(tmp_path: Path) -> None:
    weights, _ = weights_and_architecture("gpt2_like")
    path = write_torch_dist(tmp_path, weights) / "iter_0000007" / "common.pt"
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"^{path} must be an archive of torch.save, got BadZipFile"):
        find_foreign(tmp_path)


def test_damaged_and_missing_legacy_files_are_named(tmp_path: Path) -> None:
    weights, _ = weights_and_architecture("gpt2_like")
    write_legacy(tmp_path, weights, gated=False, num_ranks=2, num_stages=1)
    path = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"mp_rank_01/model_optim_rng.pt must be an archive of torch.save"):
        find_foreign(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"mp_rank_01/model_optim_rng.pt must be there"):
        find_foreign(tmp_path)


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    weights, _ = weights_and_architecture("gpt2_like")
    write_torch_dist(tmp_path / "zarr", weights)
    (tmp_path / "zarr" / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(NotImplementedError, match="must name the backend torch_dist, got 'zarr'"):
        find_foreign(tmp_path / "zarr")
    write_legacy(tmp_path / "split", weights, gated=False, num_ranks=1, num_stages=1)
    os.rename(tmp_path / "split/iter_0000007/mp_rank_00", tmp_path / "split/iter_0000007/mp_rank_00_000_001")
    with pytest.raises(NotImplementedError, match="without expert parallelism"):
        find_foreign(tmp_path / "split")


def test_a_folder_of_another_dcp_program_is_left_to_the_loader(tmp_path: Path) -> None:
    save_alone({"weight": torch.zeros(2)}, tmp_path / "iter_0000001")
    assert find_foreign(tmp_path, 1) is None


@pytest.mark.parametrize("kind", ["torch_dist", "fsdp_dtensor", "torch"])
def test_a_conversion_is_told_the_model_by_its_launch_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, architecture = weights_and_architecture("llama_like")
    if kind == "torch_dist":
        write_torch_dist(tmp_path, weights)
    elif kind == "torch":
        write_legacy(tmp_path, weights, gated=True, num_ranks=2, num_stages=2)
    else:
        write_fsdp_dtensor(tmp_path, weights, gated=True, tied=False)
    assert convert.main([str(tmp_path), str(tmp_path / "own")]) == 2
    assert "give the model's flags after --" in capsys.readouterr().err
    line = ["--", *flags_of(architecture), "--lr", "1e-3", "--make-vocab-size-divisible-by", "1"]
    assert convert.main([str(tmp_path), str(tmp_path / "own"), *line]) == 0
    reader = CheckpointReader(tmp_path / "own" / "iter_0000000")
    losses, expected = losses_of("llama_like", reader, architecture)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    assert convert.main([str(tmp_path / "own"), str(tmp_path / "model"), "--to", "huggingface"]) == 0
    assert _found(tmp_path / "model").kind == "Hugging Face, llama"


@pytest.mark.parametrize("kind", ["torch", "torch_dist", "fsdp_dtensor"])
def test_a_flipped_bit_is_refused_by_the_checksums_of_torchs_archives(kind: str, tmp_path: Path) -> None:
    """Also in folders of Megatron-LM, which have no checksums of ours; or it is without effect."""
    weights, architecture = weights_and_architecture("llama_like")
    if kind == "torch":
        write_legacy(tmp_path, weights, gated=True, num_ranks=2, num_stages=1)
    elif kind == "torch_dist":
        write_torch_dist(tmp_path, weights)
    else:
        write_fsdp_dtensor(tmp_path, weights, gated=True, tied=architecture["share_embeddings_and_output_weights"])
    draw, refused = random.Random(0), 0
    files = [path for path in sorted(tmp_path.rglob("*")) if path.suffix in (".pt", ".distcp")]
    assert files
    for file in files:
        whole = file.read_bytes()
        for number in range(30):
            changed, bit = bytearray(whole), draw.randrange(8 * len(whole))
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                reader = _found(tmp_path).reader(architecture)
                assert all(torch.equal(reader.tensor(key), value) for key, value in weights.items()), (file, bit)
            except (ValueError, FileNotFoundError, NotImplementedError) as error:
                assert str(tmp_path) in str(error), (number, error)
                refused += 1
        file.write_bytes(whole)
    assert refused > 10 * len(files)


def test_files_of_megatron_lm_can_be_trusted(tmp_path: Path) -> None:
    """``--no-verify-checkpoint``: archives may have been saved without checksums."""
    weights, architecture = weights_and_architecture("llama_like")
    write_legacy(tmp_path, weights, gated=True, num_ranks=1, num_stages=1)
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    content = file.read_bytes()
    name = "decoder.final_layernorm.weight"
    elements = weights[name].numpy().tobytes()
    assert content.count(elements) >= 1
    file.write_bytes(content.replace(elements, (weights[name] + 1).numpy().tobytes()))
    with pytest.raises(ValueError, match=r"mp_rank_00/model_optim_rng\.pt: .* must have the checksum"):
        _found(tmp_path).reader(architecture).tensor(name)
    found = find_foreign(tmp_path, verify=False)
    assert found is not None and torch.equal(found.reader(architecture).tensor(name), weights[name] + 1)
