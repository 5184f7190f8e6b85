"""What a training run made of a model: is it still as good an AR model, and how well does it see ahead?

    python benchmarks/train_quality.py runs/ar runs/mars runs/distilled -d gsm8k_test.jsonl

For each checkpoint, on held-out problems in GSM8K's form:

* nll: negative log-likelihood of the clean stream, nats per response token (is AR ability left alone?)
* accuracy by offset: how often the top prediction is the data's token, 0 from real tokens, i from the i-th mask
* score: greedy one-token answers that are right, with their standard error
* tokens per forward: exact with verification, then the paper's scheme and the verified one at each τ

Nothing here is timed; `mars bench` does that.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from marscli import checkpoint
from marscli.core.decoding import Completion, Engine, Request, decode
from marscli.core.layout import collate
from marscli.core.params import DecodingParams
from marscli.data.encoding import Encoded, Encoder
from marscli.data.prepare import ExampleReader
from marscli.output import atomic_write
from marscli.training.batching import TrainingSet
from marscli.training.objective import LossTerms, head_is_last, label_counts, step_loss

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_ahead(loaded: checkpoint.Checkpoint, examples: list[Encoded], block_size: int, batch: int) -> dict[str, Any]:
    """Likelihood of the clean stream, and accuracy by offset; a model without a mask token has offset 0 alone."""
    held_out = TrainingSet(
        examples, block_size=block_size if loaded.is_mars else None, mask_token_id=loaded.mask_token_id
    )
    most_offsets = block_size if loaded.is_mars else 0
    total: LossTerms | None = None
    counts = torch.zeros(most_offsets + 1, dtype=torch.long)
    with torch.inference_mode():
        for start in range(0, len(examples), batch):
            rows = collate([held_out[i] for i in range(start, min(start + batch, len(examples)))], 0)
            terms = step_loss(
                loaded.model,
                rows,
                torch.ones(2),
                most_offsets=most_offsets,
                head_is_last=head_is_last(loaded.model),
            )
            total = terms if total is None else total + terms
            counts += label_counts([rows], most_offsets)
    assert total is not None
    return {
        "nll": (total.sums[1] / counts[0]).item(),
        "accuracy": (total.correct / counts.clamp(min=1)).tolist(),
    }


def answers(
    loaded: checkpoint.Checkpoint, prompts: list[list[int]], params: DecodingParams, rows: int
) -> list[Completion]:
    """Decode all prompts."""
    engine = Engine(
        loaded.model,
        mask_token_id=loaded.mask_token_id,
        eos_token_ids=loaded.eos_token_ids,
        context_length=loaded.context_length,
        max_rows=rows,
    )
    return decode(engine, [Request(prompt, params) for prompt in prompts])


def last_number(text: str) -> str | None:
    """The last number of a text, as GSM8K's answers end with it."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else None


def per_forward(completions: list[Completion]) -> float:
    """Σ tokens / Σ forwards."""
    return sum(len(c.tokens) for c in completions) / sum(c.forwards for c in completions)


def main() -> None:
    """Measure every checkpoint and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("-d", "--dataset", required=True)
    parser.add_argument("--held-out", type=int, default=100, help="rows for likelihood and accuracy (default 100)")
    parser.add_argument("--problems", type=int, default=100, help="rows that are answered and scored (default 100)")
    parser.add_argument("--decoded", type=int, default=32, help="rows for tokens per forward (default 32)")
    parser.add_argument("--thresholds", default="0.95,0.9,0.8")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=200)
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="of the weights (default float32; bfloat16 is faster)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    results = []
    for path in args.models:
        loaded = checkpoint.load(path, dtype=args.dtype)
        count = max(args.held_out, args.problems, args.decoded)
        encoder = Encoder(loaded.tokenizer, loaded.eos_token_ids)
        examples = list(ExampleReader([args.dataset], encoder, max_length=2048, limit=count).read_all())
        prompts = [example.ids[: example.turns[0][0]].tolist() for example in examples]
        wanted = [
            last_number(loaded.tokenizer.decode(example.ids[example.turns[0][0] :], skip_special_tokens=True))
            for example in examples
        ]
        result: dict[str, Any] = {"model": Path(path).name}
        result.update(read_ahead(loaded, examples[: args.held_out], args.block_size, args.batch_size))
        exact = DecodingParams(max_new_tokens=args.max_new_tokens, block_size=args.block_size)
        if args.problems:
            completions = answers(loaded, prompts[: args.problems], exact, args.batch_size)
            texts = [loaded.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
            right = [last_number(text) == want for text, want in zip(texts, wanted, strict=False)]
            share = sum(right) / len(right)
            result["score"], result["stderr"] = share, math.sqrt(share * (1 - share) / max(len(right) - 1, 1))
        if loaded.is_mars:
            few = prompts[: args.decoded]
            verified = replace(exact, verify=True, draft_tokens=args.block_size - 1)
            result["tokens_per_forward"] = {
                "exact, verified": per_forward(answers(loaded, few, verified, args.batch_size))
            }
            for text in filter(None, args.thresholds.split(",")):
                for name, params in ((f"τ {text}", exact), (f"τ {text}, verified", verified)):
                    completions = answers(loaded, few, replace(params, threshold=float(text)), args.batch_size)
                    result["tokens_per_forward"][name] = per_forward(completions)
        print(json.dumps(result, ensure_ascii=False), file=sys.stderr, flush=True)
        results.append(result)

    names = list(dict.fromkeys(name for r in results for name in r.get("tokens_per_forward", {})))
    print(f"| model | nll | accuracy by offset 0 … {args.block_size} | score | {' | '.join(names)} |")
    print("| --- " * (4 + len(names)) + "|")
    for r in results:
        cells = [r["model"], f"{r['nll']:.4f}", " ".join(f"{100 * a:.0f}" for a in r["accuracy"])]
        cells.append(f"{100 * r['score']:.1f} ± {100 * r['stderr']:.1f} %" if "score" in r else "–")
        found = r.get("tokens_per_forward", {})
        print("| " + " | ".join([*cells, *(f"{found[n]:.2f}" if n in found else "–" for n in names)]) + " |")
    if args.json:
        with atomic_write(args.json) as file:
            json.dump({"options": {k: str(v) for k, v in vars(args).items()}, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
