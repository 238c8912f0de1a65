"""The command line. Lower folders do not import this one."""

__all__ = ["cli", "diagnose", "explain", "processes"]
