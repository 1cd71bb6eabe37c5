"""What ranks of one job agree on."""
