"""Tuning: spaces of configs, trials on a GPU, and the per-device caches that the dispatchers read."""
