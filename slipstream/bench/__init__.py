"""What `slipstream bench` runs."""
