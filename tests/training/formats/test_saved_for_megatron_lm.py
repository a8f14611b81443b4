"""``--ckpt-format torch_dist`` and ``fsdp_dtensor`` write a run as Megatron-LM reads it, and runs resume from them.

Megatron-LM itself read such folders of torch_dist (``dist_checkpointing.load`` of its snapshot of 2026-08-22 with its default strictness,
its model of local layers on a CPU, and its FP32Optimizer over AdamW): logits differed from those of transformers by 1.3e-6, and in the
next four steps from a run's checkpoint the losses were ours, up to 5e-7.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, StoredTensor
from megatron.training.arguments import parse_settings
from megatron.training.formats.megatron_lm import in_our_names, layout_of, open_distributed
from megatron.training.formats.megatron_lm.names import places_of
from tests.support.huggingface_models import FOLDER, NAMES, expected, logits_of
from tests.support.launch import run_ranks
from tests.support.megatron_lm_folders import load_alone
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
    muon = f"{_RUN} --optimizer muon --muon-fp32-matmul-prec high"
    runs["muon"] = train_one(muon.split())
    saved = f"{muon} --save {root}/muon --ckpt-format torch_dist"
    runs["muon begins"] = train_one(f"{saved} --exit-interval 2".split())
    dist.barrier()
    runs["muon resumes"] = train_one(f"{saved} --load {root}/muon".split())
    halves = f"{TINY} {SHARDED} --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"
    runs["halves"] = train_one(halves.split())
    runs["halves begin"] = train_one(
        f"{halves} --save {root}/halves --ckpt-format torch_dist --exit-interval 2".split()
    )
    dist.barrier()
    runs["halves resume"] = train_one(f"{halves} --load {root}/halves".split())
    further = f"{TINY} {SHARDED} --mtp-num-layers 1"
    runs["mtp"] = train_one(further.split())
    saved = f"{further} --save {root}/mtp --ckpt-format torch_dist"
    runs["mtp begins"] = train_one(f"{saved} --exit-interval 2".split())
    dist.barrier()
    runs["mtp resumes"] = train_one(f"{saved} --load {root}/mtp".split())
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


@pytest.mark.parametrize("kind", ["muon", "mtp"])
def test_a_run_with_muon_or_multi_token_prediction_resumes(trained: tuple[Path, dict[str, Run]], kind: str) -> None:
    """With Muon, matrices have momentum, all else AdamW's state: neither is of all weights."""
    whole, begins, resumes = (trained[1][name] for name in (kind, f"{kind} begins", f"{kind} resumes"))
    assert begins.error is None and resumes.error is None, (begins.error, resumes.error)
    assert {**begins.losses, **resumes.losses} == whole.losses and list(resumes.losses) == [3, 4]


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


