"""Shards equal those of DALI's reader and iterator; how the processes that share a dataset are detected."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as DalisPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.data import BatchSampler, ChainDataset, Dataset, DistributedSampler

from proxyloader import LastBatchPolicy, ShardedSampler, World
from proxyloader.data.sharded_sampler import build_sampler, check_shard_spec

FILL, PARTIAL, DROP = LastBatchPolicy.FILL, LastBatchPolicy.PARTIAL, LastBatchPolicy.DROP


def dealt_out(samples: int, shards: int, policy: LastBatchPolicy, batch: int, **options: Any) -> list[ShardedSampler]:
    """The samplers of all processes."""
    return [
        ShardedSampler(range(samples), shards, shard, last_batch_policy=policy, batch_size=batch, **options)
        for shard in range(shards)
    ]


@given(
    samples=st.integers(0, 200),
    batch=st.integers(1, 5),
    parts=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 6)), max_size=4),
    last=st.integers(1, 20),
    shuffle=st.booleans(),
)
@settings(max_examples=100)
def test_each_sample_comes_once_even_if_the_number_of_processes_changes_within_an_epoch(
    samples: int, batch: int, parts: list[tuple[int, int]], last: int, shuffle: bool
) -> None:
    once: list[int] = []
    taken: list[tuple[int, int]] = []
    for shards, steps in parts:
        for sampler in dealt_out(samples, shards, PARTIAL, batch, shuffle=shuffle):
            once += sampler.indices(5, taken)[: steps * batch]
        taken.append((shards, steps * batch))
    left = {
        policy: [sampler.indices(5, taken) for sampler in dealt_out(samples, last, policy, batch, shuffle=shuffle)]
        for policy in LastBatchPolicy
    }
    partial, fill, kept = ([*itertools.chain(*left[policy])] for policy in (PARTIAL, FILL, DROP))
    assert sorted([*once, *partial]) == list(range(samples))
    assert {*fill} == {*partial} >= {*kept} and len({*kept}) == len(kept)
    for policy, size in ((FILL, -(-len(partial) // last)), (DROP, len(partial) // last // batch * batch)):
        assert {len(part) for part in left[policy]} == {-(-size // batch) * batch}


# --- DALI's own -------------------------------------------------------------------------------------------------------


@pipeline_def(num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
def file_reader(files: list[str], shards: int, shard: int) -> Any:
    return fn.readers.file(files=files, num_shards=shards, shard_id=shard, pad_last_batch=True, name="reader")[0]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of one byte, their number."""
    folder = tmp_path_factory.mktemp("numbered")
    for number in range(20):
        (folder / f"{number:02}").write_bytes(bytes([number]))
    return [str(folder / f"{number:02}") for number in range(20)]


def by_dali(files: list[str], shards: int, shard: int, policy: LastBatchPolicy, batch: int) -> list[list[int]]:
    """The batches of DALI's reader under DALI's iterator, in the first epoch."""
    pipeline = file_reader(files, shards, shard, batch_size=batch)
    iterator = DALIGenericIterator(
        [pipeline], ["bytes"], reader_name="reader", last_batch_policy=DalisPolicy[policy.name]
    )
    return [outputs["bytes"].flatten().tolist() for (outputs,) in iterator]


SIZES = [
    *((9, 3, 3), (10, 3, 3), (13, 2, 3), (17, 2, 3), (17, 2, 4), (20, 3, 4), (11, 4, 2), (7, 7, 1), (7, 2, 3)),
    *((19, 1, 5), (12, 5, 2), (20, 9, 2)),
]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("policy", LastBatchPolicy, ids=lambda policy: policy.value)
@pytest.mark.parametrize(("samples", "shards", "batch"), SIZES, ids=str)
def test_each_shard_equals_that_of_dalis_reader(
    numbered: list[str], samples: int, shards: int, batch: int, policy: LastBatchPolicy, shuffle: bool
) -> None:
    (whole,) = dealt_out(samples, 1, PARTIAL, batch, shuffle=shuffle, seed=4)
    order = whole.indices(3)
    assert sorted(order) == list(range(samples)) and (order != sorted(order)) == shuffle
    for sampler in dealt_out(samples, shards, policy, batch, shuffle=shuffle, seed=4):
        theirs = by_dali([numbered[index] for index in order], shards, sampler.shard_id, policy, batch)
        # With PARTIAL a shard that ends a step before the others has an empty batch there.
        assert theirs[-1] or (policy is PARTIAL and all(theirs[:-1]))
        sampler.set_epoch(3)
        assert sampler.batch_size == batch
        assert list(BatchSampler(sampler, batch, False)) == [each for each in theirs if each]
        assert len(sampler) == sum(map(len, theirs))


# --- processes, as torch.distributed, torchrun or Slurm tell of them -------------------------------------------------

