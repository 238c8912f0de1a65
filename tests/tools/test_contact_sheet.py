"""The picture that the demo draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxyloader.tools.contact_sheet import GAIN, contact_sheet


@pytest.mark.parametrize("count", [1, 8])
def test_images_stand_above_each_other_and_the_difference_is_brightened(count: int) -> None:
    theirs = torch.full((count, 3, 30, 200), 100, dtype=torch.uint8)
    ours = theirs.float()
    ours[0, 0] += 2
    sheet = np.asarray(contact_sheet(theirs, ours))
    colours = {tuple(map(int, colour)) for colour in np.unique(sheet.reshape(-1, 3), axis=0)}
    assert {(100, 100, 100), (102, 100, 100), (2 * GAIN, 0, 0), (255, 255, 255)} <= colours
    assert sheet.shape[0] > 3 * 30 and sheet.shape[1] > count * 200
