"""A folder of photographs to try things with: the public name of ``tools/synthetic/dataset.py``."""

from .tools.synthetic.dataset import make_dataset

__all__ = ["make_dataset"]