def _as_read(folder: Path, architecture: dict[str, Any]) -> list[Any]:
    """All that our reader, and the one of Megatron-LM's folders, reads of a checkpoint."""
    stored, foreign = CheckpointReader(folder), open_distributed(folder)
    assert foreign is not None and foreign.run is not None
    values = stored.values([name for name in stored.entries if name.startswith(EXTRA_STATE)])
    readers = (in_our_names(stored, architecture), foreign.reader(architecture, state_keys=("exp_avg", "exp_avg_sq")))
    return [
        *(
            {name: reader.tensor(name).tolist() for name, e in reader.entries.items() if isinstance(e, StoredTensor)}
            for reader in readers
        ),
        repr(values),
        foreign.run,
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_bit_in_any_file_is_refused_with_its_name(
    trained: tuple[Path, dict[str, Run]], kind: str, tmp_path: Path
) -> None:
    """Or it lies where nothing is read."""
    folder = shutil.copytree(trained[0] / kind / "iter_0000004", tmp_path / "saved")
    architecture = CheckpointReader(folder).values([f"{EXTRA_STATE}architecture"])[f"{EXTRA_STATE}architecture"]
    wanted, draw = _as_read(folder, architecture), random.Random(0)
    refused = Counter[str]()
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for _ in range(10):
            changed, bit = bytearray(whole), draw.randrange(8 * len(whole))
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                assert _as_read(folder, architecture) == wanted, (file.name, bit)
            except (ValueError, FileNotFoundError) as error:
                assert str(folder) in str(error), error
                refused[file.name] += 1
        file.write_bytes(whole)
    always = {".metadata", "checkpoint.json", "__1_0.distcp", *(["metadata.json"] if kind == "torch_dist" else [])}
    assert always == {name for name, count in refused.items() if count == 10} - {"__0_0.distcp"}
    assert refused["__0_0.distcp"] > 0


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_of_multi_token_prediction_have_megatron_lms_names(kind: str) -> None:
    """They are not stacked; what is written is where it is looked for."""
    architecture = parse_settings(f"{_RUN} --mtp-num-layers 2".split()).model.architecture(99)
    layout = layout_of(kind, architecture, iteration=1)
    written = {name: {part.source for part in view.parts} for name, view in layout.views.items()}
    prefix, layer = ("", "transformer_layer") if kind == "torch_dist" else ("model.module.", "mtp_model_layer")
    assert written["mtp.layers.1.eh_proj.weight"] == {f"{prefix}mtp.layers.1.eh_proj.weight"}
    of_norm = "mtp.layers.1.mtp_model_layer.input_layernorm.weight"
    assert written[of_norm] == {f"{prefix}mtp.layers.1.{layer}.self_attention.linear_qkv.layer_norm_weight"}
    assert written["mtp.layers.0.mtp_model_layer.pre_mlp_layernorm.weight"] == {
        f"{prefix}mtp.layers.0.{layer}.pre_mlp_layernorm.weight"
    }
    for name, sources in written.items():
        places = {place.source for place in places_of(name, prefix)}
        assert {source.removesuffix("_w").removesuffix("_v") for source in sources} <= places, name


@pytest.mark.parametrize("kind", FORMATS)
def test_what_the_optimizer_and_the_run_have_is_read_back_under_megatron_lms_names(
    trained: tuple[Path, dict[str, Run]], kind: str
) -> None:
    folder = trained[0] / kind / "iter_0000004"
    stored, foreign = CheckpointReader(folder), open_distributed(folder)
    architecture = stored.values([f"{EXTRA_STATE}architecture"])[f"{EXTRA_STATE}architecture"]
    assert foreign is not None and foreign.run is not None and foreign.run.step == 4 and foreign.run.iteration == 4
    assert foreign.run.schedule["num_steps"] == foreign.run.args["consumed_train_samples"] == 32
    wanted = {"num_layers": 2, "hidden_size": 32, "num_experts": 4, "swiglu": True, "add_bias_linear": False}
    assert wanted.items() <= foreign.run.args.items()
    assert foreign.run.args["layernorm_epsilon"] == 1e-5 and foreign.run.args["normalization"] == "RMSNorm"
    own, theirs = in_our_names(stored, architecture), foreign.reader(architecture, state_keys=("exp_avg", "exp_avg_sq"))
    moments = [name for name in theirs.entries if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert len(moments) == 2 * len(theirs.views) // 4 and all(
        torch.equal(own.tensor(name), theirs.tensor(name)) for name in moments
    )
    assert all(own.tensor(name).any() for name in moments if "embedding" in name)


def test_pytorch_loads_what_megatron_lm_asks_for_in_torch_dist(trained: tuple[Path, dict[str, Run]]) -> None:
    """Main weights are the weights under further names, in the same bytes; modules without FP8 have no state."""
    folder = trained[0] / "torch_dist" / "iter_0000004"
    name = "decoder.layers.self_attention.linear_qkv.weight"
    names = [
        name,
        f"optimizer.state.param.{name}",
        f"optimizer.state.fp32_param.{name}",
        f"optimizer.state.exp_avg.{name}",
    ]
    wanted: dict[str, Any] = {name: torch.zeros(2, 96, 32) for name in names}
    module = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4"
    wanted |= {"decoder.layers.self_attention.core_attention._extra_state/shard_0_2": 1, module: 1}
    wanted["decoder.final_layernorm._extra_state/shard_0_1"] = 1
    load_alone(wanted, folder)
    assert wanted[module] == [None] and torch.equal(wanted[names[0]], wanted[names[1]])
    assert torch.equal(wanted[names[0]], wanted[names[2]]) and wanted[names[0]].any() and wanted[names[3]].any()
    nbytes = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    entries = CheckpointReader(folder).entries.values()
    assert (
        nbytes
        < 1.5 * sum(entry.numel * entry.dtype.itemsize for entry in entries if isinstance(entry, StoredTensor)) + 1e6
    )


def test_pytorch_loads_what_megatron_lm_asks_for_in_fsdp_dtensor(trained: tuple[Path, dict[str, Run]]) -> None:
    name = "module.module.decoder.layers.1.mlp.experts.linear_fc1.weight3"
    state = {f"{name}_{half}": {"exp_avg_sq": torch.zeros(16, 32), "step": torch.zeros(())} for half in "wv"}
    meta = {name: {"lr": None, "betas": None, "step": None, "is_expert_parallel": None, "max_lr": None}}
    wanted: dict[str, Any] = {
        "optimizer": {"state": state, "param_to_group_meta": meta},
        "opt_param_scheduler": {"num_steps": 0, "lr_decay_style": ""},
        "args": None,
        "iteration": 0,
    }
    load_alone(wanted, trained[0] / "fsdp_dtensor" / "iter_0000004")
    group = wanted["optimizer"]["param_to_group_meta"][name]
    assert {"step": 4, "betas": (0.9, 0.999), "is_expert_parallel": True, "max_lr": 0.01}.items() <= group.items()
    loaded = wanted["optimizer"]["state"]
    assert all(
        float(loaded[f"{name}_{half}"]["step"]) == 4 and loaded[f"{name}_{half}"]["exp_avg_sq"].any() for half in "wv"
    )
    assert wanted["opt_param_scheduler"] == {"num_steps": 32, "lr_decay_style": "linear"}
    assert wanted["iteration"] == 4 and wanted["args"].num_layers == 2 and wanted["args"].no_save_rng is True


def test_main_weights_in_two_halves_are_put_together_and_moments_are_in_fp32(
    trained: tuple[Path, dict[str, Run]],
) -> None:
    whole, begins, resumes = (trained[1][name] for name in ("halves", "halves begin", "halves resume"))
    assert begins.error is None and resumes.error is None, (begins.error, resumes.error)
    assert resumes.losses == {i: whole.losses[i] for i in (3, 4)}
    stored = FileSystemReader(trained[0] / "halves" / "iter_0000002").read_metadata().state_dict_metadata
    for key in ("param", "exp_avg", "exp_avg_sq"):
        assert stored[f"optimizer.state.{key}.decoder.layers.mlp.linear_fc1.weight"].properties.dtype == torch.float32


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


def test_norms_of_latent_vectors_lie_where_transformer_engine_has_them(tmp_path: Path) -> None:
    """In the linear layer behind them; the norm before the projections to latent vectors stands alone."""
    target = tmp_path / "target"
    folder = FOLDER / "deepseek_v3_dense"
    assert convert.main([str(folder), str(target), "--to", "torch_dist", "--padded-vocab-size", "64"]) == 0
    stored = FileSystemReader(target / "iter_0000000").read_metadata().state_dict_metadata
    weights = [name for name in stored if name.startswith("decoder.layers.") and "._extra_state" not in name]
    norms = {name.removeprefix("decoder.layers.") for name in weights if "norm" in name}
    assert norms == {
        "input_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    }
