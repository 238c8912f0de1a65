"""Choose the loading strategy: DALI, torchvision in workers, or pass-through; and say why. Main process."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST, SEMEION, USPS

from ..data.compiled_transform import compile_for_loader, left_to_torchvision
from ..data.dataset import Translated, plans_in, sources_of, wrap
from ..data.placeholders import Proxy
from ..errors import UnsupportedTransformError
from ..transforms.nested import find_nested
from ..transforms.plan import FASTER_ON_CPU, iter_steps
from ..transforms.registry import translate
from .options import LoaderOptions

NO_SERVER = (
    "its .transform is the proxy of a server, and the loader has none: give it server=..., or call server.produce_data "
    "on each batch"
)

GREY_ARRAYS = (MNIST, SEMEION, USPS)
"""FashionMNIST, KMNIST, QMNIST and EMNIST are subclasses of MNIST."""


def translated(dataset: Any, options: LoaderOptions) -> Translated:
    """Return the dataset of the workers, for the chosen strategy.

    Raises:
        UnsupportedTransformError: a transform is not translated, and ``translate`` is "all".
        ValueError: the output of a transform cannot be returned in this format.
    """
    if not options.translate:
        return Translated(dataset, {}, reason="translate=False", is_torchs=not options.on_gpu)
    if not _dali_is_installed():
        missing = "NVIDIA DALI is not installed"
        warning = f"{missing}: torch loads it, at its speed. `proxyloader doctor` says what to do"
        return Translated(dataset, {}, reason=missing, warnings=(warning,), is_torchs=True)
    # With a GPU they are LazyTensors, so that what is computed from them arrives on the loader's device.
    if options.translate is True and options.server is None and not options.on_gpu and _is_of_grey_arrays(dataset):
        return Translated(dataset, {}, reason="its images are grey arrays, which DALI does not take", is_torchs=True)
    warnings: list[str] = []
    not_translated: list[str] = []
    try:
        compile = functools.partial(_compiled, options=options, not_translated=not_translated)
        wrapped = wrap(dataset, compile=compile)
    except TypeError:  # its transform cannot be set
        if options.translate == "all":
            raise
        wrapped = dataset
    plans = plans_in(wrapped)
    for plan in plans.values():
        options.format.check(plan)
    if not options.on_gpu:
        compiled = plans_in(dataset)
        if any(plan.slow_on_cpu for key, plan in plans.items() if key not in compiled):
            return _left_to_torchvision(dataset, f"{FASTER_ON_CPU} {_slow_on_cpu(dataset)}")
    if _is_in_memory(dataset):
        reason = "" if plans else "its samples are in memory, with nothing to decode"
        is_of_tensors = all(type(source) is TensorDataset for source in sources_of(dataset))
        return Translated(wrapped, plans, reason=reason, is_torchs=is_of_tensors)
    source, *others = sources_of(dataset)
    if options.server is None and not others and isinstance(getattr(source, "transform", None), Proxy):
        warnings.append(NO_SERVER)
    return Translated(wrapped, plans, is_late=True, warnings=tuple(warnings), not_translated=tuple(not_translated))


@functools.cache  # as without workers a dataset is translated again for each batch
def _dali_is_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _compiled(transform: Any, options: LoaderOptions, not_translated: list[str]) -> Any:
    """Translate a transform, or return it as it is if its parts are to be met where they are called."""
    try:
        return compile_for_loader(transform, takes_all=options.translate is True)
    except UnsupportedTransformError as error:
        if options.translate == "all":
            raise
        if error.code != "no-tensor":  # which may be as the dataset decodes images to tensors itself
            not_translated.append(f"{_named(error)}: {error.reason}")
        return transform


def _slow_on_cpu(dataset: Any) -> str:
    """Return the classes of the transforms at which torchvision is faster on a CPU, in words."""
    transforms = [getattr(source, "transform", None) for source in sources_of(dataset)]
    held = [each for transform in transforms for each in (find_nested(transform) or {"": transform}).values()]
    parts = [part for each in held for part in translate(each).on_the_way()]
    slow = [part for part in parts if any(step.slow_on_cpu for step in iter_steps(part.steps))]
    names = ", ".join(dict.fromkeys(type(part.transform).__name__ for part in slow))
    return f"{names} with these arguments" if names else "some of its transforms"


def _named(error: UnsupportedTransformError) -> str:
    return f"{error.position}: {error.transform}" if error.transform else error.position


def _left_to_torchvision(dataset: Any, reason: str) -> Translated:
    """Leave the dataset's transforms to torchvision. Transforms that the user compiled keep their plans."""
    left = wrap(dataset, compile=left_to_torchvision)
    return Translated(
        left, plans_in(left), reason=reason, warnings=(f"torchvision transforms in the workers: {reason}",)
    )


def _is_in_memory(dataset: Any) -> bool:
    """Return whether the samples are tensors or objects in memory, so there is nothing to decode."""
    return all(type(source) in (TensorDataset, list, tuple, range) for source in sources_of(dataset))


def _is_of_grey_arrays(dataset: Any) -> bool:
    """Return whether a dataset is one of torchvision's that make each image of an array in memory, in mode L."""
    return all(
        isinstance(source, GREY_ARRAYS)
        and getattr(type(source).__getitem__, "__module__", "").startswith("torchvision.")
        for source in sources_of(dataset)
    )
