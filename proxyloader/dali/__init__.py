"""DALI pipelines, and the server that runs them. No other folder but the benchmark's imports nvidia.dali."""

__all__ = [
    "api",
    "build",
    "device",
    "executor",
    "jpeg_engines",
    "operators",
    "output_format",
    "plan_server",
    "run",
    "run_queue",
    "server",
]
"""What other folders may import."""
