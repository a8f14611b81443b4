"""Mixture-of-experts layers under Megatron-Core's names; see DESIGN.md beside this file."""
