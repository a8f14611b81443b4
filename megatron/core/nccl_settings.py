"""NCCL settings of a run's process groups: SHARP for one group, and communicator options by group name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import nccl_options

SharpGroup = Literal["dp", "dp_replica"]

_logger = logging.getLogger(__name__)
_COLLNET = "NCCL_COLLNET_ENABLE"

# Megatron-Core's communicator names, mapped to the names in ``ProcessGroupCollection``.
_COMMUNICATORS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("dp_cp", "intra_dp_cp", "dp", "cp", "mp", "tp", "pp", "embd", "tp_dp_cp")},
    **{name: (name,) for name in ("tp_dp", "tp_cp", "ep", "tp_ep_pp")},
    "ep_tp": ("expt_tp",),
    "tp_ep_mp": ("tp_ep",),
    "ep_dp": ("expt_dp",),
    "intra_ep_dp": ("intra_expt_dp",),
    "inter_ep_dp": ("inter_dist_opt", "inter_expt_dist_opt"),
    "intra_dist_opt_instance": ("intra_dist_opt",),
}


@dataclass(frozen=True)
class NcclSettings:
    """NCCL settings for the process groups of a run.

    Args:
        sharp_group: the group whose reductions may run in switches: "dp" (the ranks over which weights are sharded), "dp_replica"
            (the replicas of the sharded state) or None.
        communicators: ``is_high_priority_stream`` and fields of NCCL's configuration, by Megatron-Core's name of a process group.

    Raises:
        ValueError: a name is unknown.
    """

    sharp_group: SharpGroup | None = None
    communicators: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sharp_group not in (None, *get_args(SharpGroup)):
            raise ValueError(f"sharp_enabled_group must be None, dp or dp_replica, got {self.sharp_group!r}")
        if unknown := [name for name in self.communicators if name not in _COMMUNICATORS]:
            raise ValueError(
                f"nccl_communicator_config_path must name process groups among {', '.join(_COMMUNICATORS)}, got "
                f"{', '.join(map(str, unknown))}"
            )

    @classmethod
    def of(
        cls, *, use_sharp: bool = False, sharp_enabled_group: str | None = None, config_path: str | None = None
    ) -> NcclSettings:
        """Return the settings for Megatron-Core's arguments; the default SHARP group is "dp".

        Raises:
            ValueError: a group without ``use_sharp``; the file is not a mapping from group names to settings.
            ImportError: ``config_path`` is given, and PyYAML is not installed.
        """
        if sharp_enabled_group is not None and not use_sharp:
            raise ValueError(f"sharp_enabled_group={sharp_enabled_group!r} needs use_sharp=True, got False")
        sharp: Any = (sharp_enabled_group or "dp") if use_sharp else None
        return cls(sharp, {} if config_path is None else _read(config_path))

    def options_of(self, name: str) -> Any:
        """Return the communicator options of a group of ``ProcessGroupCollection``; None if there are none."""
        found = [of for given, of in self.communicators.items() if name in _COMMUNICATORS[given]]
        return nccl_options(found[0]) if found else None

    def check(self, *, num_replicas: int) -> None:
        """Check that the run supports these settings; the default process group must be initialized.

        Raises:
            ValueError: SHARP for replicas that do not exist; communicator options for a backend other than NCCL.
        """
        if self.sharp_group == "dp_replica" and num_replicas == 1:
            raise ValueError(
                "sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances above 1, got 1: there are no replicas"
            )
        if self.communicators and "nccl" not in str(dist.get_backend_config()):
            raise ValueError(
                f"nccl_communicator_config_path needs the nccl backend, got {dist.get_backend_config()}; leave it out"
            )


@contextmanager
def collnet() -> Iterator[list[ProcessGroup]]:
    """Enable CollNet, which SHARP needs, only for the groups that the caller appends to the yielded list.

    NCCL reads the variable when it creates a communicator, and enables CollNet only for the first one. Ranks: all of these groups; blocks.

    Source: Megatron-Core's ``initialize_model_parallel``.
    """
    made: list[ProcessGroup] = []
    os.environ[_COLLNET] = "1"
    try:
        yield made
        for group in made:
            # A backend that is not bound to a device creates its communicator in the first collective.
            if dist.get_backend(group) == "nccl":
                dist.barrier(group, device_ids=[torch.cuda.current_device()])
                torch.cuda.synchronize()
            else:
                dist.barrier(group)
    finally:
        os.environ.pop(_COLLNET, None)
    if dist.get_rank() == 0:
        _logger.info(
            "SHARP is requested. Switches support a limited number of groups; NCCL uses its other algorithms for the rest. "
            "Slurm jobs need --network=sharp"
        )


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        import yaml
    except ImportError:
        raise ImportError(f"reading {path} needs PyYAML; pip install pyyaml, or leave the file out") from None
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise type(error)(f"nccl_communicator_config_path must be a file, got {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML, got {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(settings, dict) for settings in found.values()):
        raise ValueError(f"{path} must map process group names to settings (dp_cp: {{max_ctas: 8}}), got {found!r}")
    return found
