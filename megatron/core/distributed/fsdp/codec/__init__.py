"""How a main weight becomes what rests, travels and is multiplied."""
