"""What Accelerate makes of torch's loader and of ours, in one process or in several.

As a script it compares both in the processes of one group, and prints one line of JSON for each of them.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import distributed
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms

import proxyloader
from proxyloader.loader.options import LoaderOptions

from ..side_by_side import assert_same, tried
from .one_rank import Numbered

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
SAMPLES, BATCH = 45, 4

KINDS = {"torch": StockLoader, "ours": functools.partial(proxyloader.DataLoader, device="cpu")}


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(self.samples.__getitem__, range(len(self.samples)))


def samples(root: str) -> Any:
    return Subset(Numbered(root, TRANSFORM), range(SAMPLES))


@dataclass
class Case:
    """A way to use Accelerate, and what its loader is made with.

    Attributes:
        config: of Accelerate's loaders.
        arguments: of the loader; its dataset is that of ``samples``, or a stream of it.
        skip: number of batches of the first epoch that are skipped.
        by_batch: returns a batch sampler for a number of samples, in the place of ``batch_size`` and ``shuffle``.
    """

    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    skip: int = 0
    by_batch: Callable[[int], Any] | None = None
    streams: bool = False

    def loader(self, kind: str, root: str) -> Any:
        dataset = samples(root)
        if self.by_batch is not None:
            return KINDS[kind](dataset, batch_sampler=self.by_batch(len(dataset)), **self.arguments)
        if self.streams:
            return KINDS[kind](Stream(dataset), BATCH, **self.arguments)
        return KINDS[kind](dataset, BATCH, **{"shuffle": True} | self.arguments)

    @property
    def dispatches(self) -> bool:
        """Whether one process reads for all."""
        return bool(self.config.get("dispatch_batches", self.streams))

    def accelerator(self) -> Accelerator:
        return Accelerator(
            gradient_accumulation_steps=2, cpu=True, dataloader_config=DataLoaderConfiguration(**self.config)
        )


CASES = {
    "plain": Case(),
    "workers": Case(arguments={"num_workers": 1}),
    "split": Case({"split_batches": True}),
    "dispatched": Case({"dispatch_batches": True}),
    "dispatched and split": Case({"dispatch_batches": True, "split_batches": True}, {"num_workers": 1}),
    "uneven": Case({"even_batches": False}),
    "uneven and split": Case({"even_batches": False, "split_batches": True}),
    "seedable": Case({"use_seedable_sampler": True, "data_seed": 5}),
    "full batches": Case(arguments={"drop_last": True, "shuffle": False}),
    "own batches": Case(by_batch=lambda count: BatchSampler(RandomSampler(range(count)), BATCH, False)),
    "own class of batches": Case(by_batch=lambda count: Pairs(SequentialSampler(range(count)), 2, False)),
    "skipping": Case(skip=2),
    "skipping and dispatched": Case({"dispatch_batches": True}, skip=2),
    "skipping and seedable": Case({"use_seedable_sampler": True}, {"num_workers": 1}, skip=3),
    "stream": Case(streams=True),
    "stream, each its own": Case({"dispatch_batches": False}, {"num_workers": 1}, streams=True),
    "skipping in a stream": Case(skip=1, streams=True),
}
if find_spec("torchdata"):
    CASES["stateful"] = Case({"use_stateful_dataloader": True})
    CASES["dispatched and stateful"] = Case({"dispatch_batches": True, "use_stateful_dataloader": True})


class Pairs(BatchSampler):
    """A user's own class, with batches in another order."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch[::-1] for batch in super().__iter__()])


def shown(kind: str, case: Case, root: str) -> dict[str, Any]:
    """What a training loop sees of a loader that Accelerate has prepared."""
    accelerator = case.accelerator()
    torch.manual_seed(21)
    given = case.loader(kind, root)
    loader = accelerator.prepare(given)
    epochs = [_epoch(accelerator, accelerator.skip_first_batches(loader, case.skip)) if case.skip else None]
    epochs += [_epoch(accelerator, loader) for _ in range(2)]
    if kind == "ours":
        assert_ours(loader, given, reads=accelerator.is_main_process or not case.dispatches)
    return {"length": tried(len, loader), "epochs": epochs}


def assert_ours(loader: Any, given: Any, reads: bool = True) -> None:
    """Accelerate's loader is made of one of ours, set as the one that it was given, and its images come from DALI.

    ``reads`` is False for a process that only receives batches of another.
    """
    inner = loader.base_dataloader
    assert isinstance(loader, proxyloader.DataLoader) and isinstance(inner, proxyloader.DataLoader)
    assert LoaderOptions.from_loader(inner) == LoaderOptions.from_loader(given)
    assert (inner._counts.images[0] > 0) == reads and not inner._counts.images[2]


def _epoch(accelerator: Accelerator, loader: Any) -> list[Any]:
    steps = []
    for images, numbers in loader:
        state = accelerator.gradient_state
        with accelerator.accumulate():
            steps.append(
                {
                    "images": images,
                    "numbers": numbers.tolist(),
                    "is last": state.end_of_dataloader,
                    "remainder": state.remainder,
                    "steps now": accelerator.sync_gradients,
                    "gathered": accelerator.gather_for_metrics(numbers).tolist() if accelerator.even_batches else None,
                }
            )
    return steps


def resumed(kind: str, case: Case, root: str) -> Any:
    """What is left after two batches of the second epoch, in the loop that goes on and in one that resumes."""

    def prepared() -> Any:
        torch.manual_seed(21)
        return case.accelerator().prepare(case.loader(kind, root))

    loader, left, state = prepared(), [], {}
    for _ in range(2):
        left = []
        for step, (images, numbers) in enumerate(loader):
            left.append((images, numbers.tolist()))
            state = copy.deepcopy(loader.state_dict()) if step == 1 else state
    again = prepared()
    again.load_state_dict(state)
    return left[2:], [(images, numbers.tolist()) for images, numbers in again]


def refused(root: str) -> str:
    """What is said of a loader that divides its samples itself."""
    loader = proxyloader.DataLoader(samples(root), BATCH, num_shards="auto", device="cpu")
    try:
        Accelerator(cpu=True).prepare(loader)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    meet, root, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    distributed.init_process_group("gloo", f"file://{meet}", timeout=timedelta(seconds=60), **ranks)
    told: dict[str, Any] = {"rank": distributed.get_rank(), "cases": {}, "refused": refused(root)}
    for name in names:
        theirs, ours = (shown(kind, CASES[name], root) for kind in KINDS)
        assert_same(ours, theirs, name)
        told["cases"][name] = [[step["numbers"] for step in epoch or []] for epoch in ours["epochs"]]
    for name, by_epoch in {"seedable": True, "plain": False}.items():
        case = Case({"use_stateful_dataloader": True, "use_seedable_sampler": by_epoch})
        left, again = ([numbers for _, numbers in part] for part in resumed("ours", case, root))
        told["left " + name], told["resumed " + name] = left, again
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
