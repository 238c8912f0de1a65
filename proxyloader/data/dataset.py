"""The user's dataset: the datasets inside it, the transforms that are known before it is read, and ``wrap``."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info

from ..transforms.chain import START
from ..transforms.plan import Plan
from .deferral import Deferral, current
from .hooks import deferred

T = TypeVar("T", covariant=True)


def get_length(dataset: Any) -> int | None:
    """Return the length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def get_sources(dataset: Any) -> list[Any]:
    """Return the datasets inside nested ``Subset`` and ``ConcatDataset``, or the dataset itself."""
    if type(dataset) is Subset:
        return get_sources(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [source for each in dataset.datasets for source in get_sources(each)]
    return [dataset]


def describe_dataset(dataset: Any) -> str:
    """Return the class and the size of a dataset, as in "Subset of ImageFolder, 500 samples"."""
    length = get_length(dataset)
    size = f", {length:,} samples" if length is not None else ""
    names = [type(dataset).__name__]
    while type(dataset) in (Subset, ConcatDataset):
        dataset = dataset.dataset if type(dataset) is Subset else next(iter(dataset.datasets))
        names.append(type(dataset).__name__)
    return " of ".join(names) + size


def find_plans(dataset: Any, find_obstacle: Callable[[Plan], str]) -> tuple[dict[str, Plan], str]:
    """Return the plans of each ``.transform`` that returns a tensor, by key, and why torchvision runs another one.

    Their pipelines can start before the workers. Other transforms are found when the dataset calls them.
    """
    plans, obstacle = {}, ""
    for source in get_sources(dataset):
        transform = getattr(source, "__dict__", {}).get("transform")  # a property may draw random numbers
        chain = START.through(transform)
        if why := START.find_obstacle(transform, find_obstacle):
            obstacle = obstacle or why
        elif chain is not None and chain.state.kind == "tensor":
            plans[chain.plan.key] = chain.plan
    return plans, obstacle


def has_transform(dataset: Any) -> bool:
    """Return whether a dataset has a transform, and so probably images."""
    attributes = [getattr(source, "__dict__", {}) for source in get_sources(dataset)]
    return any(own.get(name) is not None for own in attributes for name in ("transform", "transforms"))


class WrappedDataset(Dataset[T]):
    def __init__(self, dataset: Dataset[T]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> T:
        if current() is not None or get_worker_info() is not None:  # a loader decides, torch's decodes
            return self.dataset[index]
        with deferred(Deferral(on_gpu=False, find_obstacle=lambda plan: "")):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def wrap(dataset: Dataset[T]) -> WrappedDataset[T]:
    """Return the same dataset, whose images are not decoded when it is read.

    ``DataLoader`` reads datasets in this way itself; wrapping one shows what it gets. Reading a sample runs the
    dataset's own code. Images of JPEGs are PIL images without pixels, and transforms, functions of torchvision and
    methods of Pillow record what they would do. The result is a PIL image or a tensor whose pixels are computed on
    first use, by Pillow and torchvision. Its ``encoded`` attribute is the content of the file, and
    ``proxyloader.explain(dataset)`` prints what was recorded. Attributes of the dataset are those of the result.

    Args:
        dataset: a map-style dataset.

    Raises:
        TypeError: it is an IterableDataset.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset must be a map-style dataset, got {type(dataset).__name__}")
    return WrappedDataset(dataset)
