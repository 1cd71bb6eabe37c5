"""Everything known about the model: what it is, how it runs, how it is left as found."""