Tell = Callable[..., None]
TORCHRUNS, SLURMS = ("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Of a number of processes and a rank, which nobody tells of before."""
    for name in (*TORCHRUNS, *SLURMS):
        monkeypatch.delenv(name, raising=False)

    def tell(size: Any = None, rank: Any = None, names: tuple[str, str] = TORCHRUNS) -> None:
        for name, value in zip(names, (size, rank)):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return tell


def test_the_default_is_one_process_and_torchruns_environment_is_read(tell: Tell) -> None:
    assert World.current() == World(1, 0) and World.detect() is None
    tell(4, 3)
    assert World.current() == World.detect() == World(4, 3)


def test_a_slurm_job_step_is_read_without_torchrun(tell: Tell) -> None:
    tell(None, 5, SLURMS)  # also a batch script has it, which is in no job step
    assert World.detect() is None
    tell(8, 5, SLURMS)
    assert World.current() == World(8, 5)
    asked_for(World(9, 7))  # one task on each node may start the processes of the training
    tell(2, 1)
    assert World.current() == World(2, 1)


def test_torch_distributed_takes_precedence_over_the_environment(tell: Tell, tmp_path: Path) -> None:
    tell(4, 3)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        assert World.current() == World(1, 0)
    finally:
        torch.distributed.destroy_process_group()
    assert World.current() == World(4, 3)


@pytest.mark.parametrize(
    ("size", "rank", "message"),
    [
        ("4", None, "WORLD_SIZE and RANK must be set together.* got WORLD_SIZE=4 and RANK=None. Set or unset both"),
        (None, "0", "got WORLD_SIZE=None and RANK=0"),
        ("four", "0", "WORLD_SIZE must be an integer >= 1, as set by torchrun or srun, got 'four'"),
        ("0", "0", "WORLD_SIZE must be an integer >= 1, .* got '0'"),
        ("2", "-1", "RANK must be an integer >= 0, .* got '-1'"),
        ("2", "2", "with RANK < WORLD_SIZE, .* got WORLD_SIZE=2 and RANK=2"),
    ],
)
def test_an_invalid_environment_is_an_error_that_names_the_variable(
    size: Any, rank: Any, message: str, tell: Tell
) -> None:
    tell(size, rank)
    with pytest.raises(ValueError, match=message):
        World.current()


def test_auto_detects_the_world_and_given_numbers_are_kept(tell: Tell) -> None:
    unknown = "num_shards=2 requires a rank, .* rank {} of {}. Use"
    assert World.resolve("auto", "auto") == World.resolve(1, "auto") == World(1, 0)
    with pytest.raises(ValueError, match=unknown.format(0, 1)):
        World.resolve(2, "auto")
    tell(4, 3)
    assert World.resolve("auto", "auto") == World.resolve(4, "auto") == World(4, 3)
    assert (World.resolve("auto", 1), World.resolve(7, 5)) == (World(4, 1), World(7, 5))
    with pytest.raises(ValueError, match=unknown.format(3, 4)):
        World.resolve(2, "auto")


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_the_order_depends_only_on_seed_and_epoch_and_each_iteration_is_the_next_epoch() -> None:
    def orders(seed: int) -> list[list[int]]:
        sampler = ShardedSampler(range(50), 1, 0, shuffle=True, seed=seed)
        return [list(sampler) for _ in range(3)]

    torch.manual_seed(1)
    first, state = orders(0), torch.get_rng_state()
    torch.manual_seed(2)
    assert orders(0) == first and orders(1) != first
    assert len({tuple(order) for order in first}) == 3
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    sampler = ShardedSampler(range(30), 2, 1, shuffle=True)
    assert [list(sampler), list(sampler)] == [sampler.indices(0), sampler.indices(1)]
    assert sampler.epoch == 2
    sampler.set_epoch(7)
    assert [list(sampler), list(sampler)] == [sampler.indices(7), sampler.indices(8)]
    with pytest.raises(ValueError, match="epoch must be an integer >= 0, got -1"):
        sampler.set_epoch(-1)


def test_it_follows_a_growing_dataset_and_accepts_dalis_policies() -> None:
    samples = [0] * 4
    sampler = ShardedSampler(samples, 2, 1)
    assert list(sampler) == [2, 3]
    samples += [0] * 4
    assert len(sampler) == 4 and list(sampler) == [4, 5, 6, 7]
    for policy in LastBatchPolicy:
        assert LastBatchPolicy.of(policy) is LastBatchPolicy.of(DalisPolicy[policy.name]) is policy
        assert LastBatchPolicy.of(policy.value) is policy
    assert {policy.name for policy in LastBatchPolicy} == {policy.name for policy in DalisPolicy}


POLICY = "last_batch_policy must be 'fill', 'partial', 'drop' or .* got"
SAMPLER = functools.partial(ShardedSampler, range(3), 1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: World(0, 0), "num_shards must be an integer >= 1, or 'auto', got 0"),
        (lambda: World("two", 0), "num_shards must be an integer.*got 'two'"),  # type: ignore[arg-type]
        (lambda: World(True, 0), "num_shards must be an integer.*got True"),
        (lambda: World(2, 2), r"shard_id must be an integer in \[0, 1\], got 2"),
        (lambda: World(2, -1), "shard_id must be .*got -1"),
        (lambda: World(2, 1.0), r"shard_id must be .*got 1\.0"),  # type: ignore[arg-type]
        (lambda: World(2, True), "shard_id must be .*got True"),
        *((functools.partial(SAMPLER, last_batch_policy=policy), POLICY)
          for policy in ("pad", None, 0, enum.Enum("Colour", "RED").RED)),  # type: ignore[attr-defined]
        (lambda: SAMPLER(last_batch_policy="fill"), "last_batch_policy='fill' requires batch_size"),
        (lambda: SAMPLER(last_batch_policy="drop"), "last_batch_policy='drop' requires batch_size"),
        (lambda: SAMPLER(last_batch_policy="fill", batch_size=0), "batch_size must be an integer >= 1, got 0"),
        (lambda: SAMPLER(seed=1.5), "seed must be an integer >= 0, got 1.5"),
    ],
)  # fmt: skip
def test_invalid_numbers_and_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sampler_created_before_the_process_group_is_refused(tell: Tell) -> None:
    sampler, by_number = ShardedSampler(range(4)), ShardedSampler(range(4), 1, 0)
    assert list(sampler) == [0, 1, 2, 3]
    tell(2, 1)
    with pytest.raises(ValueError, match="rank 0 of 1, but this process is now rank 1 of 2. Create .* after"):
        list(sampler)
    assert list(by_number) == [0, 1, 2, 3] and list(ShardedSampler(range(4))) == [2, 3]


