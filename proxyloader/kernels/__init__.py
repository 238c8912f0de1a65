"""Image operations with the arithmetic of Pillow and torch, as CUDA kernels, and the programs that they run."""

__all__ = ["compiler", "launcher", "operations", "pillow_check", "programs"]
