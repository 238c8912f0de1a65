"""The command line, the demo, the benchmark, and their data. No other folder imports them."""

__all__ = ["cli", "diagnose", "explain", "processes"]
"""Modules that other folders may import."""
