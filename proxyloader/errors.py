"""Exceptions that proxyloader raises.

The second base class is what torchvision, Pillow, torch or DALI raise in the same situation. Subclasses of ImageError
are in ``data/bad_samples.py``, as this module does not require Pillow. All exceptions can be pickled.
"""

import copy
import os
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

E = TypeVar("E", bound="ProxyLoaderError")


class ProxyLoaderError(Exception):
    """Base class of all exceptions that proxyloader raises.

    Attributes:
        CODES: codes of the class and their meanings. The first is the default.
        code: one of the codes. It is stable, unlike the message.
    """

    CODES: ClassVar[dict[str, str]] = {
        "no-next-sample": '`on_error="replace"` requires integer indices and a dataset with a length',
    }

    def __init__(self, message: str, *, code: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.code = code or next(iter(self.CODES))
        vars(self).update(fields)

    def at(self: E, where: str, **fields: Any) -> E:
        """Return a copy of the error with its message prefixed by ``where`` and the given attributes replaced."""
        located = copy.copy(self)
        located.args = (f"{where}: {self}",)
        vars(located).update(fields)
        return located


class ImageError(ProxyLoaderError, OSError):
    """An image that not even Pillow can read: missing, empty, truncated, too large, or not an image.

    Attributes:
        index: index of the sample in the dataset; None if unknown.
        path: path of the file; "" if there is none.
        reason: the reason, without the index and the path.
        errno: error number if the operating system could not read the file; otherwise None.
    """

    CODES = {
        "undecodable": "the file does not contain a complete image",
        "unreadable": "the file cannot be read; `errno` gives the reason",
        "machine": "the file cannot be read, possibly because of the disk, the network or a process limit",
        "too-large": "the image has more pixels than Pillow or DALI supports",
        "none-readable": "no replacement sample, or no sample of the epoch, can be read",
    }

    index: Any = None
    path = ""
    reason: str
    errno: int | None = None

    def __init__(self, message: str, *, reason: str = "", **fields: Any) -> None:
        super().__init__(message, reason=reason or message, **fields)

    @property
    def filename(self) -> str | None:
        """Path if the operating system could not read the file; otherwise None, as in Pillow's errors."""
        return self.path or None if self.errno is not None else None

    @property
    def strerror(self) -> str | None:  # type: ignore[override]
        """Description of ``errno``, or None."""
        return None if self.errno is None else os.strerror(self.errno)


class InputError(ProxyLoaderError, ValueError):
    """An input of a transform or of ``server.proxy`` that does not match the pipeline or the rest of the batch.

    Attributes:
        index: index of the sample in the dataset; None if unknown, or if the error is about a batch.
    """

    CODES = {
        "wrong-input": "the transform or pipeline does not accept this input",
        "wrong-kind": "the dtype or number of dimensions does not match the pipeline or the other samples",
        "wrong-number": "the inputs do not match those of the transform or pipeline in number or name",
        "mixed-batch": "only some samples of a batch went through the proxy",
        "large-batch": "the batch is larger than the pipeline's batch size",
        "foreign-server": "the sample comes from the proxy of another server",
    }

    index: Any = None


class PipelineError(ProxyLoaderError, RuntimeError):
    """A failure of a DALI pipeline, with DALI's message, or a pipeline that cannot be used.

    Attributes:
        indices: dataset indices of the samples in the batch; None if unknown.
    """

    CODES = {
        "failed": "DALI failed on a batch",
        "stopped": "the run was canceled because its server was stopped",
        "forked": "the pipeline belongs to the parent of this forked process",
        "taken": "the pipeline was passed to another server or loader",
        "no-gpu": "the pipeline requires a GPU, but none is available",
        "no-kernels": "the CUDA kernels cannot be compiled or loaded",
        "no-decoder": "DALI cannot load its image decoding library, nvImageCodec",
        "no-engines": "the pipeline requires a GPU's JPEG engines, which cannot be used",
    }

    indices: Sequence[Any] | None = None


class MissingDaliError(ProxyLoaderError, ImportError):
    """DALI is not installed, and the requested feature requires it."""

    CODES = {"missing-dali": "DALI cannot be imported"}
