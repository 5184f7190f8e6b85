"""The loss: by hand, against a brute-force computation, and independent of padding and of neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from marscli.core.layout import NO_TARGET, ar_example, collate, two_stream_example
from marscli.training.objective import label_counts, step_logits, two_stream_loss
from tiny_chat import make_model

MASK = 3
EXAMPLES = (
    ([10, 11, 12, 20, 21, 22, 23, 24, 2], [(3, 9)]),
    ([10, 11, 20, 2, 12, 13, 14, 21, 22, 23, 2], [(2, 4), (7, 11)]),
    ([10, 2], [(1, 2)]),
)


def batch_of(*examples, block_size=4, pad=2):
    laid_out = [two_stream_example(ids, turns, block_size=block_size, mask_token_id=MASK) for ids, turns in examples]
    return collate(laid_out, pad)


def terms_of(model, *batches, ar_weight=1.0):
    counts = label_counts(batches, 4)
    return [two_stream_loss(*step_logits(model, batch), counts, ar_weight=ar_weight) for batch in batches]


def test_by_hand():
    """Two clean and three masked labels, each with a probability that can be told."""
    probabilities = [0.5, 0.25, 0.8, 0.1, 0.5]
    logits = torch.tensor([[math.log(p), math.log(1 - p)] for p in probabilities])
    offsets = torch.tensor([0, 0, 1, 2, 1])
    terms = two_stream_loss(logits, torch.zeros(5, dtype=torch.long), offsets, torch.tensor([2, 2, 1]), ar_weight=0.5)
    clean = -(math.log(0.5) + math.log(0.25))
    masked = -(math.log(0.8) + math.log(0.1) + math.log(0.5))
    assert terms.loss.item() == pytest.approx(masked / 3 + 0.5 * clean / 2, abs=1e-6)
    assert terms.sums.tolist() == pytest.approx([masked, clean], abs=1e-6)
    assert terms.correct.tolist() == [1, 2, 0]  # the first of two equal logits counts as the top one


def test_no_labels_of_a_kind_make_its_term_zero():
    terms = two_stream_loss(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([0]), torch.tensor([1, 0, 0]))
    assert terms.loss.item() == pytest.approx(math.log(2))
    assert terms.sums[0] == 0


def test_against_one_prompt_at_a_time():
    """Each label's loss is that of an AR-style forward over exactly what the label's entry may see."""
    model = make_model().eval()
    for ids, turns in EXAMPLES:
        clean = masked = 0.0
        number_masked = 0
        for start, end in turns:
            for target in range(start, end):
                logits = model(torch.tensor([ids[:target]])).logits[0, -1]
                clean -= logits.log_softmax(-1)[ids[target]].item()
            for position in range(start, end - 1):
                block = start + (position - start) // 4 * 4
                seen = ids[:block] + [MASK] * (position - block + 1)
                logits = model(torch.tensor([seen])).logits[0, -1]
                masked -= logits.log_softmax(-1)[ids[position + 1]].item()
                number_masked += 1
        (terms,) = terms_of(model, batch_of((ids, turns)))
        assert terms.sums.tolist() == pytest.approx([masked, clean], abs=1e-4)
        number_clean = sum(end - start for start, end in turns)
        expected = masked / max(number_masked, 1) + clean / number_clean
        assert terms.loss.item() == pytest.approx(expected, abs=1e-5)


def test_ordinary_fine_tuning_is_transformers_own_loss():
    model = make_model().eval()
    ids, turns = EXAMPLES[0]
    batch = collate([ar_example(ids, turns)], 2)
    counts = label_counts([batch], 0)
    terms = two_stream_loss(*step_logits(model, batch), counts)
    labels = torch.tensor([[NO_TARGET] * turns[0][0] + ids[turns[0][0] :]])
    reference = model(torch.tensor([ids]), labels=labels).loss
    assert terms.loss.item() == pytest.approx(reference.item(), abs=1e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_padded_equals_unpadded(architecture):
    """One batch of three unequal rows gives the terms and gradients of the rows alone."""
    model = make_model(architecture)
    together = terms_of(model, batch_of(*EXAMPLES))
    together[0].loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = terms_of(model, *(batch_of(example) for example in EXAMPLES))
    sum(terms.loss for terms in alone).backward()
    assert sum(terms.loss.item() for terms in alone) == pytest.approx(together[0].loss.item(), abs=1e-5)
    torch.testing.assert_close(sum(terms.sums for terms in alone), together[0].sums, atol=1e-4, rtol=0)
    assert torch.equal(sum(terms.correct for terms in alone), together[0].correct)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=0)


def test_padding_that_equals_the_end_of_sequence_token_changes_nothing():
    model = make_model()
    first, second = (terms_of(model, batch_of(*EXAMPLES, pad=pad))[0] for pad in (2, 99))
    assert torch.equal(first.loss, second.loss)
    batch = batch_of(*EXAMPLES, pad=2)
    ends = (batch.targets == 2).sum(1).tolist()
    assert ends == [2, 4, 1]  # each response's end, once a stream; a response of one token has no masked label


def test_label_counts_go_over_all_batches():
    counts = label_counts([batch_of(EXAMPLES[0]), batch_of(EXAMPLES[1])], 4)
    assert counts.tolist() == [12, 4, 2, 2, 1]
