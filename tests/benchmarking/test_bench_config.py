"""Options are checked before anything is loaded; which rows they make."""

from dataclasses import replace
from pathlib import Path

import pytest

from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.plan import passes, plan
from marscli.benchmarking.results import label, table_rows
from marscli.checkpoint import MarsMetadata
from marscli.errors import InputError

TRAINED = MarsMetadata(block_size=4, ar_weight=1.0, base_model="base", mask_token_id=3)


def rows(config, mars=TRAINED):
    """(batch size, label, skipped) of the table."""
    return [(row["batch_size"], label(row), row["skipped"]) for row in table_rows(plan(config, mars))]


def test_defaults_and_forms():
    config = BenchConfig("m")
    assert config.methods == ("hf", "ar", "threshold", "verified")
    assert config.points == (("probability", None), ("probability", 0.95))
    assert config.batch_sizes == (1, 4)
    assert (config.limit, config.repeats, config.max_new_tokens) == (16, 3, 128)
    assert passes(config) == (1 + 1 + 2 + 2) * 2 * (3 + 1)
    typed = BenchConfig(
        "m", "out", methods="threshold,hf", thresholds="1.0,exact,0.90,0.9", batch_sizes=["4", "1", "4"]
    )
    assert typed.methods == ("hf", "threshold")
    assert typed.points == (("probability", None), ("probability", 0.9))
    assert typed.batch_sizes == (1, 4)
    assert typed.output_dir == Path("out")
    assert typed.resolved()["thresholds"] == [1.0, "exact", 0.9]
    assert BenchConfig("m", thresholds=0.9, batch_sizes=2, cache_blocks=8).batch_sizes == (2,)


def test_several_measures_share_the_exact_row():
    config = BenchConfig("m", thresholds="exact,0.9,entropy:0.3", confidence=["probability", "margin", "entropy"])
    assert config.points == (
        ("probability", None),
        ("probability", 0.9),
        ("margin", 0.9),
        ("entropy", 0.9),
        ("entropy", 0.3),
    )
    assert BenchConfig("m", thresholds=("exact", 0, 0.3), confidence="entropy").points == (
        ("entropy", None),
        ("entropy", 0.3),
    )


def test_quick_and_suite_change_defaults_and_only_those():
    quick = BenchConfig("m", quick=True, repeats=5)
    assert (quick.limit, quick.repeats, quick.max_new_tokens) == (4, 5, 48)
    assert quick.methods == BenchConfig("m").methods
    paper = BenchConfig("m", suite="paper", quick=True, dataset="mine.jsonl")
    assert paper.dataset == "mine.jsonl"
    assert paper.limit == 4
    assert len(paper.thresholds) == 7
    assert BenchConfig("m", suite="paper").dataset == "openai/gsm8k:main:test"


def test_the_papers_suite_sweeps_tau_at_one_batch_size_and_caches_at_the_others():
    config = BenchConfig("m", suite="paper", batch_sizes=(1, 8), cache_blocks=(16, 32), thresholds="exact,0.95,0.5")
    assert [row[:2] for row in rows(config)] == [
        (1, "hf"),
        (1, "ar"),
        *((1, f"{method} {tau}") for method in ("threshold", "verified") for tau in ("exact", "τ=0.95", "τ=0.5")),
        (8, "hf"),
        (8, "ar"),
        (8, "threshold τ=0.95"),
        (8, "verified exact"),
        (8, "verified τ=0.95"),
        (8, "block-cache 16 τ=0.95"),
        (8, "block-cache 32 τ=0.95"),
        (8, "no-cache τ=0.95"),
    ]
    assert passes(config) == len(rows(config)) * 4


