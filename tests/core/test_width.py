"""What the width policy learns and chooses. That its choices cannot change exact output is test_decoding's."""

import numpy as np
import pytest

from marscli.core.width import DraftRecord, StepCost, WidthPolicy

FAR = 100  # tokens that may still come


def cost_of(base, slope, sizes=(1, 2, 4, 8, 16, 64)):
    cost = StepCost()
    for _ in range(3):
        for entries in sizes:
            cost.observe(entries, base + slope * entries)
    return cost


def choose(policy, confidence, *, rows=1, spare=FAR, floor=1):
    confidence = np.array([confidence] * rows, dtype=float).reshape(rows, -1)
    counts = np.full(rows, confidence.shape[1])
    return policy.choose(confidence, counts, np.full(rows, spare), rows=rows, floor=floor)


def width(widths):
    return int((1 + widths.drafts + widths.groups.sum(1)).max())


def test_a_line_is_found_and_a_disturbed_step_does_not_count():
    cost = cost_of(20.0, 0.5)
    cost.observe(4, 500.0)
    assert cost.seconds(1, np.array([1, 9, 16])) == pytest.approx([20.5, 24.5, 28.0], rel=1e-6)


def test_ar_steps_stand_for_themselves():
    """From one vector to a matrix the time often jumps: the line is not to be bent by it."""
    cost = cost_of(200.0, 6.0, sizes=(2, 4, 8, 16))
    for _ in range(9):
        cost.observe(1, 115.0)
    assert cost.seconds(1, np.array([1, 2, 10])) == pytest.approx([115.0, 212.0, 260.0], rel=1e-6)
    assert cost.entry_seconds(1, 16) == pytest.approx(6.0)
    assert cost.seconds(2, np.array([1, 2])) == pytest.approx([212.0, 224.0], rel=1e-6)


def test_long_prompts_do_not_rule_what_narrow_steps_cost():
    cost = cost_of(20.0, 0.5)
    for _ in range(5):
        cost.observe(4000, 20_000.0)
    assert cost.seconds(1, np.array([1, 16])) == pytest.approx([20.5, 28.0], rel=1e-6)


def test_a_prompt_and_one_step_are_enough_to_begin_with():
    cost = StepCost()
    assert np.all(np.diff(cost.seconds(1, np.arange(1, 9))) > 0)
    cost.observe(101, 1.2)
    cost.observe(1, 0.2)
    assert cost.seconds(1, np.array([1, 51])) == pytest.approx([0.2, 0.7])


def test_the_record_of_drafts_is_learned_by_place_and_confidence():
    record = DraftRecord(2)
    sure, unsure = np.array([[0.95, 0.95]]), np.array([[0.3, 0.3]])
    assert np.all(record.chances(sure) > record.chances(unsure))
    for _ in range(200):
        record.observe(unsure, tried=np.array([2]), right=np.array([1]))  # the first was right, the second was not
        record.observe(sure, tried=np.array([2]), right=np.array([0]))  # of the second nothing is known
    assert record.chances(unsure)[0] == pytest.approx([1, 0], abs=0.03)
    assert record.chances(sure)[0] == pytest.approx([0, DraftRecord(2).chances(sure)[0, 1]], abs=0.03)


def test_free_entries_are_used_and_dear_ones_are_not():
    free, dear = WidthPolicy(3), WidthPolicy(3)
    free.cost, dear.cost = cost_of(20.0, 0.001), cost_of(1.0, 10.0)
    assert width(choose(free, [0.9, 0.9, 0.9])) >= 12
    assert width(choose(dear, [0.3, 0.3, 0.3])) <= 2  # at most a try
    between = WidthPolicy(3)
    between.cost = cost_of(20.0, 1.0)
    assert 1 < width(choose(between, [0.9, 0.6, 0.4])) < 16
    assert width(choose(between, [0.9, 0.6, 0.4], rows=16)) < width(choose(between, [0.9, 0.6, 0.4]))


def test_masks_go_to_the_outcomes_that_are_likely():
    policy = WidthPolicy(3)
    policy.cost = cost_of(20.0, 1.0)
    certain = choose(policy, [1.0, 1.0, 1.0])
    assert certain.drafts.tolist() == [3]
    assert certain.groups[0, 3] == certain.groups[0].max() > certain.groups[0, 0]
    doubtful = choose(policy, [0.15, 0.15, 0.15])
    assert doubtful.groups[0, 0] == doubtful.groups[0].max()


