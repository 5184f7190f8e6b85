"""Acceptance tables of hand-made confidences."""

import numpy as np
import pytest
import torch

from marscli.core.acceptance import certainty, cut_after_end, leading, oriented, row_certainties


def test_certainty_of_a_known_distribution():
    logits = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    assert certainty(logits, "probability") == pytest.approx(0.5)
    assert certainty(logits, "margin") == pytest.approx(0.25)
    assert oriented(float(certainty(logits, "entropy")), "entropy") == pytest.approx(1.5 * 0.6931472)


def test_certainty_of_a_certain_token_is_finite():
    logits = torch.full((5,), -torch.inf)
    logits[2] = 3.0
    assert [float(certainty(logits, m)) for m in ("probability", "margin", "entropy")] == [1.0, 1.0, 0.0]


def test_rows_with_measures_of_their_own():
    logits = torch.randn(3, 4, 9)
    got = row_certainties(logits, torch.tensor([0, 1, 2]), ("probability", "entropy", "margin"))
    for row, measure in enumerate(("probability", "entropy", "margin")):
        torch.testing.assert_close(got[row], certainty(logits[row], measure))


def test_leading_counts_up_to_the_first_refusal():
    kept = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]], dtype=bool)
    assert leading(kept).tolist() == [0, 1, 3, 2]
    assert leading(np.zeros((2, 0), dtype=bool)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "accepted", "expected", "ended"),
    [
        ([5, 6, 9], 3, 3, True),  # the end token is the last accepted
        ([5, 9, 7], 3, 2, True),  # in the middle
        ([9, 9, 9], 2, 1, True),  # the first of several
        ([5, 9, 7], 1, 1, False),  # predicted, but not accepted
        ([5, 6, 7], 3, 3, False),
    ],
)
def test_a_row_ends_at_its_first_accepted_end_token(tokens, accepted, expected, ended):
    cut, flag = cut_after_end(np.array([tokens]), np.array([accepted]), np.array([9, 8]))
    assert (cut.item(), flag.item()) == (expected, ended)


def test_without_end_tokens_no_row_ends():
    cut, flag = cut_after_end(np.array([[1, 2]]), np.array([2]), np.array([], dtype=np.int64))
    assert (cut.item(), flag.item()) == (2, False)
