"""The sharding engines that are compared: ours, those of others, and the ideal."""
