"""The benchmarks themselves, from a folder of data sets: MARS_TEST_DATA=DIR, what ``--data-root`` takes.

In exact mode, verified and not, every answer and likelihood is that of lm-eval's own Hugging Face model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from tiny_lm import make_model, make_tokenizer, save_checkpoint

from marscli.evaluation.config import EvalConfig
from marscli.evaluation.runner import run_eval
from marscli.evaluation.tasks import load_tasks

pytestmark = pytest.mark.skipif(not os.environ.get("MARS_TEST_DATA"), reason="set MARS_TEST_DATA=DIR, a --data-root")

GENERATED = (
    "gsm8k", "gsm8k_cot", "ifeval", "bbh_cot_fewshot_word_sorting", "mmlu_pro_biology", "humaneval",
)  # fmt: skip
LIKELIHOODS = ("mmlu_anatomy", "mmlu_philosophy", "mmlu_econometrics")
SETTINGS = {"max_gen_toks": 64}


@pytest.fixture(scope="module")
def data_root() -> Path:
    return Path(os.environ["MARS_TEST_DATA"])


@pytest.fixture(scope="module")
def tokenizer(data_root):
    files = [data_root / "openai/gsm8k/main/test.jsonl", data_root / "google/IFEval/train.jsonl"]
    return make_tokenizer(text="\n".join(path.read_text()[:60_000] for path in files), vocabulary=1500)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(len(tokenizer), eos=[tokenizer.eos_token_id], favoured=slice(300, 306))


@pytest.fixture(scope="module")
def loaded(data_root):
    return load_tasks([*GENERATED, *LIKELIHOODS], data_root=data_root, confirm_run_unsafe_code=True)


@pytest.fixture(scope="module")
def theirs(model, tokenizer, loaded):
    """What lm-eval's own model says, the mask suppressed."""
    model.generation_config.suppress_tokens = [tokenizer.mask_token_id]
    result = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), tasks=list(loaded.tasks.values()),
        gen_kwargs=SETTINGS, limit=2, apply_chat_template=True, confirm_run_unsafe_code=True,
    )  # fmt: skip
    model.generation_config.suppress_tokens = None
    return json.loads(json.dumps(result, default=str))


@pytest.mark.parametrize("verify", [False, True])
def test_answers_likelihoods_and_scores_are_those_of_lm_evals_own_model(
    verify, model, tokenizer, data_root, theirs, tmp_path
):
    folder = save_checkpoint(tmp_path / "tiny", model, tokenizer)
    tasks = [*GENERATED, *(() if verify else LIKELIHOODS)]  # likelihoods know nothing of drafts
    config = EvalConfig(
        model=str(folder), tasks=tasks, output_dir=tmp_path / "out", data_root=data_root, limit=2, verify=verify,
        max_new_tokens=SETTINGS["max_gen_toks"], confirm_run_unsafe_code=True, log_samples=True, batch_size=2,
    )  # fmt: skip
    document = run_eval(config)
    for task in tasks:
        assert document["results"][task] == theirs["results"][task], task
        lines = (tmp_path / "out" / f"samples_{task}_exact.jsonl").read_text().splitlines()
        said = [json.loads(line)["resps"] for line in lines]
        expected = [sample["resps"] for sample in theirs["samples"][task]]
        if task in GENERATED:
            assert said == expected, task
        else:
            ours, expected = (
                [float(choice[0][0]) for sample in told for choice in sample] for told in (said, expected)
            )
            assert ours == pytest.approx(expected, abs=1e-4), task
    costs = document["mars"]["runs"][0]["tasks"].values()
    tokens, forwards = (sum(cost[key] for cost in costs) for key in ("tokens", "forwards"))
    assert tokens > forwards if verify else tokens == forwards
