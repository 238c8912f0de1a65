"""DALI pipelines, and the server that runs them. Only this folder and the benchmark import nvidia.dali."""

__all__ = ["api", "build", "device", "jpeg_engines", "output_format", "plan_server", "run_queue", "server"]
