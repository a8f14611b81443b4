"""SHARP and communicator options: which groups get them, observed in the environment when each group is created."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core import nccl_settings, parallel_state
from megatron.core.nccl_settings import NcclSettings
from megatron.core.process_group_builder import build_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.training.arguments import parse_settings
from megatron.training.launch.distributed_init import process_groups
from tests.support.rank_checks import RankChecks
from tests.training.cli.test_flags import MINIMAL

CHECKS = RankChecks(__name__)


@contextmanager
def _watched() -> Iterator[list[tuple[str, bool, Any]]]:
    """Record (description, whether CollNet is enabled, options) of each group when it is created; gloo takes no options."""
    made: list[tuple[str, bool, Any]] = []
    new_group = dist.new_group

    def watching(*args: Any, pg_options: Any = None, **kwargs: Any) -> Any:
        made.append((str(kwargs.get("group_desc")), os.environ.get("NCCL_COLLNET_ENABLE") == "1", pg_options))
        return new_group(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watching)
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl,cpu:gloo")
        patch.setattr(nccl_settings, "nccl_options", dict)
        yield made


def _initialize(**arguments: Any) -> Any:
    parallel_state.destroy_model_parallel()
    return parallel_state.initialize_model_parallel(distributed_timeout_minutes=1, **arguments)


@CHECKS.on(4)
def collnet_is_for_the_first_communicator_alone() -> None:
    for degrees, group, expected in (
        ({}, None, "DP_CP"),
        ({"tensor_model_parallel_size": 2}, "dp", "DP_CP"),
        ({"num_distributed_optimizer_instances": 2}, "dp", "INTRA_DP_CP"),
        ({"num_distributed_optimizer_instances": 2}, "dp_replica", "INTER_DIST_OPT"),
    ):
        with _watched() as made:
            groups = _initialize(use_sharp=True, sharp_enabled_group=group, **degrees)
        assert made[0][:2] == (expected, True), (degrees, made)
        assert not any(asked for _, asked, _ in made[1:]) and "NCCL_COLLNET_ENABLE" not in os.environ
        assert getattr(groups, expected.lower()) is not dist.group.WORLD, (
            "a communicator that was created earlier has no options"
        )
        names = [name for name, *_ in made]
        assert names.count(expected) == 1, "it is the group of that name"
    with _watched() as made:
        _initialize()
    assert not any(asked for _, asked, _ in made)


@CHECKS.on(4)
def the_all_gather_group_has_a_communicator_without_collnet() -> None:
    with _watched() as made:
        groups = _initialize(use_sharp=True, create_all_gather_group=True)
    assert [name for name, asked, _ in made if asked] == ["DP_CP"]
    assert groups.dp_cp_ag is not groups.dp_cp and "DATA_PARALLEL_GROUP_WITH_CP_AG" in [name for name, *_ in made]


@CHECKS.on(2)
def the_command_line_asks_for_it_too() -> None:
    config = parse_settings([*MINIMAL, "--use-sharp"], world_size=2).distributed
    with _watched() as made:
        process_groups(config, RankGrid(world_size=2))
    assert [name for name, asked, _ in made if asked] == ["DP_CP"]


@CHECKS.on(4)
def communicators_get_the_settings_of_their_names() -> None:
    settings = {"dp_cp": {"max_ctas": 8}, "tp": {"min_ctas": 2}, "inter_ep_dp": {"cga_cluster_size": 2}}
    with _watched() as made:
        build_process_groups(RankGrid(world_size=4, tensor_model_parallel_size=2), nccl=NcclSettings(None, settings))
    options = {name: given for name, _, given in made if given is not None}
    assert options == {"DP_CP": {"max_ctas": 8}, "TP": {"min_ctas": 2}}
    with _watched() as made:
        grid = RankGrid(world_size=4, num_distributed_optimizer_instances=2)
        groups = build_process_groups(grid, nccl=NcclSettings("dp", settings))
    options = {name: given for name, _, given in made if given is not None}
    assert options["INTER_DIST_OPT"] == {"cga_cluster_size": 2} and options["DP_CP"] == {"max_ctas": 8}
    assert groups.dp is groups.dp_cp and groups.dp_cp is not dist.group.WORLD, "one group for the same ranks"


@CHECKS.on(2)
def what_the_ranks_cannot_have_is_refused() -> None:
    for arguments, message in (
        ({"sharp_enabled_group": "dp"}, "sharp_enabled_group='dp' needs use_sharp=True, got False"),
        ({"use_sharp": True, "sharp_enabled_group": "tp"}, "must be None, dp or dp_replica, got 'tp'"),
        (
            {"use_sharp": True, "sharp_enabled_group": "dp_replica"},
            "num_distributed_optimizer_instances above 1, got 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _initialize(**arguments)
    with pytest.raises(ValueError, match="nccl_communicator_config_path needs the nccl backend, got "):
        build_process_groups(RankGrid(world_size=2), nccl=NcclSettings(None, {"dp_cp": {"max_ctas": 8}}))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_a_file_has_settings_by_names_of_groups(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "nccl.yaml"
    file.write_text("dp_cp:\n  max_ctas: 8\n  net_name: IB\nep_dp: {min_ctas: 2}\n")
    settings = NcclSettings.of(config_path=str(file))
    assert settings.communicators == {"dp_cp": {"max_ctas": 8, "net_name": "IB"}, "ep_dp": {"min_ctas": 2}}
    for text, message in (
        ("- dp_cp", "must map process group names to settings"),
        ("hcp: {max_ctas: 8}", "got hcp"),
        ("{dp_cp: [", r"nccl\.yaml must be YAML, got .*line 1"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            NcclSettings.of(config_path=str(file))
    with pytest.raises(FileNotFoundError, match=r"nccl_communicator_config_path must be a file, got .*none\.yaml"):
        NcclSettings.of(config_path=str(tmp_path / "none.yaml"))
