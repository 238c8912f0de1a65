"""Contact sheet: the same images of two loaders, and their differences."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw, ImageFont

GAIN = 32
"""Factor by which differences are amplified in the picture."""


def contact_sheet(theirs: torch.Tensor, ours: torch.Tensor) -> Image.Image:
    """Return a picture of three rows with captions: the images of the stock loader, (N, 3, H, W) with values 0 to 255,
    the same of ours, and their differences."""
    theirs, ours = theirs.float().cpu(), ours.cpu()
    difference = (ours - theirs).abs()
    rows = (
        ("torch.utils.data.DataLoader", theirs),
        ("proxyloader.DataLoader: the same batch", ours),
        (f"Difference, {GAIN} times as bright (at most {difference.max():.0f} of 255 levels)", difference * GAIN),
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
