"""Corpora in Megatron's indexed format, and the samples that GPT training draws from them; see DESIGN.md."""
