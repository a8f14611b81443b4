"""The sharding engines that are compared: ours, other people's, and the ideal."""
