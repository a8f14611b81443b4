"""Mixture-of-experts layers under Megatron-Core's names."""
