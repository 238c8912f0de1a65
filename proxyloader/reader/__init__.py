"""FileReaderLoader: DALI reads the files, too."""

__all__ = ["loader", "pipelines"]
"""Modules that other folders may import."""