def test_nothing_is_run_past_the_end_of_a_row():
    policy = WidthPolicy(3)
    policy.cost = cost_of(20.0, 0.001)
    for spare in range(4):
        widths = policy.choose(np.ones((1, 0)), np.zeros(1, dtype=int), np.array([spare]), rows=1)
        assert widths.groups.tolist() == [[max(spare - 1, 0)]]


def test_a_width_that_is_there_anyway_is_used():
    policy = WidthPolicy(3)
    policy.cost = cost_of(1.0, 10.0)
    assert width(choose(policy, [0.8, 0.8, 0.8], floor=6)) == 6


def simulate(policy, chances, *, rows, cost, steps=400, confidence=lambda p, rng: p):
    """Tokens per second over those of AR decoding, with drafts that are right by chance."""
    rng = np.random.default_rng(0)
    drafts = [np.zeros(0)] * rows
    seconds = tokens = 0.0
    for step in range(steps):
        chance = chances(step)
        counts = np.array([len(of_row) for of_row in drafts])
        seen = np.zeros((rows, counts.max()))
        for row, of_row in enumerate(drafts):
            seen[row, : len(of_row)] = [confidence(p, rng) for p in of_row]
        widths = policy.choose(seen, counts, np.full(rows, FAR), rows=rows)
        right = np.array(
            [np.logical_and.accumulate(rng.random(k) < p[:k]).sum() for k, p in zip(widths.drafts, drafts, strict=True)]
        )
        entries = rows * width(widths)
        seconds += cost(entries)
        tokens += rows + right.sum()
        policy.cost.observe(entries, cost(entries))
        policy.learn_drafts(seen, widths.drafts, right)
        policy.learn_rate(1 + right.mean(), rows=rows, width=width(widths))
        drafts = [np.full(widths.groups[row, j], chance) for row, j in enumerate(right)]
        made = np.array([len(of_row) for of_row in drafts])
        fresh = np.full((rows, made.max()), chance)
        policy.learn_groups(fresh, made)
    return tokens / seconds * cost(rows) / rows


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_bad_drafts_cost_little(rows):
    assert simulate(WidthPolicy(3), lambda step: 0.05, rows=rows, cost=lambda e: 20 + 0.5 * e) > 0.96


def fixed(masks, chance, *, rows, cost):
    """What a fixed width gives: as many drafts as masks, a group for every outcome."""
    tokens = sum(chance**i for i in range(masks + 1))
    return tokens / cost(rows * (1 + masks + (masks + 1) * masks)) * cost(rows)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.5, 0.85])
def test_good_drafts_pay_more_than_at_any_fixed_width(rows, chance):
    def cost(entries):
        return 20 + 0.5 * entries

    best = max(fixed(masks, chance, rows=rows, cost=cost) for masks in range(4))
    assert simulate(WidthPolicy(3), lambda step: chance, rows=rows, cost=cost) > 0.95 * best


def test_a_row_recovers_when_its_drafts_become_good():
    policy = WidthPolicy(3)
    simulate(policy, lambda step: 0.05, rows=1, cost=lambda e: 20 + 0.5 * e)
    assert simulate(policy, lambda step: 0.9, rows=1, cost=lambda e: 20 + 0.5 * e) > 1.6


@pytest.mark.parametrize("times", [(1.0, 0.2, 0.3), (1.0, 0.5, 0.1), (1.0, 3.0, 3.1)])
def test_times_that_make_no_sense_do_no_harm(times):
    """A busy machine may find wider steps cheaper than narrow ones."""
    policy = WidthPolicy(3)
    for entries, seconds in zip((1, 2, 30), times, strict=True):
        for _ in range(5):
            policy.cost.observe(entries, seconds)
    policy._reach[:] = 0.0  # masks look worthless, so that they are only tried
    for _ in range(200):
        widths = policy.choose(np.zeros((1, 0)), np.zeros(1, dtype=np.int64), np.array([9]), rows=1)
        assert (widths.groups >= 0).all()
        assert (widths.groups <= 3).all()
