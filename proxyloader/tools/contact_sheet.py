"""Contact sheet: the same images of two loaders, and their differences."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw, ImageFont

GAIN = 32
"""How much brighter differences are drawn than they are."""


def contact_sheet(theirs: torch.Tensor, ours: torch.Tensor) -> Image.Image:
    """Three rows with captions: the stock loader's images, ours, and how they differ.

    Args:
        theirs: (N, 3, H, W), values 0 to 255.
        ours: the same images, likewise.
    """
    theirs, ours = theirs.float().cpu(), ours.cpu()
    difference = (ours - theirs).abs()
    rows = (
        ("torch.utils.data.DataLoader", theirs),
        ("proxyloader.DataLoader: the same batch", ours),
        (
            f"Difference, {GAIN} times as bright (at most {difference.max():.0f} of 255 levels)",
            difference * GAIN,
        ),
    )
    margin, gap, caption = 24, 6, 44
    count, _, height, width = theirs.shape
    font = ImageFont.load_default(size=22)
    across = max(count * (width + gap) - gap, *(int(font.getlength(title)) for title, _ in rows))
    sheet = Image.new("RGB", (across + 2 * margin, len(rows) * (caption + height) + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (title, images) in enumerate(rows):
        top = row * (caption + height) + caption
        draw.text((margin, top - 12), title, "black", font, anchor="ls")
        for column, image in enumerate(images.round().clamp(0, 255).to(torch.uint8)):
            tile = Image.fromarray(image.permute(1, 2, 0).numpy())
            sheet.paste(tile, (margin + column * (width + gap), top))
    return sheet
