"""Starting the ranks, building the model and running ``pretrain`` from start to end."""
