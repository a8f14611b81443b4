"""Python's collector in captures and measurements."""

import gc

import pytest

from megatron.core.distributed.fsdp.matrices.replayed_work import no_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was_after_a_scope_that_fails(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), no_garbage_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
