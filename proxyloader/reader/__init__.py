"""FileReaderLoader: DALI reads the files, too."""

__all__ = ["loader", "pipelines"]
"""What other folders may import."""
