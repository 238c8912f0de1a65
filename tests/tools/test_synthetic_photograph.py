"""The painted pictures: same pixels every time, of the statistics of photographs, with a class that can be learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyloader.make_dataset import photograph

SMALL = (48, 36)


@pytest.mark.parametrize("size", [(8, 8), (9, 33), (500, 375), (11, 700), (1100, 20)], ids=str)
def test_has_exactly_the_size_asked_for(size: tuple[int, int]) -> None:
    image = photograph(3, size=size)
    assert (image.size, image.mode) == (size, "RGB")


def test_its_label_is_dealt_by_its_index_unless_given() -> None:
    dealt = photograph(13, size=SMALL, classes=10).tobytes()
    assert dealt == photograph(13, size=SMALL, classes=10, label=3).tobytes()
    assert dealt != photograph(13, size=SMALL, classes=10, label=4).tobytes()


def test_uses_the_whole_range_of_brightness_and_rarely_clips() -> None:
    levels = np.stack([np.asarray(photograph(index, size=(250, 190))).mean(axis=2) for index in range(10)])
    assert np.percentile(levels, 2) < 50
    assert np.percentile(levels, 98) > 200
    assert np.mean((levels == 0) | (levels == 255)) < 0.02


def test_its_spectrum_falls_as_a_photographs_does_and_white_noise_does_not() -> None:
    power = np.zeros((256, 129))
    for index in range(8):
        grey = np.asarray(photograph(index, size=(256, 256)).convert("L"), np.float64)
        window = np.outer(np.hanning(256), np.hanning(256))
        power += np.abs(np.fft.rfft2((grey - grey.mean()) * window)) ** 2
    radius = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.rfftfreq(256)[None, :]) * 256
    octaves = [power[(radius >= low) & (radius < 2 * low)].mean() for low in (4, 8, 16, 32, 64)]
    slope = np.polyfit(np.arange(5), np.log2(octaves), 1)[0]
    assert -3 < slope < -1.2  # photographs: power about 1 / f**2; white noise: 0


def test_the_class_can_be_learned_from_a_few_pixels() -> None:
    def pixels(indices: range) -> np.ndarray[Any, np.dtype[np.float64]]:
        pictures = (photograph(index, size=(64, 48)).convert("YCbCr").resize((8, 8)) for index in indices)
        return np.stack([np.asarray(picture, np.float64)[..., 1:].ravel() for picture in pictures])

    means = pixels(range(300)).reshape(30, 10, -1).mean(axis=0)
    test = pixels(range(300, 400))
    found = ((test[:, None] - means[None]) ** 2).sum(axis=2).argmin(axis=1)
    accuracy = np.mean(found == np.arange(100) % 10)
    assert accuracy > 0.5  # chance is 0.1


def test_another_seed_makes_other_pictures() -> None:
    assert photograph(0, size=SMALL, seed=1).tobytes() != photograph(0, size=SMALL, seed=2).tobytes()


def test_no_two_pictures_are_alike() -> None:
    assert len({photograph(index, size=SMALL, label=0).tobytes() for index in range(30)}) == 30


def test_a_picture_does_not_depend_on_those_made_before() -> None:
    before = photograph(7, size=SMALL).tobytes()
    photograph(8, size=(300, 600), seed=5)
    assert photograph(7, size=SMALL).tobytes() == before
