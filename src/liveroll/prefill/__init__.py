"""Running a prefill plan on the model."""
