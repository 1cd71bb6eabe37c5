"""Deciding which request runs when, on which slot and pages; no tensors here."""
