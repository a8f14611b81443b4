"""``torch.compile`` around the engine: whatever is compiled comes out as the unsharded model does."""

from __future__ import annotations

import pytest

from tests.core.distributed.fsdp.situations.red import marked
from tests.core.distributed.fsdp.situations.table import COMPILED, situations, verdicts


@pytest.mark.parametrize("name", marked(situations(COMPILED)))
def test_ours_is_right(name: str) -> None:
    verdicts("ours", COMPILED)[name].assert_serves(situations(COMPILED)[name])
