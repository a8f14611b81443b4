"""What happens where a checkpoint and a sharded state dict do not hold the same keys."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterable

from megatron.core.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint

_logger = logging.getLogger(__name__)


class StrictHandling(enum.Enum):
    """Which differences of keys are told, and how. A key that is asked for and not stored cannot be loaded.

    - ``ASSUME_OK_UNEXPECTED``, ``IGNORE_ALL``: none is told; the first raises for missing keys, the second leaves them out.
    - ``LOG_...``: a log line names them; ``LOG_ALL`` leaves missing keys out.
    - ``RAISE_...``: an error names them.
    - ``RETURN_...``: they are returned, and missing keys are left out.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether ``load`` returns the keys that differ."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)

    @property
    def leaves_out_missing(self) -> bool:
        """Whether keys that are not stored are left out of the result."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RETURN_ALL, StrictHandling.IGNORE_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the handling of a name.

    Raises:
        ValueError: there is none of this name.
    """
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        known = ", ".join(one.value for one in StrictHandling)
        raise ValueError(f"strict must be one of {known}, got {strict!r}") from None


def judge_keys(strict: StrictHandling, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Tell differences of keys as ``strict`` says.

    Raises:
        CheckpointingException: keys differ that must not.
    """
    kinds = [("asked for and not stored", sorted(missing)), ("stored and not asked for", sorted(unexpected))]
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.LOG_UNEXPECTED) or not strict.leaves_out_missing:
        absent = kinds[0][1]
        if absent:
            raise CheckpointingException(f"keys must be in the checkpoint to be loaded, got none of {absent[:8]}")
    for what, keys in kinds if strict.name.startswith(("LOG", "RAISE")) else ():
        if keys and strict.name.startswith("RAISE"):
            raise CheckpointingException(f"no keys must be {what} with {strict.value}, got {len(keys)}: {keys[:8]}")
        if keys:
            _logger.warning("%d keys are %s: %s", len(keys), what, keys[:8])


def verify_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Raise CheckpointingException where a folder is no distributed checkpoint."""
    if not check_is_distributed_checkpoint(checkpoint_dir):
        raise CheckpointingException(
            f"{checkpoint_dir} must be a distributed checkpoint, got no metadata.json in it; check the path, or load folders of "
            "save_checkpoint with load_checkpoint"
        )
