"""proxyloader: decode and augment images on the GPU by changing one import.

    from proxyloader import DataLoader      # was: from torch.utils.data import DataLoader

Importing this package loads no DALI and touches no CUDA; the first iteration does.
"""

from typing import TYPE_CHECKING, Any

from .dataset import wrap as wrap
from .errors import ImageError as ImageError
from .errors import InputError as InputError
from .errors import MissingDaliError as MissingDaliError
from .errors import PipelineError as PipelineError
from .errors import ProxyLoaderError as ProxyLoaderError
from .errors import UnsupportedTransformError as UnsupportedTransformError
from .loader import DataLoader as DataLoader
from .sample import EncodedImage as EncodedImage
from .transforms import compile_transforms as compile_transforms

if TYPE_CHECKING:
    from .server import ProxyServer as ProxyServer

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "EncodedImage",
    "ImageError",
    "InputError",
    "MissingDaliError",
    "PipelineError",
    "ProxyLoaderError",
    "ProxyServer",
    "UnsupportedTransformError",
    "compile_transforms",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "ProxyServer":  # its base class is DALI's
        from .server import ProxyServer

        return ProxyServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
