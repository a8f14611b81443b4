"""``--ckpt-format torch_dist`` and ``fsdp_dtensor`` write weights as Megatron-LM reads them, and runs resume from them.

Megatron-LM itself read such folders of torch_dist (``dist_checkpointing.load`` of its snapshot of 2026-08-22, strict and not): its
logits differed from those of transformers by 1.3e-6.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader
from megatron.training.formats.megatron_lm import in_our_names, open_distributed
from tests.support.huggingface_models import FOLDER, NAMES, expected, logits_of
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one
from tools.checkpoint import convert

_EXPERTS = "--swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --disable-bias-linear --normalization RMSNorm"
_RUN = f"{TINY} {SHARDED} {_EXPERTS}"
FORMATS = ("torch_dist", "fsdp_dtensor")


def _train(root: str) -> dict[str, Run]:
    runs = {"whole": train_one(_RUN.split())}
    for kind in FORMATS:
        saved = f"{_RUN} --save {root}/{kind} --ckpt-format {kind}"
        runs[f"{kind} begins"] = train_one(f"{saved} --exit-interval 2".split())
        dist.barrier()
        runs[f"{kind} resumes"] = train_one(
            f"{saved} --load {root}/{kind} --expert-model-parallel-size 2 --async-save".split()
        )
    runs["torch"] = train_one(f"{_RUN} --train-iters 1 --ckpt-format torch".split())
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Run]]:
    root = tmp_path_factory.mktemp("trained")
    return root, run_ranks(2, _train, str(root))[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_resumes_under_another_split(trained: tuple[Path, dict[str, Run]], kind: str) -> None:
    """Experts are divided in the second half alone, which changes the order of sums."""
    whole, begins, resumes = (trained[1][name] for name in ("whole", f"{kind} begins", f"{kind} resumes"))
    assert begins.error is None and resumes.error is None, (begins.error, resumes.error)
    assert list(begins.losses) == [1, 2] and list(resumes.losses) == [3, 4]
    for iteration, loss in {**begins.losses, **resumes.losses}.items():
        assert loss == pytest.approx(whole.losses[iteration], abs=2e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_lie_under_megatron_lms_names(trained: tuple[Path, dict[str, Run]], kind: str) -> None:
    folder = trained[0] / kind / "iter_0000004"
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {name: list(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    if kind == "torch_dist":
        assert sizes["decoder.layers.self_attention.linear_qkv.weight"] == [2, 96, 32]
        assert sizes["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == [2, 32]
        assert sizes["decoder.layers.pre_mlp_layernorm.weight"] == [2, 32]
        assert sizes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == [2, 4, 32, 32]
        # Megatron-LM takes each name of an object apart into a key and a shard.
        assert all("/shard_" in name for name in stored if name not in sizes)
        assert (folder / "metadata.json").is_file()
    else:
        assert sizes["model.module.decoder.layers.1.mlp.experts.linear_fc1.weight3_w"] == [16, 32]
        assert sizes["model.module.decoder.layers.1.mlp.experts.linear_fc2.weight3"] == [32, 16]
        assert {"iteration", "checkpoint_version", "args"} <= stored.keys()
    reader = CheckpointReader(folder)
    architecture = reader.values([f"{EXTRA_STATE}architecture"])[f"{EXTRA_STATE}architecture"]
    own, foreign = in_our_names(reader, architecture), open_distributed(folder)
    assert foreign is not None
    theirs = foreign.reader(architecture)
    assert all(torch.equal(own.tensor(name), theirs.tensor(name)) for name in theirs.entries)


def test_other_formats_are_saved_as_ours_and_that_is_said(trained: tuple[Path, dict[str, Run]]) -> None:
    assert trained[1]["torch"].error is None
    assert "--ckpt-format torch: checkpoints are saved as PyTorch DCP directories" in trained[1]["torch"].output


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_hugging_face_is_converted_for_megatron_lm(name: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert convert.main([str(FOLDER / name), str(target), "--to", kind, "--padded-vocab-size", "64"]) == 0
    foreign = open_distributed(target / "iter_0000000")
    assert foreign is not None and foreign.kind == f"Megatron-LM, {kind}"
    stored = CheckpointReader(target / "iter_0000000")
    architecture = stored.values([f"{EXTRA_STATE}architecture"])[f"{EXTRA_STATE}architecture"]
    tokens, logits = expected(name)
    torch.testing.assert_close(
        logits_of(foreign.reader(architecture), architecture, tokens), logits, atol=1e-5, rtol=1e-5
    )
