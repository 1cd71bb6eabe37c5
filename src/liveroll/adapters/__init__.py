"""The engine in the shape that trainers expect: a drop-in for DeepSpeed's rollouts, and generation for TRL."""
