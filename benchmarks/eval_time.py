"""Time and texts of a generation task: our lm-eval model against lm-eval's own ``hf`` model, in one process.

    python benchmarks/eval_time.py -m MODEL --data-root DIR                        # 48 problems, batches of 8
    python benchmarks/eval_time.py -m MODEL --data-root DIR --dtype float32 --limit 16 --thresholds exact

All answer the same requests of the same task with the same weights, at the same batch size; with ``--repeats`` they
take turns, every second time backwards. What is timed is ``generate_until``: tokenisation, decoding and stop strings;
the task's own work is not. The mask token is suppressed for ``hf`` too, as our engine does it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM

from marscli.core.params import parse_threshold
from marscli.evaluation.config import EvalConfig
from marscli.evaluation.lm import MarsLM
from marscli.evaluation.loading import load_lm
from marscli.evaluation.tasks import load_tasks
from marscli.output import atomic_write, markdown_table


class Timed:
    """A model's answers to one task, pass by pass: texts, score and the seconds of ``generate_until``."""

    def __init__(self, name: str, lm: Any, task: Any, args: argparse.Namespace, threshold: float | None = None) -> None:
        self.name, self.lm, self.task, self.args, self.threshold = name, lm, task, args, threshold
        self.seconds: list[float] = []
        self.texts: list[str] = []
        self.scores: dict[str, float] = {}
        self.tokens_per_forward: float | None = None

    def run(self) -> None:
        """Make one pass."""
        if isinstance(self.lm, MarsLM):
            self.lm.threshold = self.threshold
        else:
            self.lm.model.generation_config.suppress_tokens = [self.lm.tokenizer.mask_token_id]
        generate, spent = self.lm.generate_until, 0.0

        def timed(*arguments: Any, **options: Any) -> list[str]:
            nonlocal spent
            started = time.perf_counter()
            answers = generate(*arguments, **options)
            spent += time.perf_counter() - started
            return list(answers)

        self.lm.generate_until = timed
        try:
            done = lm_eval.simple_evaluate(
                model=self.lm, tasks=[self.task], limit=self.args.limit, apply_chat_template=True, bootstrap_iters=0
            )
        finally:
            del self.lm.generate_until
            self.lm.model.generation_config.suppress_tokens = None
        self.seconds.append(spent)
        samples = sorted(done["samples"][self.task.task_name], key=lambda sample: sample["doc_id"])
        self.texts = [sample["resps"][0][0] for sample in {s["doc_id"]: s for s in samples}.values()]
        results = done["results"][self.task.task_name]
        self.scores = {k: v for k, v in results.items() if isinstance(v, float) and "stderr" not in k}
        if isinstance(self.lm, MarsLM):
            answers = self.lm.take_usage().answers
            self.tokens_per_forward = sum(len(a.tokens) for a in answers) / sum(a.forwards for a in answers)


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="folder or Hub id of a MARS-tuned checkpoint")
    parser.add_argument("--task", default="gsm8k_cot_zeroshot")
    parser.add_argument("--limit", type=int, default=48, help="problems")
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--thresholds", default="exact,0.95,0.9")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path, help="reads data set org/name from DIR/org/name")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()

    (task,) = load_tasks([args.task], data_root=args.data_root).tasks.values()
    config = EvalConfig(
        model=args.model, tasks=args.task, batch_size=args.batch_size, dtype=args.dtype, device=args.device
    )
    checkpoint, ours = load_lm(config, 1)
    ours.block_size = checkpoint.block_size or 1
    theirs = HFLM(
        pretrained=checkpoint.model,
        tokenizer=checkpoint.tokenizer,
        batch_size=args.batch_size,
        max_length=checkpoint.context_length,
    )
    thresholds = [parse_threshold(value) for value in args.thresholds.split(",")]
    entrants = [Timed("lm-eval hf", theirs, task, args)]
    entrants += [Timed("mars exact" if t is None else f"mars τ={t:g}", ours, task, args, t) for t in thresholds]
    for repeat in range(args.repeats):
        for entrant in reversed(entrants) if repeat % 2 else entrants:
            entrant.run()
    first = entrants[0]
    rows = [
        {
            "model": each.name,
            "seconds": statistics.median(each.seconds),
            "seconds_min": min(each.seconds),
            "seconds_max": max(each.seconds),
            "of_hf_time": statistics.median(each.seconds) / statistics.median(first.seconds),
            "tokens_per_forward": each.tokens_per_forward,
            "same_texts": sum(a == b for a, b in zip(each.texts, first.texts, strict=True)),
            "problems": len(each.texts),
            **each.scores,
        }
        for each in entrants
    ]
    columns = list(rows[0])
    print(f"{checkpoint.name}, {checkpoint.model.dtype}, {args.task}, batches of {args.batch_size}")
    print(markdown_table(columns, [[row[column] for column in columns] for row in rows]))
    if args.json:
        with atomic_write(args.json) as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
