"""The training layout by hand, and that it is the decode step's layout: one test catches shift, position and mask."""

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marscli.core import acceptance, layout, masking, params
from marscli.core.layout import NO_TARGET, ar_example, collate, decode_layout, two_stream_example
from marscli.core.model import forward_logits

from .tiny_models import ARCHITECTURES, MASK, on_device, random_ids, tiny_model


@pytest.mark.parametrize("module", [acceptance, layout, masking, params])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0


def test_targets_of_two_turns():
    ids = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    example = two_stream_example(ids, [(2, 5), (7, 9)], block_size=2, mask_token_id=MASK)
    none = NO_TARGET
    assert example.input_ids.tolist() == ids + [MASK] * 5
    assert example.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 7, 8]
    assert example.targets.tolist() == [none, 12, 13, 14, none, none, 17, 18, none, 13, 14, none, 18, none]
    assert example.offsets.tolist() == [0] * 9 + [1, 2, 1, 1, 2]
    counts = (example.targets != NO_TARGET)[:9].sum(), (example.targets != NO_TARGET)[9:].sum()
    assert counts == (5, 3)  # R clean labels, R − 1 masked ones a response


def test_labels_go_by_position_not_by_id():
    """The end-of-sequence token is trained even where it is the padding token too."""
    eos = 7
    example = ar_example([1, eos, 3, eos], [(2, 4)])
    assert example.targets.tolist() == [NO_TARGET, 3, eos, NO_TARGET]
    batch = collate([example, ar_example([1, 2], [(1, 2)])], pad_token_id=eos)
    assert batch.targets[1].tolist() == [2, NO_TARGET, NO_TARGET, NO_TARGET]


def test_a_response_at_the_very_start_has_no_label_for_its_first_token():
    assert ar_example([5, 6, 7], [(0, 3)]).targets.tolist() == [6, 7, NO_TARGET]


@given(
    st.sampled_from(ARCHITECTURES),
    st.integers(1, 12),
    st.integers(1, 14),
    st.integers(1, 5),
    st.integers(0, 10_000),
)
def test_training_logits_equal_the_decode_steps(architecture, prompt, response, block_size, seed):
    """For every block, a decode step from the same prefix has the logits that the masked stream was trained on."""
    model = tiny_model(architecture, clear=False)
    ids = random_ids(prompt + response, seed)
    example = two_stream_example(ids, [(prompt, prompt + response)], block_size=block_size, mask_token_id=MASK)
    batch = collate([example], pad_token_id=0)
    with torch.no_grad():
        trained = forward_logits(
            model,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            mask=batch.visibility.dense(),
            keep=torch.ones_like(batch.input_ids, dtype=torch.bool),
        )
        for start in range(prompt, prompt + response, block_size):
            masks = min(block_size, prompt + response - start)
            cached, newest, drafts = (np.array([number]) for number in (0, start, 0))
            step = decode_layout(cached, newest, drafts, np.array([[masks]]))
            position_ids, visibility, read = on_device(step)
            decoded = forward_logits(
                model,
                input_ids=torch.tensor([ids[:start] + [MASK] * masks]),
                position_ids=position_ids,
                mask=visibility.dense(),
                keep=read,
            )[0]
            first_mask = prompt + response + (start - prompt)
            torch.testing.assert_close(decoded[0], trained[start - 1], atol=1e-5, rtol=0)
            torch.testing.assert_close(decoded[1:], trained[first_mask : first_mask + masks], atol=1e-5, rtol=0)
