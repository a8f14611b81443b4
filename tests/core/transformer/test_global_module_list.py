"""Modules of a part of the model have the names that they have in the whole."""

from torch import nn

from megatron.core.transformer.global_module_list import GlobalModuleList


def test_names_are_global_and_indices_local() -> None:
    """A second stage's first layer is layers.4 in checkpoints, and layers[0] for the code that runs the stage."""
    layers = GlobalModuleList([nn.Linear(1, 1), nn.Identity()], first_index=4)
    assert [name for name, _ in layers.named_parameters()] == ["4.weight", "4.bias"]
    assert isinstance(layers[0], nn.Linear) and layers[-1] is layers[1]
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Identity] and len(layers) == 2