def test_what_cannot_run_says_why():
    config = BenchConfig("m", methods="hf-lookup,hf-assisted,ar,threshold", thresholds="exact,0.9", batch_sizes="1,2")
    reasons = {(batch, name): reason for batch, name, reason in rows(config, mars=None)}
    assert reasons[1, "hf-lookup"] is None
    assert "one row at a time" in reasons[2, "hf-lookup"]
    assert "--draft" in reasons[1, "hf-assisted"]
    assert reasons[1, "ar"] is reasons[1, "threshold exact"] is None
    assert "never MARS-trained" in reasons[1, "threshold τ=0.9"]
    with_draft = BenchConfig("m", draft="small", batch_sizes="1,2")
    assert "hf-assisted" in with_draft.methods
    reasons = {(batch, name): reason for batch, name, reason in rows(with_draft)}
    assert reasons[1, "hf-assisted"] is None
    assert "one row at a time" in reasons[2, "hf-assisted"]


def test_masks_and_guesses_of_each_method():
    config = BenchConfig("m", methods="threshold,verified,jacobi", thresholds="exact,0.9", batch_sizes=1)
    assert [row["draft_tokens"] for row in table_rows(plan(config, TRAINED))] == [0, 3, None, 3, 3]
    fixed = BenchConfig("m", methods="threshold,verified,jacobi", thresholds="exact,0.9", batch_sizes=1, draft_tokens=2)
    assert [row["draft_tokens"] for row in table_rows(plan(fixed, TRAINED))] == [0, 3, 2, 2, 2]
    untrained = table_rows(plan(replace(fixed, block_size=4), None))
    assert [row["draft_tokens"] for row in untrained] == [0, 0, 0, 0, 2], "no mask token, no masks"
    assert [row["skipped"] is None for row in untrained] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"methods": ("tresholds",)}, "--methods: there is no method 'tresholds'"),
        ({"methods": ()}, "--methods"),
        ({"thresholds": ("1.5",)}, "--thresholds: 1.5"),
        ({"thresholds": ("often",)}, "--thresholds: 'often'"),
        ({"thresholds": (-1,), "confidence": "entropy"}, "--thresholds: -1"),
        ({"thresholds": ("margin:0.5",)}, "--thresholds: margin:0.5"),
        ({"thresholds": ()}, "--thresholds"),
        ({"batch_sizes": ("0",)}, "--batch-sizes: 0"),
        ({"batch_sizes": ("two",)}, "--batch-sizes: 'two'"),
        ({"batch_sizes": ()}, "--batch-sizes"),
        ({"cache_blocks": "0,8"}, "--cache-blocks: 0"),
        ({"draft_tokens": -1}, "--draft-tokens: -1"),
        ({"repeats": 0}, "--repeats: 0"),
        ({"limit": 0}, "--limit: 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens: 0"),
        ({"prompt_tokens": 0}, "--prompt-tokens: 0"),
        ({"block_size": 0}, "--block-size: 0"),
        ({"block_size": 1}, "--block-size: 1"),
        ({"seed": 2**64}, "--seed 1"),
        ({"confidence": "guess"}, "--confidence: there is no confidence 'guess'"),
        ({"suite": "papers"}, "--suite: there is no suite 'papers'"),
        ({"draft": "small", "methods": "hf"}, "--draft: no method"),
        ({"resume": True, "force": True}, "--resume and --force"),
    ],
)
def test_wrong_options_name_their_flag(options, names):
    with pytest.raises(InputError) as error:
        BenchConfig("m", **options)
    assert error.value.message.startswith(names)
    assert error.value.hint


def test_a_typing_slip_gets_the_nearest_name():
    with pytest.raises(InputError) as error:
        BenchConfig("m", methods=("treshold",))
    assert "did you mean threshold?" in error.value.hint


def test_block_size_1_is_fine_without_threshold():
    assert BenchConfig("m", methods=("ar",), block_size=1).block_size == 1


def test_compile_is_for_our_engine_alone():
    config = BenchConfig("m", methods=("hf", "ar", "verified"), compile=True)
    compiled = {cell.setting.method: cell.setting.compile for cell in plan(config, TRAINED)}
    assert compiled == {"hf": False, "ar": True, "verified": True}
    assert not any(cell.setting.compile for cell in plan(replace(config, compile=False), TRAINED))