# --- what a loader asks for -------------------------------------------------------------------------------------------


def asked_for(
    num_shards: Any = None, policy: Any = None, dataset: Any = range(10), **arguments: Any
) -> ShardedSampler | None:
    defaults = dict(batch_size=3, shuffle=None, sampler=None, batch_sampler=None, drop_last=False, seed=None)
    return build_sampler(dataset, num_shards, policy, **(defaults | arguments))


class Marked:
    rank, num_replicas = 0, 2
    sampler = range(10)


SHARDED = dict(num_shards=World(2, 0))
TEN: Any = range(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(policy="fill"), "last_batch_policy='fill' requires num_shards"),
        (SHARDED | dict(policy=PARTIAL, drop_last=True), "drop_last=True contradicts last_batch_policy='partial'"),
        (SHARDED | dict(policy="none"), "last_batch_policy must be 'fill', 'partial', 'drop'"),
        (SHARDED | dict(policy="fill", batch_size=None), "last_batch_policy='fill' requires batch_size"),
        (SHARDED | dict(dataset=ChainDataset([])), r"map-style dataset with a length, got ChainDataset.*World.current"),
        (SHARDED | dict(dataset=Dataset()), "map-style dataset with a length, got Dataset"),
        (
            SHARDED | dict(sampler=DistributedSampler(TEN, 2, 0)),
            "cannot be combined with sampler=DistributedSampler.* Remove sampler .* or remove num_shards",
        ),
        (SHARDED | dict(sampler=ShardedSampler(range(10), 2, 0)), "cannot be combined with sampler=ShardedSampler"),
        (SHARDED | dict(sampler=Marked()), "cannot be combined with sampler=Marked"),
        (SHARDED | dict(batch_sampler=Marked()), "cannot be combined with batch_sampler=Marked"),
        (
            SHARDED | dict(batch_sampler=BatchSampler(DistributedSampler(TEN, 2, 0), 2, False)),
            "cannot be combined with batch_sampler=BatchSampler.* Remove batch_sampler",
        ),
        (dict(num_shards=3), "num_shards=3 requires a rank, .* rank 0 of 1"),
        (
            dict(sampler=ShardedSampler(range(10), 2, 0, last_batch_policy="fill", batch_size=4)),
            "batch_size must be 4, as in the sampler with last_batch_policy='fill', got 3",
        ),
    ],
)
def test_contradicting_arguments_are_refused_with_advice(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked_for(**arguments)


def test_shards_that_contradict_the_detected_processes_are_refused(tell: Tell) -> None:
    tell(4, 1)
    with pytest.raises(ValueError, match="=2 contradicts .* rank 1 of 4. Use num_shards='auto'.*ShardedSampler"):
        asked_for(World(2, 1))
    with pytest.raises(ValueError, match="num_shards=1 requires a rank"):
        asked_for(1)
    found = [asked_for("auto"), asked_for(4), asked_for(World(4, 1))]
    assert [each and each.world for each in found] == [World(4, 1)] * 3


def test_an_interrupted_epoch_resumes_only_in_the_same_order() -> None:
    def dealt(shards: int = 2, **arguments: Any) -> dict[str, Any]:
        return ShardedSampler(range(9), shards, 0, **arguments).shard_spec

    for now in (dealt(seed=2), dealt(3), dealt(last_batch_policy="fill", batch_size=3)):
        check_shard_spec(dealt(seed=1), now)
    with pytest.raises(ValueError, match="saved within an epoch .* order of the samples differs.*loader.set_epoch"):
        check_shard_spec(dealt(shuffle=True), dealt(shuffle=True, seed=1))
