"""Synthetic photographs for tests, the demo and the benchmark."""
