"""Programs of many steps, of ragged batches, and several programs of one image."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from .emulation import run
from .truth import EXACT, Done, Pixels, hard_images, program_of

MOST_STEPS = 12
IMAGES = [image for image in hard_images() if image.shape != (256, 256, 3)]  # which Pillow takes long for


def steps_of(names: list[str], rng: random.Random, image: Pixels) -> list[Done]:
    """Return steps of these names, each from the result of the one before."""
    done: list[Done] = []
    for name in names:
        done.append(EXACT[name](rng, done[-1].result if done else image))
    return done


names = st.lists(st.sampled_from(list(EXACT)), max_size=MOST_STEPS)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(range(len(IMAGES))), names), min_size=1, max_size=5), st.integers(0, 99))
def test_programs(batch: list[tuple[int, list[str]]], seed: int) -> None:
    rng = random.Random(seed)
    images = [IMAGES[number] for number, _ in batch]
    done = [steps_of(names, rng, image) for image, (_, names) in zip(images, batch)]
    for image, steps, result in zip(images, done, run(images, program_of(images, done)), strict=True):
        assert np.array_equal(result.numpy(), steps[-1].result if steps else image)
