"""How sharded state dicts are saved and loaded: always in DCP's format, each rank what it holds."""
