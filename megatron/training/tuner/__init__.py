"""The tuner of a launch line: ``--fsdp-tune`` measures which settings of the engine are fastest, and trains with them."""
