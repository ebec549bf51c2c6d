"""Which samples a step sees."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.data.order import epoch_of, order, share, share_range, turn_of

sizes = st.integers(1, 300)
batches = st.integers(1, 40)
seeds = st.integers(0, 2**40)


def stream(seed: int, steps: range, global_batch: int, size: int) -> list[int]:
    return [int(sample) for step in steps for sample in order(seed, step, global_batch, size)]


@given(seeds, batches, sizes)
def test_every_epoch_holds_every_sample_once(seed: int, global_batch: int, size: int) -> None:
    """C077: the end of an epoch, wherever in a batch it falls, repeats nothing and leaves nothing out."""
    seen = stream(seed, range(-(-3 * size // global_batch)), global_batch, size)
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(seeds, st.integers(0, 10_000), batches, sizes)
def test_a_step_can_be_asked_for_alone(seed: int, step: int, global_batch: int, size: int) -> None:
    """C080: however often a run was resumed, step n has the samples of step n."""
    assert stream(seed, range(step, step + 3), global_batch, size)[global_batch:] == stream(
        seed, range(step + 1, step + 3), global_batch, size
    )


@given(seeds, st.integers(1, 100), st.integers(1, 12))
def test_ranks_share_a_batch_without_gap_or_overlap(seed: int, global_batch: int, world_size: int) -> None:
    """C075: the union over ranks is the batch, in order; parts differ by one at most; for any world size."""
    ids = order(seed, 3, global_batch, 500)
    parts = [share(ids, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(parts), ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [list(share_range(global_batch, rank, world_size)) for rank in range(world_size)] == [
        list(share(np.arange(global_batch), rank, world_size)) for rank in range(world_size)
    ]


def test_64_over_6_and_5_ranks() -> None:
    assert [len(share_range(64, rank, 6)) for rank in range(6)] == [11, 11, 11, 11, 10, 10]
    assert [len(share_range(64, rank, 5)) for rank in range(5)] == [13, 13, 13, 13, 12]


def test_epochs_and_seeds_differ() -> None:
    first = [stream(seed, range(epoch, epoch + 1), 1000, 1000) for seed in (0, 1) for epoch in (0, 1)]
    for position, one in enumerate(first):
        for other in first[position + 1 :]:
            # Two random orders of 1000 agree in one place on average.
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_the_shuffle_has_no_slope() -> None:
    """Neighbours in the order are no neighbours in the data: their mean distance is a third of the size."""
    ids = order(7, 0, 3000, 3000)
    assert abs(np.abs(np.diff(ids)).mean() - 1000) < 60


many = st.lists(st.integers(1, 120), min_size=1, max_size=5)


@given(seeds, batches, many, st.integers(1, 60))
def test_buckets_take_turns_and_each_epoch_of_each_is_exact(
    seed: int, global_batch: int, rows: list[int], block_rows: int
) -> None:
    """C077, with buckets: one bucket a batch; a bucket's samples come in whole epochs, whatever the others do; after n
    epochs of the run each bucket has begun as many batches as n of its own epochs hold."""
    starts = np.cumsum([0, *rows])
    seen: list[list[int]] = [[] for _ in rows]
    step = 0
    while epoch_of(step, global_batch, rows)[0] < 3:
        ids = order(seed, step, global_batch, rows, block_rows)
        bucket, turn = turn_of(seed, step, global_batch, rows)
        assert turn == len(seen[bucket]) // global_batch, "the turns of a bucket come in order"
        assert ids.min() >= starts[bucket]
        assert ids.max() < starts[bucket + 1]
        seen[bucket] += ids.tolist()
        step += 1
    for bucket, size in enumerate(rows):
        assert len(seen[bucket]) == -(-3 * size // global_batch) * global_batch
        for epoch in range(3):
            whole = seen[bucket][epoch * size : (epoch + 1) * size]
            assert sorted(whole) == list(range(starts[bucket], starts[bucket + 1]))


@given(seeds, st.integers(0, 500), batches, many, st.integers(1, 60))
def test_a_step_with_buckets_can_be_asked_for_alone(
    seed: int, step: int, global_batch: int, rows: list[int], block_rows: int
) -> None:
    """C080: nothing but the step decides, not what was asked before."""
    first = order(seed, step, global_batch, rows, block_rows)
    for other in (step + 1, 0, step * 2):
        order(seed, other, global_batch, rows, block_rows)
    assert np.array_equal(order(seed, step, global_batch, rows, block_rows), first)


def test_blocks_keep_a_reader_near_its_place() -> None:
    """A batch of 64 needs two or three blocks of 128 out of 79, and every epoch visits them in another order."""
    visited = [[int(block) for block in dict.fromkeys(order(5, step, 64, 10_000, 128) // 128)] for step in range(300)]
    assert max(map(len, visited)) <= 2
    first, second = ([block for step in steps for block in visited[step]] for steps in (range(150), range(160, 300)))
    assert first[:40] != second[:40]
    assert len(set(first)) >= 75


def test_buckets_are_mixed_in_proportion() -> None:
    turns = [turn_of(0, step, 10, [9000, 1000])[0] for step in range(1000)]
    assert sum(turns) == 100
    assert 2 <= sum(turns[:200]) <= 40


def test_the_order_with_buckets_and_blocks_is_the_same_for_ever() -> None:
    found = [order(1, step, 4, [100, 300], 32).tolist() for step in (0, 1, 99)]
    assert found == GOLDEN_BUCKETS


def test_the_order_is_the_same_for_ever() -> None:
    """A run that is resumed after an upgrade must find the same samples."""
    assert stream(0, range(1), 8, 1797) == GOLDEN
    assert order(3, 5, 64, 10**12).max() > 10**11


def test_place_of_a_step() -> None:
    assert epoch_of(28, 64, 1797) == (0, 1792)
    assert epoch_of(29, 64, 1797) == (1, 59)


GOLDEN = [1053, 890, 1260, 1681, 1550, 1633, 1571, 78]
GOLDEN_BUCKETS = [[259, 230, 232, 235], [251, 244, 236, 234], [389, 399, 397, 394]]
