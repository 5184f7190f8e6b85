"""Sampling: the distribution is right, and a draw depends on seed, position and token alone."""

from dataclasses import replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from marscli.core.sampling import SamplingSettings, choose_tokens, gumbel_noise, top_tokens, warp


def draw(logits, positions, settings):
    return choose_tokens(logits, positions, settings, top_tokens(logits))


def settings_for(rows, *, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    return SamplingSettings(
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p),
        top_k=torch.full((rows,), top_k),
        seed=torch.full((rows,), seed) if isinstance(seed, int) else seed,
    )


def test_drawn_tokens_follow_the_distribution():
    """Chi-square against the probabilities, and no worse than torch.multinomial's own draws."""
    draws, vocab = 40_000, 16
    torch.manual_seed(0)
    logits = torch.randn(vocab) * 1.5
    expected = logits.softmax(-1) * draws
    positions = torch.arange(draws)[None]
    mine = draw(logits.expand(1, draws, vocab), positions, settings_for(1, seed=7))[0].bincount(minlength=vocab)
    theirs = torch.multinomial(logits.softmax(-1), draws, replacement=True).bincount(minlength=vocab)
    critical = 37.7  # 15 degrees of freedom, p = 0.001
    for counts in (mine, theirs):
        assert ((counts - expected) ** 2 / expected).sum() < critical


def test_seeds_and_positions_draw_independently():
    """The same chi-square over the joint of two neighbours, in position and in seed."""
    vocab, draws = 4, 20_000
    uniform = torch.zeros(1, draws, vocab)
    by_position = draw(uniform, torch.arange(draws)[None], settings_for(1, seed=3))[0]
    by_seed = draw(
        torch.zeros(draws, 1, vocab), torch.full((draws, 1), 5), settings_for(draws, seed=torch.arange(draws))
    )[:, 0]
    for drawn in (by_position, by_seed):
        pairs = (drawn[:-1] * vocab + drawn[1:]).bincount(minlength=vocab**2)
        expected = (draws - 1) / vocab**2
        assert ((pairs - expected) ** 2 / expected).sum() < 37.7


def test_noise_is_finite_and_standard_gumbel():
    noise = gumbel_noise(torch.tensor([[1], [2**62]]), torch.arange(500).expand(2, 500), 300)
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, abs=0.02)


def test_a_draw_does_not_depend_on_the_batch():
    logits = torch.randn(3, 5, 40)
    positions = torch.tensor([[4, 5, 6, 7, 8], [90, 91, 92, 93, 94], [0, 1, 2, 3, 4]])
    seeds = torch.tensor([11, 12, 13])
    together = draw(logits, positions, settings_for(3, seed=seeds))
    for row in range(3):
        alone = draw(logits[row : row + 1], positions[row : row + 1], settings_for(1, seed=int(seeds[row])))
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_warping_equals_transformers(temperature, top_k, top_p):
    torch.manual_seed(1)
    logits = torch.randn(4, 30) * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = warp(logits[:, None], settings_for(4, temperature=temperature, top_k=top_k, top_p=top_p))[:, 0]
    torch.testing.assert_close(got.softmax(-1), expected.softmax(-1))


def test_without_cuts_nothing_is_sorted_and_nothing_changes():
    logits = torch.randn(3, 4, 30)
    without = replace(settings_for(3, temperature=0.7), cuts=False)
    torch.testing.assert_close(warp(logits, without), warp(logits, settings_for(3, temperature=0.7)))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature):
    logits = torch.randn(2, 6, 20) * 30
    positions = torch.arange(6).expand(2, 6)
    drawn = draw(logits, positions, settings_for(2, temperature=temperature))
    assert torch.equal(drawn, logits.argmax(-1))


def test_greedy_rows_beside_sampled_ones_stay_greedy():
    logits = torch.randn(2, 50, 20)
    mixed = SamplingSettings(
        torch.tensor([0.0, 5.0]), torch.ones(2), torch.zeros(2, dtype=torch.long), torch.zeros(2).long()
    )
    drawn = draw(logits, torch.arange(50).expand(2, 50), mixed)
    assert torch.equal(drawn[0], logits[0].argmax(-1))
    assert not torch.equal(drawn[1], logits[1].argmax(-1))
