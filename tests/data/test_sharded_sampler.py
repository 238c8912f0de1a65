"""Shards by a plain reckoning, and by DALI's own reader and iterator."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as DalisPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from proxyloader import LastBatchPolicy, ShardedSampler, World
from proxyloader.data.sharded_sampler import build_sampler, check_dealt, find_sharded

from .test_distributed import Tell
from .test_distributed import tell as tell

FILL, PARTIAL, DROP = LastBatchPolicy.FILL, LastBatchPolicy.PARTIAL, LastBatchPolicy.DROP
POLICIES = pytest.mark.parametrize("policy", LastBatchPolicy, ids=lambda policy: policy.value)


def dealt_out(samples: int, shards: int, policy: LastBatchPolicy, batch: int, **options: Any) -> list[ShardedSampler]:
    """The samplers of all processes."""
    return [
        ShardedSampler(range(samples), shards, shard, last_batch_policy=policy, batch_size=batch, **options)
        for shard in range(shards)
    ]


def batches_of(sampler: ShardedSampler) -> list[list[int]]:
    assert sampler.batch_size is not None
    return list(BatchSampler(sampler, sampler.batch_size, False))


def by_hand(order: list[int], shards: int, policy: LastBatchPolicy, batch: int) -> list[list[list[int]]]:
    """The batches of each shard, by walking through the order; for no fewer samples than shards."""
    share: list[list[int]] = [[] for _ in range(shards)]
    for place, index in enumerate(order):
        # The shard that a place is in: the last that begins there or before.
        share[max(k for k in range(shards) if k * len(order) // shards <= place)].append(index)
    cut = [[part[at : at + batch] for at in range(0, len(part), batch)] for part in share]
    if policy is DROP:
        least = min(sum(len(each) == batch for each in part) for part in cut)
        return [part[:least] for part in cut]
    if policy is FILL:
        steps = max(map(len, cut))
        return [
            [[*chunk, *[whole[-1]] * batch][:batch] for chunk in [*part, *[[]] * steps][:steps]]
            for part, whole in zip(cut, share)
        ]
    return cut


@given(
    shards=st.integers(1, 9),
    more=st.integers(0, 60),
    batch=st.integers(1, 11),
    policy=st.sampled_from(LastBatchPolicy),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=300)
def test_each_shard_has_the_batches_of_a_plain_reckoning(
    shards: int, more: int, batch: int, policy: LastBatchPolicy, shuffle: bool, epoch: int
) -> None:
    samples = shards + more
    (whole,) = dealt_out(samples, 1, PARTIAL, batch, shuffle=shuffle, seed=4)
    order = whole.indices(epoch)
    assert sorted(order) == list(range(samples))
    samplers = dealt_out(samples, shards, policy, batch, shuffle=shuffle, seed=4)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    found = [batches_of(sampler) for sampler in samplers]
    assert found == by_hand(order, shards, policy, batch)
    assert [len(sampler) for sampler in samplers] == [sum(map(len, part)) for part in found]


@given(samples=st.integers(0, 40), shards=st.integers(1, 50), batch=st.integers(1, 5), shuffle=st.booleans())
@settings(max_examples=200)
def test_the_promises_hold_for_any_number_of_samples_also_for_fewer_than_shards(
    samples: int, shards: int, batch: int, shuffle: bool
) -> None:
    found = {
        policy: [batches_of(sampler) for sampler in dealt_out(samples, shards, policy, batch, shuffle=shuffle)]
        for policy in LastBatchPolicy
    }
    once = [index for part in found[PARTIAL] for each in part for index in each]
    assert sorted(once) == list(range(samples))
    for policy in (FILL, DROP):
        assert len({len(part) for part in found[policy]}) == 1
        assert all(len(each) == batch for part in found[policy] for each in part)
    assert {index for part in found[FILL] for each in part for index in each} == set(range(samples))
    kept = [index for part in found[DROP] for each in part for index in each]
    assert len(kept) == len(set(kept)) == shards * (samples // shards // batch * batch)


@given(
    samples=st.integers(0, 200),
    batch=st.integers(1, 5),
    parts=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 6)), max_size=4),
    last=st.integers(1, 16),
    shuffle=st.booleans(),
)
@settings(max_examples=300)
def test_each_sample_comes_once_however_often_the_number_of_processes_changes_in_an_epoch(
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
    assert sorted([*once, *itertools.chain(*left[PARTIAL])]) == list(range(samples))
    assert {*itertools.chain(*left[FILL])} == {*itertools.chain(*left[PARTIAL])}
    for policy in (FILL, DROP):
        assert len({len(part) for part in left[policy]}) == 1 and len(left[policy][0]) % batch == 0
    dropped = len([*itertools.chain(*left[PARTIAL])]) - len([*itertools.chain(*left[DROP])])
    assert 0 <= dropped < last * batch + last


def test_an_empty_shard_gives_no_batch_or_repeats_the_sample_that_it_would_begin_with() -> None:
    assert [batches_of(sampler) for sampler in dealt_out(2, 3, PARTIAL, 2)] == [[], [[0]], [[1]]]
    assert [batches_of(sampler) for sampler in dealt_out(2, 3, FILL, 2)] == [[[0, 0]], [[0, 0]], [[1, 1]]]
    assert [batches_of(sampler) for sampler in dealt_out(2, 3, DROP, 2)] == [[], [], []]


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


@POLICIES
@pytest.mark.parametrize(
    ("samples", "shards", "batch"),
    [(9, 3, 3), (10, 3, 3), (13, 2, 3), (17, 2, 3), (17, 2, 4), (20, 3, 4), (11, 4, 2), (7, 7, 1), (19, 1, 5)],
    ids=str,
)
def test_each_shard_is_that_of_dalis_reader(
    numbered: list[str], samples: int, shards: int, batch: int, policy: LastBatchPolicy
) -> None:
    for sampler in dealt_out(samples, shards, policy, batch):
        theirs = by_dali(numbered[:samples], shards, sampler.shard_id, policy, batch)
        # With PARTIAL a shard that ends a step before the others has an empty batch there.
        assert batches_of(sampler) == [each for each in theirs if each]


def test_where_shards_differ_by_a_batch_dalis_iterator_gives_an_empty_one_and_the_sampler_none(
    numbered: list[str],
) -> None:
    assert by_dali(numbered[:7], 2, 0, PARTIAL, 3) == [[0, 1, 2], []]
    assert [batches_of(sampler) for sampler in dealt_out(7, 2, PARTIAL, 3)] == [[[0, 1, 2]], [[3, 4, 5], [6]]]


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_the_order_depends_on_seed_and_epoch_alone_and_each_iteration_is_the_next_epoch() -> None:
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


def test_it_deals_out_a_dataset_that_grows_shows_its_shard_and_takes_dalis_policies() -> None:
    samples = [0] * 4
    sampler = ShardedSampler(samples, 2, 1)
    assert list(sampler) == [2, 3]
    samples += [0] * 4
    assert len(sampler) == 4 and list(sampler) == [4, 5, 6, 7]
    sampler = ShardedSampler(range(10), 3, 2, shuffle=True, last_batch_policy="fill", batch_size=3)
    assert repr(sampler) == "ShardedSampler(6 of 10 samples, shard 2 of 3, 'fill', shuffled)"
    for policy in LastBatchPolicy:
        assert LastBatchPolicy.of(policy) is LastBatchPolicy.of(DalisPolicy[policy.name]) is policy
        assert LastBatchPolicy.of(policy.value) is policy
    assert {policy.name for policy in LastBatchPolicy} == {policy.name for policy in DalisPolicy}


class Colour(enum.Enum):
    RED = 1


POLICY, SIZE = (
    "last_batch_policy is one of 'fill', 'partial', 'drop', .* got",
    "batch_size must be an integer >= 1",
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((dict(last_batch_policy=policy), POLICY) for policy in ("pad", None, 0, Colour.RED, "full")),
        (dict(last_batch_policy="fill"), "last_batch_policy='fill' makes batches full, and batch_size is None: say"),
        (dict(last_batch_policy="drop"), "last_batch_policy='drop' makes batches full, and batch_size is None: say"),
        *((dict(last_batch_policy=policy, batch_size=0), f"{SIZE}, got 0") for policy in ("fill", "drop")),
        (dict(seed=1.5), "seed must be an integer >= 0, got 1.5"),
    ],
    ids=str,
)
def test_what_a_sampler_does_not_take_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedSampler(range(3), 1, 0, **arguments)


def test_a_sampler_that_was_made_before_its_processes_were_known_says_so(tell: Tell) -> None:
    sampler, by_number = ShardedSampler(range(4)), ShardedSampler(range(4), 1, 0)
    assert list(sampler) == [0, 1, 2, 3]
    tell(2, 1)
    with pytest.raises(ValueError, match="rank 0 of 1 when .* and now this process is rank 1 of 2: make it after"):
        list(sampler)
    assert list(by_number) == [0, 1, 2, 3] and list(ShardedSampler(range(4))) == [2, 3]


# --- what a loader asks for -------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class WithoutLength(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def asked_for(
    num_shards: Any = None, policy: Any = None, dataset: Any = range(10), **arguments: Any
) -> ShardedSampler | None:
    defaults = dict(batch_size=3, shuffle=None, sampler=None, batch_sampler=None, drop_last=False, seed=None)
    return build_sampler(dataset, num_shards, policy, **(defaults | arguments))


def test_a_loader_that_is_not_told_of_shards_has_none_but_those_of_its_samplers() -> None:
    assert asked_for() is None and asked_for(sampler=[1, 2]) is None and asked_for(dataset=Stream()) is None
    sampler = ShardedSampler(range(4), 2, 1)
    assert find_sharded(sampler) is find_sharded(BatchSampler(sampler, 2, False)) is sampler
    assert find_sharded(SequentialSampler(range(3))) is find_sharded(None) is None


@pytest.mark.parametrize(
    ("drop_last", "policy", "expected"),
    [(False, None, PARTIAL), (True, None, DROP), (True, "drop", DROP), (False, "drop", DROP), (False, FILL, FILL)],
)
def test_the_policy_follows_drop_last_unless_it_is_given(drop_last: bool, policy: Any, expected: Any) -> None:
    sampler = asked_for(World(2, 1), policy, drop_last=drop_last, shuffle=True, seed=8)
    assert sampler is not None
    assert (sampler.last_batch_policy, sampler.batch_size, sampler.shuffle, sampler.seed) == (expected, 3, True, 8)


class Marked:
    rank, num_replicas = 0, 2
    sampler = range(10)


SHARDED = dict(num_shards=World(2, 0))
TEN: Any = range(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(policy="fill"), "last_batch_policy='fill' needs num_shards"),
        (SHARDED | dict(policy="fill", drop_last=True), "drop_last=True contradicts last_batch_policy='fill': leave"),
        (SHARDED | dict(policy=PARTIAL, drop_last=True), "drop_last=True contradicts last_batch_policy='partial'"),
        (SHARDED | dict(policy="none"), "last_batch_policy is one of 'fill', 'partial', 'drop'"),
        (SHARDED | dict(policy="fill", batch_size=None), "makes batches full, and batch_size is None"),
        (SHARDED | dict(dataset=Stream()), r"an IterableDataset has none: let its .*World\.current\(\)"),
        (SHARDED | dict(dataset=WithoutLength()), "WithoutLength has no __len__: give it one"),
        (
            SHARDED | dict(sampler=DistributedSampler(TEN, 2, 0)),
            "sampler is sharded already, by DistributedSampler.* applied twice, .* Leave out num_shards, or sampler",
        ),
        (SHARDED | dict(sampler=ShardedSampler(range(10), 2, 0)), "sharded already, by ShardedSampler.* applied twice"),
        (SHARDED | dict(sampler=Marked()), "sharded already, by Marked.* applied twice"),
        (SHARDED | dict(batch_sampler=Marked()), "batch_sampler is sharded already, by Marked"),
        (
            SHARDED | dict(batch_sampler=BatchSampler(DistributedSampler(TEN, 2, 0), 2, False)),
            "batch_sampler is sharded already, by DistributedSampler.* Leave out num_shards, or batch_sampler",
        ),
        (
            SHARDED | dict(sampler=SequentialSampler(range(10))),
            "sampler=SequentialSampler has another: leave sampler out",
        ),
        (SHARDED | dict(batch_sampler=[[1, 2], [3]]), "batch_sampler=list has another: leave batch_sampler out"),
        (dict(num_shards=3), "num_shards=3 is given without a rank, .* rank 0 of 1"),
        (
            dict(sampler=ShardedSampler(range(10), 2, 0, last_batch_policy="fill", batch_size=4)),
            r"the sampler makes batches of 4 full \(last_batch_policy='fill'\), and the loader has batch_size=3",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_with_the_next_step(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked_for(**arguments)


def test_shards_that_contradict_the_processes_there_are_are_refused(tell: Tell) -> None:
    tell(4, 1)
    with pytest.raises(ValueError, match="=2 contradicts .* rank 1 of 4: use num_shards='auto'.*ShardedSampler"):
        asked_for(World(2, 1))
    with pytest.raises(ValueError, match="num_shards=1 is given without a rank"):
        asked_for(1)
    found = [asked_for("auto"), asked_for(4), asked_for(World(4, 1))]
    assert [(each.num_shards, each.shard_id) for each in found if each is not None] == [(4, 1)] * 3


def test_an_epoch_that_was_begun_goes_on_in_the_same_order_alone() -> None:
    def dealt(shards: int = 2, **arguments: Any) -> dict[str, Any]:
        return ShardedSampler(range(9), shards, 0, **arguments).shard_spec

    same = [
        (None, None),
        (dealt(), dealt()),
        (dealt(batch_size=3), dealt(batch_size=4)),
        (dealt(seed=1), dealt(seed=2)),
        (dealt(2), dealt(3)),
        (dealt(), dealt(last_batch_policy="fill", batch_size=3)),
    ]
    for was, now in same:
        check_dealt(was, now)
    for was, now in [
        (dealt(shuffle=True), dealt()),
        (dealt(shuffle=True), dealt(shuffle=True, seed=1)),
        (dealt(), None),
        (None, dealt()),
    ]:
        with pytest.raises(ValueError, match="saved in mid-epoch .* it has another order, .*loader.set_epoch"):
            check_dealt(was, now)
