"""The command line, the demo, the benchmark, and the data they use. The rest never imports them."""

__all__ = ["cli", "explain", "synthetic"]
"""What other folders may import."""
