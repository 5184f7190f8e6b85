"""The loss: by hand, against a brute-force computation, and independent of padding and of neighbours."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from marscli.core.layout import NO_TARGET, ar_example, collate, pack, two_stream_example
from marscli.core.model import forward_logits
from marscli.training import objective
from marscli.training.objective import Labels, head_is_last, label_counts, loss_terms, step_loss, term_weights
from tiny_chat import make_model

MASK = 3
EXAMPLES = (
    ([10, 11, 12, 20, 21, 22, 23, 24, 2], [(3, 9)]),
    ([10, 11, 20, 2, 12, 13, 14, 21, 22, 23, 2], [(2, 4), (7, 11)]),
    ([10, 2], [(1, 2)]),
)


def laid_out(ids, turns, block_size=4, **options):
    return two_stream_example(ids, turns, block_size=block_size, mask_token_id=MASK, **options)


def batch_of(*examples, pad=2):
    return collate([laid_out(ids, turns) for ids, turns in examples], pad)


def terms_of(model, *batches, ar_weight=1.0, most_offsets=4, **options):
    weights = term_weights(label_counts(batches, most_offsets), ar_weight)
    return [step_loss(model, batch, weights, most_offsets=most_offsets, **options) for batch in batches]


def gradients_of(model, terms):
    model.zero_grad()
    sum(term.loss for term in terms).backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_same(terms, gradients, other_terms, other_gradients):
    total, other = sum(t.loss.item() for t in terms), sum(t.loss.item() for t in other_terms)
    assert total == pytest.approx(other, abs=1e-5)
    torch.testing.assert_close(sum(t.sums for t in terms), sum(t.sums for t in other_terms), atol=1e-4, rtol=0)
    assert torch.equal(sum(t.correct for t in terms), sum(t.correct for t in other_terms))
    for a, b in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def log_odds(*probabilities):
    return torch.tensor([[math.log(p), math.log(1 - p)] for p in probabilities])


def test_docstring_examples():
    assert doctest.testmod(objective).failed == 0


def test_by_hand():
    """Three clean labels and two masked ones, each with a probability that can be told."""
    labels = Labels(torch.arange(3), torch.arange(3), torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 2]))
    weights = term_weights(torch.tensor([3, 1, 1]), ar_weight=0.5)
    terms = loss_terms(log_odds(0.5, 0.25, 0.8), log_odds(0.9, 0.1, 0.6), labels, weights, most_offsets=2)
    clean = -(math.log(0.5) + math.log(0.25) + math.log(0.8))
    masked = -(math.log(0.1) + math.log(0.6))
    assert terms.loss.item() == pytest.approx(masked / 2 + 0.5 * clean / 3, abs=1e-6)
    assert terms.sums.tolist() == pytest.approx([masked, clean], abs=1e-6)
    assert terms.correct.tolist() == [2, 0, 1]  # the first of two equal logits counts as the top one


def test_distillation_by_hand():
    """A mask's target is the clean stream's distribution, which gets no gradient from it."""
    labels = Labels(*torch.tensor([[0], [1], [0], [1]]))
    clean, mask = log_odds(0.7).requires_grad_(), log_odds(0.6).requires_grad_()
    terms = loss_terms(clean, mask, labels, torch.tensor([1.0, 0.0]), most_offsets=1, distill=True)
    assert terms.loss.item() == pytest.approx(-(0.7 * math.log(0.6) + 0.3 * math.log(0.4)), abs=1e-6)
    terms.loss.backward()
    assert clean.grad.abs().sum() == 0
    torch.testing.assert_close(mask.grad, torch.tensor([[0.6 - 0.7, 0.4 - 0.3]]))


def test_no_labels_of_a_kind_make_its_term_zero():
    labels = Labels(*torch.tensor([[0], [0], [0], [0]]))
    weights = term_weights(torch.tensor([1, 0, 0]))
    terms = loss_terms(torch.zeros(1, 2), torch.zeros(1, 2), labels, weights, most_offsets=2)
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
    (terms,) = terms_of(model, collate([ar_example(ids, turns)], 2), most_offsets=0)
    labels = torch.tensor([[NO_TARGET] * turns[0][0] + ids[turns[0][0] :]])
    reference = model(torch.tensor([ids]), labels=labels).loss
    assert terms.loss.item() == pytest.approx(reference.item(), abs=1e-6)
    gradients = gradients_of(model, [terms])
    model.zero_grad()
    reference.backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_padded_equals_unpadded(architecture):
    """One batch of three unequal rows gives the terms and gradients of the rows alone."""
    model = make_model(architecture)
    together = terms_of(model, batch_of(*EXAMPLES))
    alone = terms_of(model, *(batch_of(example) for example in EXAMPLES))
    assert_same(together, gradients_of(model, together), alone, gradients_of(model, alone))


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_packed_equals_unpadded(architecture):
    """One row of three examples gives the terms and gradients of the examples alone."""
    model = make_model(architecture)
    packed = collate([pack([laid_out(*example) for example in EXAMPLES])], 2)
    together = terms_of(model, packed)
    alone = terms_of(model, *(batch_of(example) for example in EXAMPLES))
    assert_same(together, gradients_of(model, together), alone, gradients_of(model, alone))


@pytest.mark.parametrize("stream", ["clean", "masks"])
def test_packed_examples_do_not_see_each_other(stream):
    """Other tokens in the first example leave every logit of the second as it was, in both streams."""
    model = make_model().eval()

    def logits_of_the_second(first):
        batch = collate([pack([laid_out(*first), laid_out(*EXAMPLES[1])])], 2)
        with torch.no_grad():
            logits = forward_logits(
                model,
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                mask=batch.visibility.dense(),
                keep=torch.ones_like(batch.input_ids, dtype=torch.bool),
            )
        mine = logits[len(laid_out(*first)) :]
        length = len(EXAMPLES[1][0])
        return mine[:length] if stream == "clean" else mine[length:]

    ids, turns = EXAMPLES[0]
    assert torch.equal(logits_of_the_second((ids, turns)), logits_of_the_second(([t + 7 for t in ids], turns)))


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize("elements", [1, 272 * 2 * 3, 2**30])
def test_chunks_do_not_change_the_loss(monkeypatch, elements, distill):
    """However many labels a chunk has, loss and gradients are those of all logits at once."""
    model = make_model()
    batch = batch_of(*EXAMPLES)
    whole = terms_of(model, batch, distill=distill, head_is_last=False)
    expected = gradients_of(model, whole)
    monkeypatch.setattr(objective, "CHUNK_ELEMENTS", elements)
    chunked = terms_of(model, batch, distill=distill)
    assert_same(chunked, gradients_of(model, chunked), whole, expected)


def test_the_logits_of_all_labels_never_exist(monkeypatch):
    """The head is called with a few labels at a time."""
    model = make_model()
    monkeypatch.setattr(objective, "CHUNK_ELEMENTS", 272 * 2 * 3)
    seen = []
    original = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if weight is model.lm_head.weight:
            seen.append(x.shape[:-1].numel())
        return original(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    terms_of(model, batch_of(*EXAMPLES))[0].loss.backward()
    assert max(seen) == 6
    assert sum(seen) == 2 * 13  # the clean labels, and a mask beside each


def test_a_model_that_caps_its_logits_is_not_chunked():
    """What comes behind the head would be applied to the loss instead."""
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    granite = GraniteForCausalLM(GraniteConfig(vocab_size=272, num_key_value_heads=2, logits_scaling=4.0, **settings))
    assert not head_is_last(granite)
    assert head_is_last(make_model())
    ids, turns = EXAMPLES[0]
    (terms,) = terms_of(granite, collate([ar_example(ids, turns)], 2), most_offsets=0, head_is_last=False)
    labels = torch.tensor([[NO_TARGET] * turns[0][0] + ids[turns[0][0] :]])
    assert terms.loss.item() == pytest.approx(granite(torch.tensor([ids]), labels=labels).loss.item(), abs=1e-6)


def test_gradients_with_activation_checkpointing_are_the_same():
    model = make_model().train()
    expected = gradients_of(model, terms_of(model, batch_of(*EXAMPLES)))
    model.gradient_checkpointing_enable()
    for a, b in zip(gradients_of(model, terms_of(model, batch_of(*EXAMPLES))), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_flex_attention_gives_the_same_loss():
    """On a CPU flex attention has no backward pass, but its block masks can be held against the dense ones."""
    model = make_model(hidden_size=64).eval()  # heads of at least 16, which flex attention wants
    batch = collate([pack([laid_out(*example) for example in EXAMPLES])], 2, multiple_of=128)
    with torch.no_grad():
        (dense,) = terms_of(model, batch)
        model.config._attn_implementation = "flex_attention"
        (flex,) = terms_of(model, batch)
    torch.testing.assert_close(flex.sums, dense.sums, atol=1e-4, rtol=0)


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
