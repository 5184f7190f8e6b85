"""The row cache: views instead of copies, growth, moved rows, and its bytes."""

import torch

from marscli.core.caching import SMALLEST_BUFFER, RowCache

HEADS, DIM = 2, 4


def states(rows, entries, fill):
    return torch.full((rows, HEADS, entries, DIM), float(fill))


def test_entries_go_to_their_slots_and_are_read_as_views():
    cache = RowCache(num_layers=1, places=3)
    cache.begin_step(slice(0, 2), torch.tensor([[0, 1], [5, 6]]), num_slots=7)
    keys, values = cache.update(states(2, 2, 1), states(2, 2, 2), 0)
    assert keys.shape == values.shape == (2, HEADS, 7, DIM)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1]]
    assert values[:, 1, :, 3].tolist() == [[2, 2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2, 2]]
    layer = cache.row_layers[0]
    assert keys.data_ptr() == layer.keys.data_ptr()
    cache.begin_step(slice(1, 3), torch.tensor([[0], [2]]), num_slots=4)
    keys, _ = cache.update(states(2, 1, 3), states(2, 1, 3), 0)
    assert keys[:, 0, :, 0].tolist() == [[3, 0, 0, 0], [0, 0, 3, 0]]
    assert layer.keys[0, :, 0, 0].tolist()[:3] == [1, 1, 0]  # a row that takes no part is left alone


def test_buffers_grow_by_doubling_and_keep_what_they_hold():
    cache = RowCache(num_layers=2, places=1)
    cache.begin_step(slice(0, 1), torch.tensor([[0]]), num_slots=1)
    for layer in range(2):
        cache.update(states(1, 1, 7), states(1, 1, 8), layer)
    before = cache.nbytes
    assert before == 2 * 2 * SMALLEST_BUFFER * HEADS * DIM * 4
    cache.begin_step(slice(2, 3), torch.tensor([[SMALLEST_BUFFER]]), num_slots=SMALLEST_BUFFER + 1)
    assert (cache.places, cache.capacity) == (4, 2 * SMALLEST_BUFFER)
    assert cache.nbytes == before * 8
    cache.update(states(1, 1, 9), states(1, 1, 9), 0)
    kept = cache.row_layers[0].keys
    assert (kept[0, 0, 0, 0], kept[2, SMALLEST_BUFFER, 0, 0], kept.sum()) == (7, 9, (7 + 9) * HEADS * DIM)


def test_a_moved_row_takes_its_tokens_along():
    cache = RowCache(num_layers=1, places=2)
    cache.begin_step(slice(0, 2), torch.tensor([[0, 1], [0, 1]]), num_slots=2)
    both = torch.stack([states(1, 2, 1)[0], states(1, 2, 5)[0]])
    cache.update(both, both, 0)
    cache.move_row(source=1, target=0, length=2)
    assert cache.row_layers[0].keys[0, :2].unique().tolist() == [5]
