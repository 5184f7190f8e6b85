"""Counts by hand on a scripted model; transformers' generate against our one-token mode."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scripted import END, MASK, METADATA, ScriptedModel, scripted_checkpoint, token_at
from transformers import LlamaConfig, LlamaForCausalLM

from marscli.benchmarking.config import METHODS as NAMES
from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.hf import LOOKUP_TOKENS, cut_after_end, left_padded
from marscli.benchmarking.margins import note_margins
from marscli.benchmarking.methods import METHODS
from marscli.benchmarking.plan import plan
from marscli.benchmarking.results import Cell, Setting, table_rows
from marscli.benchmarking.runner import measure

UNSURE = {5: 0.5, 9: 0.2, 11: 0.1}
PROMPTS = [[4, 5, 6], [4, 5, 6, 7, 8]]
RIGHT = [[token_at(p) for p in range(3, 11)], [token_at(p) for p in range(5, 13)]]


def run(checkpoint, setting, prompts=PROMPTS, batch_size=2, max_new_tokens=8, draft=None):
    return METHODS[setting.method](checkpoint, setting, batch_size, draft)(prompts, max_new_tokens)


def test_names_and_registry_are_the_same():
    assert tuple(METHODS) == NAMES


def wide(method, threshold=0.9, drafts=3, **more):
    return Setting(method, threshold, block_size=4, draft_tokens=drafts, **more)


# Two rows write positions 3…10 and 5…12. Settings: forwards of each row, tokens by offset, entries a row that a step of
# both runs on average (None: the engine's business). Between bars stands what one forward gives.
COUNTS = {
    "ar": (Setting("ar"), [8, 8], [16], 1),
    "threshold exact": (wide("threshold", None, 0), [8, 8], [16], 1),
    # Row 0: 3 4 | 5 6 7 8 | 9 10, row 1: 5 6 7 8 | 9 10 | 11 12; offsets 0 1 | 0 1 2 3 | 0 1, and 0 1 2 3 | 0 1 | 0 1.
    "threshold": (wide("threshold"), [3, 3], [6, 6, 2, 2], (7 + 5) / 2),
    "no-cache": (wide("no-cache", cache="none"), [3, 3], [6, 6, 2, 2], 12),
    # Drafts are always right: 3 | 4 5 6 | 7 8 9 | 10, offsets 0 | 1 2 0 | 1 2 0 | 0.
    "verified exact": (wide("verified", None, 2), [4, 4], [8, 4, 4], None),
    # Row 0: 3 4 | 5 6 7 8 | 9 10, of which 5 was drafted at offset 2 and verified: 0 1 | 2 0 1 2 | 0 1.
    # Row 1: 5 6 7 | 8 | 9 10 11 12, of which 9 and 10 were drafts: 0 1 2 | 0 | 1 2 0 1.
    "verified": (wide("verified", 0.9, 2), [3, 3], [6, 6, 4], None),
    # The last prompt token is guessed to come twice more, and so it does, once: 6 7 | 8 9 | …, each time one guess is
    # right, since what stands behind a wrong guess is the script's token all the same.
    "jacobi": (Setting("jacobi", draft_tokens=2), [4, 4], [8, 8], None),
}


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_that_the_script_allows(name, batch_size):
    setting, forwards, offsets, width = COUNTS[name]
    checkpoint = scripted_checkpoint(ScriptedModel(UNSURE))
    done = run(checkpoint, setting, batch_size=batch_size)
    assert done.outputs == RIGHT
    assert done.forwards == forwards
    assert done.tokens_by_offset == offsets
    assert done.steps == sum(forwards) // batch_size - 2 // batch_size
    if width is not None and batch_size == 2:
        assert done.step_width == width
    assert 0 < done.first_token_seconds <= done.prefill_seconds < done.seconds
    assert checkpoint.model.calls == sum(forwards) // batch_size


def test_rows_of_a_block_cache_move_together():
    """Row 0: 3 | 4 | 5 6 | 7 | 8 | 9 10, row 1: 5 | 6 7 8 | waits | 9 | 10 | 11 12, all four positions every time."""
    checkpoint = scripted_checkpoint(ScriptedModel(UNSURE))
    setting = wide("block-cache", cache="block", cache_block=4)
    done = run(checkpoint, setting)
    assert done.outputs == RIGHT
    assert done.forwards == [6, 5]
    assert done.tokens_by_offset == [11, 4, 1]
    assert (done.steps, done.step_width) == (5, 4)
    assert checkpoint.model.calls == 6
    alone = run(checkpoint, setting, batch_size=1)
    assert alone.outputs == RIGHT
    assert alone.forwards == [6, 5]


def test_end_of_sequence_inside_a_step_ends_the_count():
    done = run(scripted_checkpoint(ScriptedModel(UNSURE, end_at=7)), Setting("threshold", 0.9, block_size=4))
    assert done.outputs == [[token_at(p) for p in range(3, 7)] + [END], [token_at(5), token_at(6), END]]
    assert done.forwards == [2, 1]
    assert done.tokens_by_offset == [3, 3, 2]


def test_a_row_sums_tokens_over_forwards_of_each_row_not_of_the_batch():
    checkpoint = scripted_checkpoint(ScriptedModel(UNSURE))
    config = BenchConfig("scripted", methods="ar,threshold,verified", thresholds=0.9, batch_sizes=2, draft_tokens=2)
    cells = plan(config, METADATA)
    measure(cells, checkpoint, PROMPTS, 8, repeats=2)
    ar, threshold, verified = table_rows(cells, floor_seconds=0.001)
    assert (ar["tokens"], ar["forwards"], ar["tokens_per_forward"]) == (16, 16, 1.0)
    assert (threshold["tokens"], threshold["forwards"]) == (16, 6)
    assert threshold["tokens_per_forward"] == pytest.approx(16 / 6)
    assert threshold["acceptance_by_offset"] == pytest.approx([1, 1, 1 / 3, 1 / 3])
    assert verified["acceptance_by_offset"] == pytest.approx([1, 1, 2 / 3])
    assert threshold["agrees_with_ar"] == 1.0
    assert threshold["first_difference"] is None
    assert (threshold["block_size"], threshold["draft_tokens"], threshold["threshold"]) == (4, 3, 0.9)
    assert verified["draft_tokens"] == 2
    assert threshold["repeats"] == 2
    assert ar["step_width"] == 1
    assert ar["floor_milliseconds"] == 1.0
    assert ar["step_milliseconds"] == pytest.approx(1000 * (ar["seconds"] - ar["prefill_seconds"]) / 7, rel=0.5)


def test_threshold_on_a_model_without_masks_is_a_row_with_the_reason():
    checkpoint = scripted_checkpoint(ScriptedModel({}), trained=False)
    config = BenchConfig("scripted", methods="ar,threshold,verified", thresholds="exact,0.9", batch_sizes=1)
    cells = plan(config, None)
    measure(cells, checkpoint, PROMPTS, 4, repeats=1)
    ar, exact, below, verified, verified_below = table_rows(cells)
    for row in (ar, exact, verified):
        assert row["skipped"] is None
        assert (row["tokens"], row["forwards"]) == (8, 8)
    for row in (below, verified_below):
        assert "never MARS-trained" in row["skipped"]
        assert row["tokens"] is None


def test_cut_and_padding():
    assert cut_after_end([7, 2, 8, 2], [2]) == [7, 2]
    assert cut_after_end([7, 8], [2]) == [7, 8]
    assert cut_after_end([], [2]) == []
    ids, mask = left_padded([[5], [6, 7]], 0, torch.device("cpu"))
    assert ids.tolist() == [[0, 5], [6, 7]]
    assert mask.tolist() == [[0, 1], [1, 1]]


# --- transformers' generate -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # clear argmaxes
    return model


def tiny_checkpoint(model, mask, ends):
    return SimpleNamespace(
        model=model,
        mask_token_id=mask,
        eos_token_ids=ends,
        context_length=128,
        device=torch.device("cpu"),
        block_size=4,
    )


MIXED = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13], [14, 15, 16, 17]]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_hf_equals_ar_with_unequal_prompts_ends_and_a_mask_the_model_would_choose(tiny, batch_size):
    free = run(tiny_checkpoint(tiny, None, ()), Setting("ar"), MIXED, 4, 24).outputs
    counts = torch.bincount(torch.tensor([token for output in free for token in output]), minlength=64)
    mask = int(counts.argmax())
    masked = run(tiny_checkpoint(tiny, mask, ()), Setting("ar"), MIXED, 4, 24).outputs
    ends = (masked[0][9], masked[1][3])
    checkpoint = tiny_checkpoint(tiny, mask, ends)
    ours = run(checkpoint, Setting("ar"), MIXED, batch_size, 24)
    theirs = run(checkpoint, Setting("hf"), MIXED, batch_size, 24)
    assert theirs.outputs == ours.outputs
    assert theirs.forwards == ours.forwards == [len(output) for output in ours.outputs]
    assert len({len(output) for output in ours.outputs}) > 1, "no row ended early"
    assert all(mask not in output for output in ours.outputs)
    assert 0 < theirs.prefill_seconds < theirs.seconds


def test_hf_ignores_penalties_and_attention_of_the_loaded_model_and_puts_them_back(tiny):
    checkpoint = tiny_checkpoint(tiny, MASK, ())
    plain = run(checkpoint, Setting("hf"), MIXED, 2, 12).outputs
    tiny.generation_config.repetition_penalty = 9.0
    tiny.generation_config.max_length = 3
    tiny.set_attn_implementation("eager")
    try:
        assert run(checkpoint, Setting("hf"), MIXED, 2, 12).outputs == plain
        assert tiny.generation_config.repetition_penalty == 9.0
        assert tiny.config._attn_implementation == "eager"
    finally:
        tiny.set_attn_implementation("sdpa")
        tiny.generation_config.repetition_penalty = None
        tiny.generation_config.max_length = None


def test_lookup_and_assisted_decoding_write_what_greedy_decoding_writes(tiny):
    """The small model is a copy of the model, so that its drafts are right whatever the library makes of them."""
    checkpoint = tiny_checkpoint(tiny, MASK, ())
    plain = run(checkpoint, Setting("hf"), MIXED, 1, 24)
    ends = (plain.outputs[0][11],)
    checkpoint = tiny_checkpoint(tiny, MASK, ends)
    plain = run(checkpoint, Setting("ar"), MIXED, 1, 24)
    draft = tiny_checkpoint(copy.deepcopy(tiny), MASK, ends)
    for method in ("hf-lookup", "hf-assisted"):
        done = run(checkpoint, Setting(method), MIXED, 1, 24, draft=draft)
        assert done.outputs == plain.outputs
        assert sum(done.tokens_by_offset) == sum(map(len, done.outputs))
        assert done.tokens_by_offset[0] <= sum(done.forwards) <= sum(plain.forwards)
        assert done.steps == sum(done.forwards) - len(MIXED)
        assert 0 < done.first_token_seconds <= done.prefill_seconds < done.seconds
        if method == "hf-lookup":
            assert done.step_width <= 1 + LOOKUP_TOKENS
    assert sum(done.forwards) < 0.6 * sum(plain.forwards), "a copy's drafts are right"
    assert len(done.tokens_by_offset) > 1
    assert tiny.generation_config.num_assistant_tokens is None


def test_the_margin_at_a_first_difference_is_that_of_the_two_tokens(tiny):
    checkpoint = tiny_checkpoint(tiny, None, ())
    prompts = MIXED[:2]
    right = run(checkpoint, Setting("ar"), prompts, 1, 6)
    outputs = [list(output) for output in right.outputs]
    outputs[1][2] = 5
    settings = [Setting("ar"), Setting("hf"), Setting("verified"), Setting("threshold", 0.9)]
    cells = [Cell(setting, 1, [replace(right, outputs=outputs)]) for setting in settings]
    cells[0].passes, cells[1].passes = [right], [right]
    note_margins(cells, checkpoint, prompts)
    with torch.inference_mode():
        logits = tiny(torch.tensor([prompts[1] + right.outputs[1][:2]])).logits[0, -1].log_softmax(-1)
    expected = float(logits[right.outputs[1][2]] - logits[5])
    assert [cell.largest_margin for cell in cells] == [None, None, pytest.approx(expected, abs=1e-4), None]
    assert expected > 0
