"""Everything proxyloader raises on purpose.

    ProxyLoaderError
    ├── UnsupportedTransformError (ValueError)   a transform has no equal in DALI; raised when the loader is built
    ├── ImageError (OSError)                     an image cannot be read or decoded; names the sample
    ├── InputError (ValueError)                  the proxy was called with something DALI cannot take
    ├── PipelineError (RuntimeError)             DALI failed on a batch whose images are all sound
    └── MissingDaliError (ImportError)           DALI is needed and not installed

One leaf for each decision a caller can take; the builtin beside each is the one that torchvision, torch or DALI
raise in the same place, so an ``except OSError`` around a training loop goes on working.
"""

from __future__ import annotations

from typing import Any


class ProxyLoaderError(Exception):
    """Base of all errors below."""


class UnsupportedTransformError(ProxyLoaderError, ValueError):
    """A torchvision transform, or a way of using one, that is not translated; says which, by position and class."""


class ImageError(ProxyLoaderError, OSError):
    """An image that Pillow, too, could not read: missing, empty, cut off, too large, or not an image.

    Attributes:
        index: of the sample in the dataset; None where that is not known.
        path: of the file; "" where there is none.
        reason: what is wrong, without the rest of the message.
    """

    def __init__(self, message: str, *, index: Any = None, path: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.index, self.path, self.reason = index, path, reason or message


class InputError(ProxyLoaderError, ValueError):
    """What was given to ``server.proxy`` does not fit the pipeline's inputs or the other samples of its batch."""


class PipelineError(ProxyLoaderError, RuntimeError):
    """The DALI pipeline raised; the message carries DALI's own."""


class MissingDaliError(ProxyLoaderError, ImportError):
    """DALI is not installed, and the thing asked for exists only with it."""
