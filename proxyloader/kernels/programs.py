"""Programs: the pixel operations of each image of a batch, and the kernel launches that execute them.

A program is a sequence of steps: an opcode and its numbers. The programs of a batch are cut into jobs. A job reads an
image once and writes it once: it has at most one step that reads other pixels or statistics of the image, followed by
per-pixel steps. The jobs of all images at the same depth form a stage, which takes a few launches.

Images are RGB, uint8, (H, W, 3); a grayscale image has equal channels. NumPy arrays describe the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MAX_NUMBERS = 16


class Kind(IntEnum):
    """What a job does. Within a stage, jobs are sorted in this order."""

    STATS = 0  # needs statistics of the whole image first
    POINTS = 1
    GATHER = 2
    BOX_BLUR = 3
    TENSOR_BLUR = 4
    RESAMPLE = 5
    STORE = 6
    OUTPUT = 7  # changes what another job stored before


PIXEL_KERNELS = {Kind.GATHER: "pixels", Kind.STORE: "store", Kind.OUTPUT: "erase_output"}
"""Kernels with one thread per pixel. The first also runs all lower kinds."""

OPCODES: dict[str, Kind] = {
    # Per channel.
    "TABLE": Kind.POINTS,  # extras: 768 bytes as 192 numbers
    "BRIGHTNESS": Kind.POINTS,  # factor
    "POSTERIZE": Kind.POINTS,  # bits
    "SOLARIZE": Kind.POINTS,  # threshold
    "SOLARIZE_ADD": Kind.POINTS,  # addition
    "INVERT": Kind.POINTS,
    "TENSOR_BRIGHTNESS": Kind.POINTS,  # factor
    "CONTRAST": Kind.STATS,  # factor
    "AUTOCONTRAST": Kind.STATS,
    "EQUALIZE": Kind.STATS,
    "TENSOR_CONTRAST": Kind.STATS,  # factor, whether as in v1, whether the tensor has one channel
    "TENSOR_AUTOCONTRAST": Kind.STATS,  # whether as in v1
    # Per pixel.
    "SATURATION": Kind.POINTS,  # factor
    "GREY": Kind.POINTS,
    "HUE": Kind.POINTS,  # turn, in levels
    "CHANNELS": Kind.POINTS,  # source of each channel
    "MATRIX": Kind.POINTS,  # 12, by rows
    "ERASE": Kind.POINTS,  # left, top, right, bottom, r, g, b
    "TENSOR_SATURATION": Kind.POINTS,  # factor, whether as in v1
    "TENSOR_GREY": Kind.POINTS,  # whether as in v1
    "TENSOR_HUE": Kind.POINTS,  # turn, of 1; whether as in v1
    # Reading other pixels. In the kernels, too, SELECT is the first of them.
    "SELECT": Kind.GATHER,  # extras: rows, columns
    # Number of branches, weight of the image, 7 of the branches; 7 branches, by their program, later by their place.
    "MIX": Kind.GATHER,
    "BLEND": Kind.GATHER,  # share of the branch, 8 unused; the branch
    "SHARPNESS": Kind.GATHER,  # factor
    "TENSOR_SHARPNESS": Kind.GATHER,  # factor, whether as in v1
    "KERNEL3": Kind.GATHER,  # offset; extras: weights
    "KERNEL5": Kind.GATHER,  # offset; extras: weights
    "AFFINE_NEAREST": Kind.GATHER,  # r, g, b outside, 6 coefficients of the map; likewise the next two
    "AFFINE_BILINEAR": Kind.GATHER,
    "AFFINE_BICUBIC": Kind.GATHER,
    "PERSPECTIVE_NEAREST": Kind.GATHER,  # r, g, b outside, 8 coefficients of the map; likewise the next two
    "PERSPECTIVE_BILINEAR": Kind.GATHER,
    "PERSPECTIVE_BICUBIC": Kind.GATHER,
    # r, g, b outside, how they blend (0 not at all, 1 as in v1, 2 as in v2), 6 or 8 coefficients of the map.
    "TENSOR_AFFINE_NEAREST": Kind.GATHER,
    "TENSOR_AFFINE_BILINEAR": Kind.GATHER,
    "TENSOR_PERSPECTIVE_NEAREST": Kind.GATHER,
    "TENSOR_PERSPECTIVE_BILINEAR": Kind.GATHER,
    "TENSOR_RESIZE": Kind.GATHER,  # as floats: filter (2 or 3), whether it is fused
    "BOX_BLUR": Kind.BOX_BLUR,  # radius in x, in y, passes
    "TENSOR_BLUR": Kind.TENSOR_BLUR,  # reach in x, in y; extras: weights in x, in y
    # Crop: left, top, width, height; box in it: left, top, right, bottom; filter; 0 Pillow, 1 torch;
    # r | g << 8 | b << 16 outside; whether the height is resized first.
    "RESAMPLE": Kind.RESAMPLE,
    # To the output. Channels (3, or 1: the first), scale (0 none, 1 level / 255, 2 level * (1 / 255)), 3 mean, 3 std.
    "STORE": Kind.STORE,
    # Those of STORE; filter (2 or 3), whether it is fused; height and width after the resize of floats; the first
    # column of the output in it, the step to the next, and both for rows.
    "STORE_RESIZED": Kind.STORE,
    # In the output. Left, top, width, height, whether the extras have the values (H, W, channels), 3 values, channels.
    "ERASE_OUTPUT": Kind.OUTPUT,
}
"""Opcodes, the kind of job that each needs, and the numbers of its steps. The kernels define what an opcode does."""

CODE = {name: code for code, name in enumerate(OPCODES)}
FIRST_BRANCH, MAX_BRANCHES = 9, 7
"""Steps that read the results of other programs: number of the first of these, and how many there may be."""

KINDS = np.array(list(OPCODES.values()), np.int32)

FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}  # Pillow's numbers of its filters

SUPPORTS = np.array([0.0, 3.0, 1.0, 2.0, 0.5, 1.0])  # radius of each filter, by its number

STEP = np.dtype([("code", "i4"), ("extra", "i4"), ("numbers", "f8", (MAX_NUMBERS,))], align=True)
"""``struct Step``. ``extra`` is the index of its first number in the extras."""

_JOB_FIELDS = {
    "u8": ("source", "target"),
    "i8": ("table_x", "table_y"),
    "i4": ("source_height", "source_width", "height", "width", "first", "count", "stats", "source_base", "target_base"),
}
JOB = np.dtype([(name, kind) for kind, names in _JOB_FIELDS.items() for name in names], align=True)
"""``struct Job``. ``source`` and ``target`` are offsets from a base until ``Schedule.bind``. ``table_x`` and
``table_y`` are the indices of the weights of a resize in the pool."""

SCRATCH, OUTPUT, DECODED = 0, 1, 2
"""Bases of addresses: the memory of the results of jobs, the outputs, and from 2 on each decoded image."""

STATS_BYTES, ALIGNMENT = 8 + 3 * 256 * 5, 16
TILE, BLUR_STRIP, BLUR_BYTES = 32, 32, 1 << 16
"""Constants of the kernels. The strips of tall images are narrower, to fit into the shared memory of any GPU."""

Indices = NDArray[np.int64]


class Launch(NamedTuple):
    """One launch: the name of a kernel, its grid, the threads of a block, bytes of shared memory, the first job."""

    name: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    first: int


class Programs:
    """The programs of N images, built step by step for all or some of them."""

    def __init__(self, sizes: Any) -> None:
        # (N, 2) int64, the height and width of each image after the steps so far, and those of the decoded images.
        self.sizes: Indices = np.array(sizes, np.int64).reshape(-1, 2)
        self.decoded_sizes = self.sizes.copy()
        self.sources = np.arange(len(self.sizes))  # (N,) int64, the decoded image from which each starts
        # For each call of ``add``, the images, their steps as bytes, which NumPy joins faster than structures, and
        # height and width before and after the step.
        self._added: list[tuple[NDArray[Any], ...]] = []
        self._extras: list[NDArray[np.float32]] = []
        self._num_extras = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def add(
        self, name: str, numbers: Any = (), images: Indices | None = None, sizes: Any = None, extras: Any = ()
    ) -> None:
        """Append a step to the programs of ``images``, by default of all.

        Args:
            numbers: for each number of the step, its value, or an array with the value of each image.
            sizes: height and width of the results, if they change: two values, or two arrays.
            extras: more numbers of the step: for each image, a one-dimensional array.
        """
        images = np.arange(len(self)) if images is None else images
        if not len(images):
            return
        steps = np.zeros(len(images), STEP)
        steps["code"] = CODE[name]
        for column, values in enumerate(numbers):
            steps["numbers"][:, column] = values
        around = self.sizes[images].repeat(2, 0).reshape(-1, 4)
        if sizes is not None:
            around[:, 2], around[:, 3] = sizes
            self.sizes[images] = around[:, 2:]
        if len(extras):
            ends = self._num_extras + np.cumsum([len(each) for each in extras])
            steps["extra"] = np.concatenate(([self._num_extras], ends[:-1]))
            self._extras += [np.asarray(each, np.float32) for each in extras]
            self._num_extras = int(ends[-1])
        self._added.append((images, steps.view(f"V{STEP.itemsize}"), around))

    def branch(self, images: Indices) -> Indices:
        """Add a copy of the program of each of these images, as a branch. Return the copies."""
        added = len(self) + np.arange(len(images))
        program_of = np.full(len(self), -1)
        program_of[images] = added
        for number, (theirs, *others) in enumerate(self._added):
            copies = program_of[theirs]
            chosen = copies >= 0
            more = copies[chosen], *(each[chosen] for each in others)
            self._added[number] = tuple(map(np.concatenate, zip((theirs, *others), more)))
        self.sizes = np.concatenate([self.sizes, self.sizes[images]])
        self.sources = np.concatenate([self.sources, self.sources[images]])
        return added


class Jobs:
    """The jobs of programs, in the order of the images until they are scheduled, and their steps."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        images, steps, sizes = map(np.concatenate, zip(*programs._added))
        order = np.argsort(images, kind="stable")
        images, sizes = images[order], sizes[order]
        self.steps = steps = steps[order].view(STEP)
        kinds = KINDS[steps["code"]]
        starts = (kinds != Kind.POINTS) | (np.diff(images, prepend=-1) != 0)
        # Blurs and resizes are jobs of their own.
        starts[1:] |= (kinds[:-1] >= Kind.BOX_BLUR) & (kinds[:-1] <= Kind.RESAMPLE)
        at = np.flatnonzero(starts)
        last = np.append(at[1:], len(steps)) - 1
        self.images, self.kinds = images[at], kinds[at]
        self.jobs = np.zeros(len(at), JOB)
        self.jobs["first"], self.jobs["count"] = at, last - at + 1
        self.jobs["source_height"], self.jobs["source_width"] = sizes[at, :2].T
        self.jobs["height"], self.jobs["width"] = sizes[last, 2:].T
        self._last_job = np.bincount(self.images).cumsum() - 1
        self._first_job = np.append(0, self._last_job[:-1] + 1)[self.images]  # of the image of each job
        self._turns = np.arange(len(at)) - self._first_job
        # Steps that read the results of branches, and the branches. Each is the first of its job.
        self._mixes = np.flatnonzero((steps["code"] == CODE["MIX"]) | (steps["code"] == CODE["BLEND"]))
        self._branches = steps["numbers"][self._mixes, FIRST_BRANCH:].astype(np.int64)
        self.stages = self._find_stages()

    def _find_stages(self) -> Indices:
        """Return the stage of each job. Jobs that read branches wait for them, and so do the jobs after these."""
        stages: Indices = self._turns.copy()
        at = np.searchsorted(self.jobs["first"], self._mixes)
        while len(at) and (late := stages[self._last_job][self._branches].max(1) + 1 - stages[at]).max() > 0:
            moves = np.zeros_like(stages)
            moves[at] = np.maximum(late, 0)
            moved = moves.cumsum()
            stages += moved - (moved - moves)[self._first_job]
        return stages

    def _place_weights(self) -> int:
        """Give each axis of each resize a place in the pool. Return the size of the pool, in int32."""
        at = np.flatnonzero(self.kinds == Kind.RESAMPLE)
        jobs, numbers = self.jobs[at], self.steps["numbers"][self.jobs["first"][at]]
        spans = numbers[:, 6:8] - numbers[:, 4:6]
        counts = np.stack([jobs["width"], jobs["height"]], 1).astype(np.int64)
        support = SUPPORTS[numbers[:, 8].astype(int)][:, None]
        taps = 2 * np.ceil(support * np.maximum(spans / np.maximum(counts, 1), 1.0)).astype(np.int64) + 1
        sizes = 1 + (2 + taps) * counts
        ends = sizes.cumsum().reshape(sizes.shape)
        self.jobs["table_x"][at], self.jobs["table_y"][at] = (ends - sizes).T
        return int(ends[-1, -1])

    def schedule(
        self,
        channels: int,
        dtype: torch.dtype,
        channels_last: bool,
        counts: Sequence[int] = (),
        files: Indices | None = None,
    ) -> Schedule:
        """Order the jobs by launch, and pack all arrays.

        Outputs follow one another, each dense, (C, H, W), or (H, W, C) if channels are last.

        Args:
            counts: number of images in each output; by default, one output has all.
            files: the decoded image of each image; None: each has its own.
        """
        pool_size = self._place_weights() if Kind.RESAMPLE in self.kinds else 0
        sizes = self.programs.sizes[: len(self.programs.decoded_sizes)]  # without the branches
        output_ends = channels * sizes.prod(1).cumsum()
        scratch_bytes = self._place(dtype.itemsize * np.concatenate(([0], output_ends[:-1])))
        first_images = slice(None) if files is None else np.unique(files, return_index=True)[1]
        decoded_sizes = self.programs.decoded_sizes[first_images]
        return Schedule(
            memory=np.concatenate([each.view(np.uint8) for each in (self.jobs, self.steps, *self.programs._extras)]),
            begins=(0, self.jobs.nbytes, self.jobs.nbytes + self.steps.nbytes),
            launches=tuple(self._launches()),
            scratch_bytes=scratch_bytes,
            stats_bytes=int((self.kinds == Kind.STATS).sum()) * STATS_BYTES,
            pool_bytes=4 * pool_size,
            shapes=[(height, width, 3) for height, width in decoded_sizes.tolist()],
            decoded_bytes=3 * int(decoded_sizes.prod(1).sum()),
            files=files,
            outputs=[(len(part), _distinct(part)) for part in np.split(sizes, np.cumsum(counts, dtype=int)[:-1])],
            num_values=int(output_ends[-1]),
            channels=channels,
            dtype=dtype,
            channels_last=channels_last,
        )

    def _place(self, begins: Indices) -> int:
        """Set the bases and offsets of all jobs, given those of the outputs, and sort the jobs by their launches.

        Return the size of the memory of their results, in bytes. Each image has two buffers, used alternately. The
        decoded image is only read, as several programs may start from it.
        """
        jobs, images, is_output = self.jobs, self.images, self.kinds >= Kind.STORE
        sizes = 3 * jobs["height"].astype(np.int64) * jobs["width"]
        room = np.zeros((len(self._last_job), 2), np.int64)
        np.maximum.at(room, (images, self._turns % 2), np.where(is_output, 0, -(-sizes // ALIGNMENT) * ALIGNMENT))
        places = room.cumsum().reshape(room.shape) - room
        targets = places[images, self._turns % 2]
        is_first = self._turns == 0
        jobs["source"] = np.where(is_first, 0, places[images, (self._turns - 1) % 2])
        jobs["source_base"] = np.where(is_first, DECODED + self.programs.sources[images], SCRATCH)
        self.steps["numbers"][self._mixes, FIRST_BRANCH:] = targets[self._last_job][self._branches]
        jobs["target"] = np.where(is_output, begins.take(images, mode="clip"), targets)  # branches have no output
        jobs["target_base"] = np.where(is_output, OUTPUT, SCRATCH)
        order = np.argsort(self.stages * len(Kind) + self.kinds, kind="stable")
        self.jobs, self.kinds, self.stages = jobs[order], self.kinds[order], self.stages[order]
        needs_stats = np.flatnonzero(self.kinds == Kind.STATS)
        self.jobs["stats"][needs_stats] = np.arange(len(needs_stats))
        return int(room.sum())

    def _launches(self) -> Iterator[Launch]:
        """Yield the launches in order. The jobs must be placed. Blocks beyond the end of a smaller image return."""
        groups = self.stages * len(Kind) + np.maximum(self.kinds, Kind.GATHER)
        bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
        for first, end in itertools.pairwise(bounds):
            jobs = self.jobs[first:end]
            if count := int((self.kinds[first:end] == Kind.STATS).sum()):
                yield Launch("stats", (_blocks(jobs[:count], 8192), count), 256, 4 * 768, first)
                yield Launch("tables", (3, count), 256, 0, first)
            yield from self._launch(Kind(max(self.kinds[first], Kind.GATHER)), jobs, first)

    def _launch(self, kind: Kind, jobs: NDArray[Any], first: int) -> Iterator[Launch]:
        count, height, width = len(jobs), int(jobs["height"].max()), int(jobs["width"].max())
        tiles = int((-(-jobs["height"] // TILE) * -(-jobs["width"] // TILE)).max())
        if kind in PIXEL_KERNELS:
            yield Launch(PIXEL_KERNELS[kind], (_blocks(jobs, 256), count), 256, 0, first)
        elif kind == Kind.BOX_BLUR:
            yield Launch("blur_rows", (height, count), 128, 6 * width, first)
            strips = np.clip(BLUR_BYTES // 2 // jobs["height"], 1, BLUR_STRIP)
            blocks, shared = -(-3 * jobs["width"] // strips), 2 * strips * jobs["height"]
            yield Launch("blur_columns", (int(blocks.max()), count), 256, int(shared.max()), first)
        elif kind == Kind.TENSOR_BLUR:
            reach_x, reach_y = map(int, self.steps["numbers"][jobs["first"], :2].max(0))
            shared = 4 * (2 * (reach_x + reach_y + 1) + (TILE + 2 * reach_y) * 3 * TILE)
            yield Launch("blur_tensor", (tiles, count), 256, shared, first)
        else:
            yield Launch("build_weights", (2, count), 128, 0, first)
            yield Launch("resample", (tiles, count), 256, 0, first)


@dataclass(eq=False)
class Schedule:
    """The launches of a batch, and all that they read besides the decoded images."""

    memory: Any  # the jobs, steps and extras, (bytes,) uint8; None while a batch is sent, which has them elsewhere
    begins: tuple[int, ...]  # where each of these begins
    launches: tuple[Launch, ...]  # in order
    # Memory that the kernels need. Only that of the statistics must be zero at the start.
    scratch_bytes: int
    stats_bytes: int
    pool_bytes: int
    shapes: list[tuple[int, int, int]]  # (height, width, 3) of each decoded image, as DALI reports them
    decoded_bytes: int  # size of all decoded images
    files: Indices | None  # the decoded image that each image starts from; None: each has its own
    # Number of images in each output, with their heights and widths; only one if all are equal.
    outputs: list[tuple[int, list[tuple[int, int]]]]
    num_values: int  # number of values of all outputs
    channels: int  # of the outputs, like the next two
    dtype: torch.dtype
    channels_last: bool

    def bind(self, memory: NDArray[np.uint8], scratch: int, outputs: int, decoded: Any) -> None:
        """Copy the arrays to ``memory``, with addresses in place of offsets: ``scratch`` of ``scratch_bytes`` bytes,
        aligned to 16, ``outputs`` from which the offsets of the outputs count, ``decoded`` of each decoded image."""
        memory[: len(self.memory)] = self.memory
        jobs = memory[: self.begins[1]].view(JOB)
        decoded = decoded if self.files is None else np.asarray(decoded)[self.files]
        bases = np.concatenate(([scratch, outputs], decoded)).astype(np.uint64)
        jobs["source"] += bases[jobs["source_base"]]
        jobs["target"] += bases[jobs["target_base"]]


def _distinct(sizes: Indices) -> list[tuple[int, int]]:
    return [(height, width) for height, width in sizes[: 1 if (sizes == sizes[:1]).all() else None].tolist()]


def _blocks(jobs: NDArray[Any], per_block: int) -> int:
    """Return the number of blocks for the pixels of the largest image."""
    return -(-int((jobs["height"].astype(np.int64) * jobs["width"]).max()) // per_block)
