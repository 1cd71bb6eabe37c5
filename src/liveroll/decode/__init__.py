"""The decode step over static tensors, and sampling."""
