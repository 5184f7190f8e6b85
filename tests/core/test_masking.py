"""Masks against a brute-force definition: the table of who may see whom, written out role by role."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marscli.core.layout import collate, decode_layout, two_stream_example

from .tiny_models import on_device

MASK = 99


def two_stream_roles(length, turns, block_size):
    """(kind, position, block start) of every entry of the training layout."""
    roles = [("clean", position, None) for position in range(length)]
    for start, end in turns:
        for position in range(start, end):
            roles.append(("mask", position, start + (position - start) // block_size * block_size))
    return roles


def may_see(query, key):
    """METHOD's table for training."""
    (kind, position, block), (key_kind, key_position, key_block) = query, key
    if kind == "clean":
        return key_kind == "clean" and key_position <= position
    if key_kind == "clean":
        return key_position < block
    return key_block == block and key_position <= position


@st.composite
def chats(draw):
    turns, position = [], 0
    for _ in range(draw(st.integers(1, 3))):
        start = position + draw(st.integers(0 if position == 0 else 1, 5))
        position = start + draw(st.integers(1, 9))
        turns.append((start, position))
    return position + draw(st.integers(0, 3)), turns


@given(st.lists(chats(), min_size=1, max_size=3), st.integers(1, 6))
def test_two_streams_see_what_the_table_says(batch, block_size):
    examples = [
        two_stream_example(list(range(length)), turns, block_size=block_size, mask_token_id=MASK)
        for length, turns in batch
    ]
    dense = collate(examples, pad_token_id=0).visibility.dense()
    for row, (length, turns) in enumerate(batch):
        roles = two_stream_roles(length, turns, block_size)
        assert examples[row].position_ids.tolist() == [role[1] for role in roles]
        width = dense.shape[-1]
        expected = torch.eye(width, dtype=torch.bool)  # padding sees itself alone
        for q, query in enumerate(roles):
            expected[q] = torch.tensor([k < len(roles) and may_see(query, roles[k]) for k in range(width)])
        assert torch.equal(dense[row, 0], expected)


def step_roles(n, newest, groups):
    """(kind, position, group, index in the group) of every entry of a decode step; the groups follow k drafts."""
    drafts = len(groups) - 1
    roles = [("real", n + i, None, None) for i in range(newest + drafts)]
    for group, masks in enumerate(groups):
        roles += [("mask", n + newest + group + index, group, index) for index in range(masks)]
    return roles


def step_sees(n, newest, roles, entry, slot):
    """METHOD's table for a decode step."""
    kind, _, group, index = roles[entry] if entry < len(roles) else ("padding", 0, None, None)
    if kind == "padding":
        return slot == n + entry
    if kind == "real":
        return slot <= n + entry
    if slot < n + newest + group:
        return True
    key = slot - n
    return key < len(roles) and roles[key][2] == group and roles[key][3] <= index


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2),
)
def test_a_decode_step_sees_what_the_table_says(rows, slack):
    cached, newest = (np.array(column) for column in list(zip(*rows, strict=True))[:2])
    drafts = np.array([len(groups) - 1 for *_, groups in rows])
    padded = np.array([groups + [0] * (drafts.max() + 1 - len(groups)) for *_, groups in rows])
    widths = [len(step_roles(*row)) for row in rows]
    layout = decode_layout(cached, newest, drafts, padded, max(widths) + slack)
    position_ids, visibility, read = on_device(layout)
    num_slots = int(cached.max()) + max(widths) + slack
    dense = visibility.dense(num_slots)
    for row, (n, new, groups) in enumerate(rows):
        roles = step_roles(n, new, groups)
        for entry in range(max(widths) + slack):
            assert layout.slot[row, entry] == n + entry
            assert position_ids[row, entry] == (roles[entry][1] if entry < len(roles) else 0)
            expected = [step_sees(n, new, roles, entry, slot) for slot in range(num_slots)]
            assert dense[row, 0, entry].tolist() == expected
        wanted = len(roles) - new + 1
        assert read[row, :wanted].tolist() == list(range(new - 1, len(roles)))
        assert read[row].max() < max(widths) + slack
        for group, masks in enumerate(groups):
            start = layout.group_read[row, group]
            assert [roles[entry][2:] for entry in read[row, start : start + masks]] == [
                (group, i) for i in range(masks)
            ]


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_flex_block_mask_and_picture_equal_the_dense_mask(block_size):
    examples = [
        two_stream_example(list(range(20)), [(3, 9), (12, 20)], block_size=block_size, mask_token_id=MASK),
        two_stream_example(list(range(11)), [(10, 11)], block_size=block_size, mask_token_id=MASK),
    ]
    visibility = collate(examples, pad_token_id=0).visibility
    dense = visibility.dense()[:, 0]
    from torch.nn.attention.flex_attention import create_mask

    rows, width = dense.shape[:2]
    flex = create_mask(visibility.mask_mod(), rows, 1, width, width, device="cpu")
    assert torch.equal(flex[:, 0], dense)
    blocks = visibility.block_mask().to_dense()  # a block of 128 x 128 is kept if anything in it is seen
    assert blocks.shape[0] == rows
    assert bool(blocks.any())
    for row in range(rows):
        picture = visibility.picture(row).splitlines()
        assert [[c == "█" for c in line] for line in picture] == dense[row].tolist()


def test_no_query_sees_nothing():
    """A fully masked row would be NaN."""
    example = two_stream_example([1, 2, 3], [(0, 3)], block_size=2, mask_token_id=MASK)
    short = two_stream_example([1, 2], [(1, 2)], block_size=2, mask_token_id=MASK)
    assert bool(collate([example, short], pad_token_id=0).visibility.dense().any(-1).all())
