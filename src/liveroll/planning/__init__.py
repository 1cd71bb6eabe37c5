"""Deciding how prompts are prefilled; no tensors here."""
