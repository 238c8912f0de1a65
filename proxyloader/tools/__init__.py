"""The command line and its verbs. Nothing below imports this folder."""

__all__ = ["cli", "diagnose", "explain", "processes"]
"""Modules that other folders may import."""
