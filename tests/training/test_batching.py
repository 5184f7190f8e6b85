"""Which examples share a forward: order, grouping by length, packing, block grids and the curriculum."""

from __future__ import annotations

import doctest

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from marscli.data.encoding import Encoded
from marscli.training import batching
from marscli.training.batching import Pick, RowSampler, TrainingSet, curriculum, pack_rows


def picked(sampler):
    return [index for pick in sampler for index in pick.examples]


def spreads(lengths, order, batch_size=8):
    batches = [[lengths[i] for i in order[s : s + batch_size]] for s in range(0, len(order), batch_size)]
    return [max(batch) - min(batch) for batch in batches if len(batch) == batch_size]


def test_docstring_examples():
    assert doctest.testmod(batching).failed == 0


def test_order_groups_lengths_and_depends_on_seed_and_epoch_alone():
    lengths = torch.randint(5, 200, (203,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = RowSampler(lengths, 8, seed=1)
    order = picked(sampler)
    assert sorted(order) == list(range(203))
    assert order == picked(RowSampler(lengths, 8, seed=1))
    assert order != picked(RowSampler(lengths, 8, seed=2))
    sampler.set_epoch(1)
    assert picked(sampler) != order
    assert max(spreads(lengths, order)) < 30


def test_lengths_that_differ_little_are_not_grouped():
    """Examples of one length are often of one kind."""
    lengths = torch.randint(80, 120, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    order = picked(RowSampler(lengths, 8, seed=1))
    assert sorted(order) == list(range(160))
    assert sum(spreads(lengths, order)) / 20 > 20


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 80), st.integers(0, 5))
def test_packing_puts_every_example_into_one_row_that_holds_it(lengths, capacity, seed):
    rows = pack_rows(lengths, capacity, seed)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[index] for index in row) <= capacity
    assert rows == pack_rows(lengths, capacity, seed)


def test_packed_rows_are_nearly_full():
    lengths = torch.randint(20, 300, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = RowSampler(lengths, 4, seed=0, capacity=512)
    assert sum(lengths) / (512 * len(sampler)) > 0.97
    first = [pick.examples for pick in sampler]
    sampler.set_epoch(1)
    second = [pick.examples for pick in sampler]
    assert first != second
    assert set(first) == set(second)  # the rows are drawn once, so that every epoch has as many steps


def one_example(length=40):
    return Encoded(np.arange(10, 10 + length), ((5, length),))


def test_a_random_first_block_trains_every_position_at_every_offset():
    data = TrainingSet([one_example()], block_size=4, mask_token_id=3, random_offset=True, seed=7)
    seen = set()
    for epoch in range(40):
        row = data[Pick((0,), epoch)]
        masks = row.input_ids == 3
        offsets = row.offsets[masks].tolist()
        assert offsets[0] == 1  # a response never starts inside a block
        seen.add(tuple(offsets))
        assert torch.equal(row.offsets, data[Pick((0,), epoch)].offsets)
    assert len(seen) == 4
    for place in range(4, 35):
        assert {offsets[place] for offsets in seen} == {1, 2, 3, 4}


def test_without_it_every_response_starts_a_full_block():
    data = TrainingSet([one_example()], block_size=4, mask_token_id=3)
    assert data[0].offsets[40:48].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_the_curriculum_goes_by_optimizer_step():
    lengths = [10] * 24
    sampler = RowSampler(lengths, 4, seed=0, block_sizes=curriculum(4, 12))
    sizes = [pick.block_size for pick in sampler]
    assert sizes == [2] * 8 + [3] * 8 + [4] * 8
    sampler.set_epoch(1)
    assert {pick.block_size for pick in sampler} == {4}
    data = TrainingSet([one_example()], block_size=4, mask_token_id=3)
    assert data[Pick((0,), 0, 2)].offsets.max() == 2
