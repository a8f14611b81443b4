"""Recording of the experts that routers choose, and choices that are given instead of made.

Reinforcement learning replays in training the experts that the serving engine, or an earlier forward, chose for the same tokens.

Shapes: t tokens, e experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

import torch

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(scores [t, e], k, number of groups, groups of a token) -> (scores of the chosen [t, k], experts [t, k])."""


class RouterReplayAction(Enum):
    """What a router does with its choices."""

    RECORD = "record"
    """Keep the experts that it chooses."""
    REPLAY_FORWARD = "replay_forward"
    """Choose the target experts."""
    REPLAY_BACKWARD = "replay_backward"
    """Choose the target experts of the earliest forward that was not recomputed yet."""


class RouterReplay:
    """The recorded and the target experts of one router; it chooses experts as its action says.

    The static methods act on the instances of all routers, in the order in which these were built.

    Source: Megatron-Core's class of this name (names and behavior).
    """

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []

    def __init__(self) -> None:
        self.layer_number: int | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.static_buffer: torch.Tensor | None = None
        self.target_topk_idx: torch.Tensor | None = None
        self.recorded_topk_idx: torch.Tensor | None = None
        self.replay_backward_list: list[torch.Tensor] = []
        RouterReplay.global_router_replay_instances.append(self)

    def set_target_indices(self, topk_indices: torch.Tensor) -> None:
        """Set the experts [t, k] of the next forward, and of its recomputation."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> torch.Tensor | None:
        """Return the recorded experts [t, k]."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: torch.Tensor) -> None:
        """Record experts [t, k]; with a static buffer they are copied to its first t rows."""
        self.recorded_topk_idx = topk_indices
        if self.static_buffer is not None:
            self.recorded_topk_idx = self.static_buffer[: topk_indices.shape[0]].copy_(topk_indices)

    def clear_indices(self) -> None:
        """Forget all recorded and target experts."""
        self.target_topk_idx = self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Let the router record or replay from now on."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let the router choose by itself from now on."""
        self.router_replay_action = None

    def set_static_buffer(self, buffer: torch.Tensor) -> None:
        """Record into ``buffer`` [most tokens, k] from now on, as graphs of a device need it."""
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Record without a buffer from now on."""
        self.static_buffer = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose = torch.topk,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by scores [t, e], or those to replay; record them if asked to.

        Args:
            default_compute_topk: chooses by scores.

        Returns:
            The scores of the chosen experts, and these, [t, k] each.

        Raises:
            RuntimeError: there is nothing to replay.
        """
        action = self.router_replay_action
        if action in (None, RouterReplayAction.RECORD):
            best, experts = default_compute_topk(scores, topk, num_groups, group_topk)
            if action is RouterReplayAction.RECORD:
                self.record_indices(experts)
            return best, experts
        if action is RouterReplayAction.REPLAY_FORWARD:
            target = self.target_topk_idx
        else:
            target = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        if target is None:
            raise RuntimeError(
                f"the router of layer {self.layer_number} has no experts for {action}; call set_target_indices before"
            )
        target = target.to(scores.device)
        return scores.gather(1, target), target

    @staticmethod
    def set_replay_data(all_layers_topk_indices: Sequence[torch.Tensor]) -> None:
        """Set the target experts [t, k] of each router.

        Raises:
            ValueError: there are more or fewer routers.
        """
        instances = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(instances):
            raise ValueError(
                f"all_layers_topk_indices must hold a tensor for each of {len(instances)} routers, got "
                f"{len(all_layers_topk_indices)}"
            )
        for one, indices in zip(instances, all_layers_topk_indices, strict=True):
            one.set_target_indices(indices)

    @staticmethod
    def get_recorded_data() -> list[torch.Tensor | None]:
        """Return the recorded experts of each router."""
        return [one.get_recorded_indices() for one in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Forget all recorded and target experts of all routers."""
        for one in RouterReplay.global_router_replay_instances:
            one.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Let all routers record or replay from now on."""
        for one in RouterReplay.global_router_replay_instances:
            one.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Let all routers choose by themselves from now on."""
        for one in RouterReplay.global_router_replay_instances:
            one.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forget all routers: call it before another model is built."""
        RouterReplay.global_router_replay_instances.clear()

    @staticmethod
    def set_global_static_buffers(static_buffer: torch.Tensor) -> None:
        """Let each router record into its part of a buffer [most tokens, number of routers, k].

        Raises:
            ValueError: the buffer is for more or fewer routers.
        """
        instances = RouterReplay.global_router_replay_instances
        if static_buffer.shape[1] != len(instances):
            raise ValueError(
                f"static_buffer must be [tokens, {len(instances)} routers, k], got {tuple(static_buffer.shape)}"
            )
        for one, buffer in zip(instances, static_buffer.unbind(1), strict=True):
            one.set_static_buffer(buffer)

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Let all routers record without a buffer from now on."""
        for one in RouterReplay.global_router_replay_instances:
            one.clear_static_buffer()
