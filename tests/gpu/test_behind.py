"""A training stream that is far behind: what DALI decodes must not be written over what that stream is yet to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import OperatorConcurrency, StreamPolicy, fn, pipeline_def, types
from torchvision import transforms

from proxyloader import DataLoader, ProxyServer

from ..faults import Spelled
from ..numbered import read_numbers, spell_dataset

IMAGES, BATCH = 512, 32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", IMAGES)


def assert_right_far_behind(loader: DataLoader, white: float) -> None:
    held = []
    for batch in loader:
        torch.cuda._sleep(60_000_000)  # some 30 ms, many times what a batch takes
        held.append(batch)
    assert len(held) == IMAGES // BATCH
    for images, indices in held:
        upright = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
        assert read_numbers(upright, white) == indices.tolist()


def decoded(encoded: Any) -> Any:
    return fn.decoders.image(encoded, device="mixed")


def large(encoded: Any) -> Any:
    return fn.transpose(fn.resize(decoded(encoded), size=[512, 512]), perm=[2, 0, 1])


def cropped(encoded: Any) -> Any:
    return fn.transpose(fn.decoders.image_crop(encoded, device="mixed", crop=[64, 64]), perm=[2, 0, 1])


def decoded_and_large(encoded: Any) -> Any:
    images = decoded(encoded)
    return fn.transpose(images, perm=[2, 0, 1]), images, fn.resize(images, size=[512, 512])


GRAPHS: list[Callable[[Any], Any]] = [decoded, large, cropped, decoded_and_large]
EXECUTORS: dict[str, dict[str, Any]] = {
    "by default": {},
    "operators at once": {"concurrency": OperatorConcurrency.FULL},
    "the old executor": {"exec_dynamic": False},
}


def server_of(graph: Callable[[Any], Any], **executor: Any) -> ProxyServer:
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=0, prefetch_queue_depth=3, **executor)
    def pipeline() -> Any:
        return graph(fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8))

    return ProxyServer(pipeline())


class Encoded(Spelled):
    """Gives what the server's proxy gives for the bytes of each picture; of several outputs the first."""

    def __getitem__(self, index: int) -> Any:
        outputs, index = super().__getitem__(index)
        return outputs[0] if isinstance(outputs, tuple) else outputs, index


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_batches_of_a_server_are_right(graph: Callable[[Any], Any], executor: str, root: Path) -> None:
    with server_of(graph, **EXECUTORS[executor]) as server:
        dataset = Encoded(root, transform=server.proxy, loader=lambda path: Path(path).read_bytes())
        assert_right_far_behind(DataLoader(dataset, BATCH, num_workers=3, server=server), white=255)


@pytest.mark.parametrize("policy", [StreamPolicy.SINGLE, StreamPolicy.PER_OPERATOR])
def test_a_decoder_in_the_stream_of_others_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=f"{policy.name}.*PER_BACKEND"):
        server_of(large, stream_policy=policy)
    server_of(large, stream_policy=StreamPolicy.PER_BACKEND)


TRANSFORMS = {
    "large": transforms.Compose([transforms.Resize((512, 512)), transforms.ToTensor()]),
    "as decoded": transforms.PILToTensor(),
    "cropped": transforms.Compose([transforms.CenterCrop(64), transforms.ToTensor()]),
    "of many operators": transforms.Compose([transforms.ColorJitter(0.1, 0.1, 0.1, 0.02), transforms.ToTensor()]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_batches_of_a_transform_are_right(transform: str, root: Path) -> None:
    dataset = Spelled(root, transform=TRANSFORMS[transform])
    white = 255 if transform == "as decoded" else 1.0
    assert_right_far_behind(DataLoader(dataset, BATCH, num_workers=3), white)
