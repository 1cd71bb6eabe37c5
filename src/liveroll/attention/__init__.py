"""Attention over packed prompts and paged rows, registered with transformers."""
