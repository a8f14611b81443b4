"""Routers' losses of each layer, for callers with a training loop of their own, by Megatron-Core's names.

A router whose ``loss_record`` no training loop has set adds its losses here. Values stay on the device until a caller reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection

_TRACKER: dict[str, dict[str, Any]] = {}


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Return for each loss its ``values`` [number of layers], and the groups over which these are summed and averaged."""
    return _TRACKER


def save_to_aux_losses_tracker(
    name: str,
    loss: torch.Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: ProcessGroup | None = None,
    avg_group: ProcessGroup | None = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """Add this rank's part of a layer's loss to what it has added since the last ``clear_aux_losses_tracker``.

    Args:
        loss: [] without coefficient.
        layer_number: from 1; None: nothing is added.
        reduce_group: the ranks whose parts add up to the loss.
        avg_group: ranks over which the loss is averaged.
        reduce_group_has_dp: whether ``reduce_group`` spans the data-parallel ranks, over which losses are averaged otherwise.
    """
    if layer_number is None:
        return
    entry = _TRACKER.setdefault(name, {})
    add_value(entry, layer_number - 1, loss, num_layers)
    entry.update(reduce_group=reduce_group, avg_group=avg_group, needs_dp_avg=not reduce_group_has_dp)


def clear_aux_losses_tracker() -> None:
    """Set all values to zero."""
    for entry in _TRACKER.values():
        entry["values"].zero_()


def reduce_aux_losses_tracker_across_ranks(
    track_names: Sequence[str] | None = None, pg_collection: ProcessGroupCollection | None = None
) -> None:
    """Complete the values of these losses (None: all) over pipeline stages, parts of sequences and data-parallel ranks.

    Args:
        pg_collection: has ``pp`` and ``dp``; None: the groups of ``initialize_model_parallel``.

    Ranks: all of these groups.
    """
    if pg_collection is None:
        stages, data = parallel_state.group_named("pp"), parallel_state.group_named("dp")
    else:
        stages, data = pg_collection.pp, pg_collection.dp
    for name in _TRACKER if track_names is None else track_names:
        if (entry := _TRACKER.get(name)) is None:
            continue
        for group in (stages, entry["reduce_group"]):
            reduce_values(entry["values"], group)
        for group in (entry["avg_group"], data if entry["needs_dp_avg"] else None):
            reduce_values(entry["values"], group, averages=True)


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: dict[str, torch.Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: str | Sequence[str] | None = None,
    num_layers: int | None = None,
    num_moe_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> str:
    """Complete the losses of a step over all ranks, log their means over layers, and set all values to zero.

    Args:
        loss_scale: factor of the values, 1 / microbatches.
        writer: a ``SummaryWriter``.
        wandb_writer: a run of Weights & Biases.
        total_loss_dict: the means are added to its entries.
        per_layer_logging: give writers each layer's value, too.
        force_initialize: begin losses that this rank has no layer of, as on a pipeline stage without experts; all ranks must
            reduce the same.
        track_names: the losses; None: all that there are.
        num_layers: of the model, without those of multi-token prediction.
        num_moe_layers: by how many the sums are divided; None: by those of ``moe_layer_freq`` and ``mtp_num_layers``.

    Returns:
        What the log says of the means that ``total_loss_dict`` did not take.

    Raises:
        ValueError: ``num_layers`` is missing where it is needed.

    Ranks: as ``reduce_aux_losses_tracker_across_ranks``.
    """
    names = [track_names] if isinstance(track_names, str) else list(_TRACKER if track_names is None else track_names)
    if num_layers is None and (force_initialize or num_moe_layers is None):
        raise ValueError("num_layers must be given with force_initialize or without num_moe_layers, got None")
    if force_initialize:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        for name in names:
            values = torch.zeros((num_layers or 0) + (mtp_num_layers or 0), device=device)
            _TRACKER.setdefault(name, {"values": values, "reduce_group": None, "avg_group": None, "needs_dp_avg": True})
    reduce_aux_losses_tracker_across_ranks(names, pg_collection)
    if num_moe_layers is None:
        num_moe_layers = _num_moe_layers(num_layers or 0, moe_layer_freq) + (mtp_num_layers or 0)
    said = ""
    for name in names:
        if name not in _TRACKER:
            continue
        values = _TRACKER[name]["values"] * loss_scale
        mean = values.sum() / num_moe_layers
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + mean
        else:
            said += f" {name}: {mean:.2f} |"
        write(writer, wandb_writer, name, mean, iteration)
        for layer, value in enumerate(values.tolist() if per_layer_logging else ()):
            write(writer, wandb_writer, f"moe/{name}_layer_{layer}", value, iteration)
    clear_aux_losses_tracker()
    return said


def add_value(entry: dict[str, Any], layer: int, loss: torch.Tensor, num_layers: int) -> None:
    """Add a loss [] to ``entry["values"]`` at a layer; there are as many values as the largest model of the process has layers."""
    known = entry.get("values")
    if known is None or known.shape[0] < num_layers:
        entry["values"] = torch.zeros(num_layers, device=loss.device)
        if known is not None:
            entry["values"][: known.shape[0]] = known
    entry["values"][layer] += loss.detach()


def write(writer: Any, wandb_writer: Any, name: str, value: torch.Tensor | float, iteration: int) -> None:
    """Give a value to the writers that there are."""
    if writer is not None:
        writer.add_scalar(name, value, iteration)
    if wandb_writer is not None:
        wandb_writer.log({name: value}, iteration)


def _num_moe_layers(num_layers: int, moe_layer_freq: int | Sequence[int] | None) -> int:
    if isinstance(moe_layer_freq, int | None):
        return len(range(0, num_layers, moe_layer_freq or 1))
    return sum(moe_layer_freq)


def reduce_values(values: torch.Tensor, group: ProcessGroup | None, *, averages: bool = False) -> None:
    """Sum values over a group, or average them. Ranks: all of it."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
        if averages:
            values /= group.size()
