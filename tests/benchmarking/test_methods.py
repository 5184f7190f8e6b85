"""Counts by hand on a scripted model; transformers' generate against our one-token mode."""

from types import SimpleNamespace

import pytest
import torch
from scripted import END, MASK, ScriptedModel, scripted_checkpoint, token_at
from transformers import LlamaConfig, LlamaForCausalLM

from marscli.benchmarking.config import METHODS as NAMES
from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.methods import METHODS, cut_after_end, left_padded
from marscli.benchmarking.results import Setting, table_rows
from marscli.benchmarking.runner import measure, plan

UNSURE = {5: 0.5, 9: 0.2, 11: 0.1}
PROMPTS = [[4, 5, 6], [4, 5, 6, 7, 8]]


def run(checkpoint, setting, prompts=PROMPTS, batch_size=2, max_new_tokens=8):
    return METHODS[setting.method].open(checkpoint, setting, batch_size)(prompts, max_new_tokens)


def test_names_and_registry_are_the_same():
    assert tuple(METHODS) == NAMES


@pytest.mark.parametrize("batch_size", [1, 2])
def test_threshold_counts_what_the_script_allows(batch_size):
    checkpoint = scripted_checkpoint(ScriptedModel(UNSURE))
    done = run(checkpoint, Setting("threshold", 0.9, block_size=4, draft_tokens=3), batch_size=batch_size)
    # Row 0 writes positions 3…10: 3 4 | 5 6 7 8 | 9 10. Row 1 writes 5…12: 5 6 7 8 | 9 10 | 11 12.
    assert done.outputs == [[token_at(p) for p in range(3, 11)], [token_at(p) for p in range(5, 13)]]
    assert done.forwards == [3, 3]
    assert done.prefill_tokens == 2 + 4
    assert checkpoint.model.calls == (6 if batch_size == 1 else 3)


def test_end_of_sequence_inside_a_step_ends_the_count():
    done = run(scripted_checkpoint(ScriptedModel(UNSURE, end_at=7)), Setting("threshold", 0.9, block_size=4))
    assert done.outputs == [[token_at(p) for p in range(3, 7)] + [END], [token_at(5), token_at(6), END]]
    assert done.forwards == [2, 1]


@pytest.mark.parametrize("setting", [Setting("ar"), Setting("threshold", None, block_size=4)])
def test_one_token_a_forward(setting):
    done = run(scripted_checkpoint(ScriptedModel(UNSURE)), setting)
    assert done.outputs == [[token_at(p) for p in range(3, 11)], [token_at(p) for p in range(5, 13)]]
    assert done.forwards == [8, 8]
    assert done.prefill_tokens == 2


def test_a_row_sums_tokens_over_forwards_of_each_row_not_of_the_batch():
    checkpoint = scripted_checkpoint(ScriptedModel(UNSURE))
    config = BenchConfig("scripted", methods=("ar", "threshold"), thresholds=(0.9,), batch_sizes=(2,))
    cells = plan(config, checkpoint)
    measure(cells, checkpoint, PROMPTS, 8, repeats=2)
    ar, threshold = table_rows(cells)
    assert (ar["tokens"], ar["forwards"], ar["tokens_per_forward"]) == (16, 16, 1.0)
    assert (threshold["tokens"], threshold["forwards"]) == (16, 6)
    assert threshold["tokens_per_forward"] == pytest.approx(16 / 6)
    assert threshold["agrees_with_ar"] == 1.0
    assert threshold["first_difference"] is None
    assert (threshold["block_size"], threshold["draft_tokens"], threshold["threshold"]) == (4, 3, 0.9)
    assert threshold["repeats"] == 2


def test_threshold_on_a_model_without_masks_is_a_row_with_the_reason():
    checkpoint = scripted_checkpoint(ScriptedModel({}), trained=False)
    config = BenchConfig("scripted", methods=("ar", "threshold"), thresholds=("exact", 0.9), batch_sizes=(1,))
    cells = plan(config, checkpoint)
    measure(cells, checkpoint, PROMPTS, 4, repeats=1)
    ar, exact, below = table_rows(cells)
    assert ar["skipped"] is None
    assert exact["skipped"] is None
    assert exact["tokens"] == 8
    assert "never MARS-trained" in below["skipped"]
    assert below["tokens"] is None


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
