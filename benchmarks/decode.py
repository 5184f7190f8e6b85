"""Speed of decoding, end to end, against transformers' own ``generate`` in the same run.

    python benchmarks/decode.py -m MODEL -d gsm8k_test.jsonl                      # 32 problems, 128 tokens
    python benchmarks/decode.py -m MODEL -d gsm8k_test.jsonl --limit 4 -n 48 --dtype float32 --batch-sizes 1,4
    python benchmarks/decode.py -m MODEL -d gsm8k_test.jsonl --breakdown          # where the time of a step goes

A pass goes from prompt ids to completion ids of all problems, prompts included. All methods make one pass, then all
make the next one in reverse order, so that a machine that changes its speed does so for all; the table has medians, and
how far the slowest pass is above the fastest. Each method first decodes one batch that does not count; what the width
policy learned there and in earlier passes it keeps, as in any process that decodes more than once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from marscli import checkpoint as checkpoints
from marscli.benchmarking.memory import synchronize
from marscli.benchmarking.methods import METHODS as BENCH_METHODS
from marscli.benchmarking.prompts import encode_prompts, load_prompts
from marscli.benchmarking.results import Setting
from marscli.checkpoint import Checkpoint
from marscli.core import attention, caching, step
from marscli.core.decoding import Request, decode
from marscli.core.engines import make_engine
from marscli.core.params import DecodingParams

Ids = list[list[int]]
WARM_UP_TOKENS = 24


@dataclass
class Pass:
    """One pass over all problems: completion ids, model calls (Σ over rows), steps of the batch, wall time."""

    outputs: Ids
    forwards: int
    steps: int
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


Decoder = Callable[[Checkpoint, Ids, int, int], Pass]
"""(checkpoint, prompts, batch size, most new tokens) → one pass."""


def generate(checkpoint: Checkpoint, prompts: Ids, batch_size: int, most: int) -> Pass:
    """transformers' ``generate``: greedy, KV cache, sdpa, as ``mars bench`` runs it."""
    one = BENCH_METHODS["hf"](checkpoint, Setting("hf", cache="dynamic"), batch_size, None)(prompts, most)
    batches = [one.outputs[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    return Pass(one.outputs, sum(one.forwards), sum(max(map(len, batch)) for batch in batches), one.seconds)


def engine(cache: str = "row", jacobi: bool = False, compile: bool = False, **settings: Any) -> Decoder:
    """One of our engines; settings as of `DecodingParams`."""

    def run(checkpoint: Checkpoint, prompts: Ids, batch_size: int, most: int) -> Pass:
        params = DecodingParams(max_new_tokens=most, block_size=checkpoint.block_size or 1, **settings)
        steps = 0

        def count(_: object) -> None:
            nonlocal steps
            steps += 1

        synchronize(checkpoint.device)
        started = time.perf_counter()
        decoder = make_engine(
            checkpoint.model,
            cache=cache,  # type: ignore[arg-type]
            jacobi=jacobi,
            compile=compile,
            mask_token_id=checkpoint.mask_token_id,
            eos_token_ids=checkpoint.eos_token_ids,
            context_length=checkpoint.context_length,
            max_rows=batch_size,
        )
        completions = decode(decoder, [Request(prompt, params) for prompt in prompts], count)
        seconds = time.perf_counter() - started  # the last step's tokens are on the host: the device has finished
        return Pass([c.tokens for c in completions], sum(c.forwards for c in completions), steps, seconds)

    return run


METHODS: dict[str, Decoder] = {
    "hf": generate,
    "ar": engine(),
    "verified": engine(verify=True),
    "verified m=1": engine(verify=True, draft_tokens=1),
    "verified m=2": engine(verify=True, draft_tokens=2),
    "verified m=3": engine(verify=True, draft_tokens=3),
    "threshold 0.95": engine(threshold=0.95),
    "threshold 0.8": engine(threshold=0.8),
    "verified 0.95": engine(threshold=0.95, verify=True),
    "block cache 0.95": engine(threshold=0.95, cache="block"),
    "jacobi": engine(jacobi=True),
    "ar compiled": engine(compile=True),
    "verified compiled": engine(verify=True, compile=True),
}
DEFAULT_METHODS = "hf,ar,verified,threshold 0.95,threshold 0.8,verified 0.95,block cache 0.95"


def compare(checkpoint: Checkpoint, prompts: Ids, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all methods at all batch sizes, interleaved."""
    rows = []
    for batch_size in args.batch_sizes:
        passes: dict[str, list[Pass]] = {name: [] for name in args.methods}
        for repeat in range(-1, args.repeats):  # -1 is the warm-up
            for name in args.methods if repeat % 2 else reversed(args.methods):
                few = repeat < 0
                chosen, most = (prompts[:batch_size], min(WARM_UP_TOKENS, args.n)) if few else (prompts, args.n)
                one = METHODS[name](checkpoint, chosen, batch_size, most)
                if not few:
                    passes[name].append(one)
                    print(f"  batch {batch_size}: {name} {one.seconds:.1f} s", file=sys.stderr, flush=True)
        rows += [_row(name, batch_size, passes) for name in args.methods]
    return rows


def _row(name: str, batch_size: int, passes: dict[str, list[Pass]]) -> dict[str, Any]:
    mine = passes[name]
    seconds = [one.seconds for one in mine]
    speeds = {other: statistics.median(one.tokens / one.seconds for one in runs) for other, runs in passes.items()}
    exact = passes.get("ar", mine)[0].outputs
    return {
        "batch_size": batch_size,
        "method": name,
        "tokens_per_second": speeds[name],
        "over_hf": speeds[name] / speeds["hf"] if "hf" in speeds else None,
        "over_ar": speeds[name] / speeds["ar"] if "ar" in speeds else None,
        "spread": max(seconds) / min(seconds) - 1,
        "tokens_per_forward": mine[0].tokens / mine[0].forwards,
        "ms_per_step": 1e3 * statistics.median(one.seconds / one.steps for one in mine),
        "same_as_ar": sum(a == b for a, b in zip(mine[0].outputs, exact, strict=True)) / len(exact),
        "seconds": seconds,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table."""

    def ratio(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}×"

    lines = [
        "| batch | method | tok/s | over hf | over ar | tokens/forward | ms/step | same as ar | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['batch_size']} | {row['method']} | {row['tokens_per_second']:.1f} | {ratio(row['over_hf'])} "
            f"| {ratio(row['over_ar'])} | {row['tokens_per_forward']:.2f} | {row['ms_per_step']:.1f} "
            f"| {row['same_as_ar']:.0%} | {row['spread']:.0%} |"
        )
    return "\n".join(lines)


class Clock:
    """Adds up the time spent in functions, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(self.device)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(self.device)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return call

    @contextmanager
    def watch(self, model: Any) -> Iterator[None]:
        """Time what a step is made of."""
        head = model.get_output_embeddings()
        names = attention.AttentionInterface
        with ExitStack() as stack:
            stack.enter_context(patch.object(step, "forward_logits", self.timed("model", step.forward_logits)))
            stack.enter_context(
                patch.object(caching.RowLayer, "update", self.timed("cache writes", caching.RowLayer.update))
            )
            stack.enter_context(patch.object(head, "forward", self.timed("head", head.forward)))
            names.register(attention.NAME, self.timed("attention", attention.grouped_attention_forward))
            stack.callback(names.register, attention.NAME, attention.grouped_attention_forward)
            yield


def breakdown(checkpoint: Checkpoint, prompts: Ids, args: argparse.Namespace) -> str:
    """Where the milliseconds of a step after the prompts go, per batch size and width."""
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in checkpoint.model.parameters()}.values())
    bandwidth = _bandwidth(checkpoint.device)
    lines = [
        f"weights {weights / 1e6:.0f} MB, memory read at {bandwidth / 1e9:.1f} GB/s: no step below "
        f"{1e3 * weights / bandwidth:.1f} ms",
        "",
        "| rows | masks and drafts | step | attention | cache writes | head | rest of the model | outside the model |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rows in args.batch_sizes:
        for drafts in (0, 1, 2):
            lines.append(_one_breakdown(checkpoint, prompts[:rows], drafts, args.n))
    return "\n".join(lines)


def _one_breakdown(checkpoint: Checkpoint, prompts: Ids, drafts: int, most: int) -> str:
    params = DecodingParams(
        max_new_tokens=most, verify=True, draft_tokens=drafts, block_size=checkpoint.block_size or 1
    )
    decoder = make_engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=(),
        context_length=checkpoint.context_length,
        max_rows=len(prompts),
    )
    for prompt in prompts:
        decoder.add(Request(prompt, params))
    while decoder.step()[0].prefill:
        pass
    clock = Clock(torch.device(checkpoint.device))
    steps = []
    with clock.watch(checkpoint.model):
        while decoder.has_work and len(steps) < 16:
            started = time.perf_counter()
            decoder.step()
            steps.append(time.perf_counter() - started)
    model, head, attend, write = (
        1e3 * clock.seconds[name] / len(steps) for name in ("model", "head", "attention", "cache writes")
    )
    total = 1e3 * statistics.mean(steps)
    rest = model - head - attend - write
    return (
        f"| {len(prompts)} | {drafts} | {total:.1f} | {attend:.1f} | {write:.1f} | {head:.1f} | {rest:.1f} "
        f"| {total - model:.1f} |"
    )


def _bandwidth(device: torch.device) -> float:
    """Bytes a second at which memory is read, the best of several tries over 512 MB."""
    data = torch.ones(128 * 2**20, device=device)
    times = []
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        data.sum()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return data.nbytes / min(times)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="folder or Hub id of a MARS-tuned checkpoint")
    parser.add_argument("-d", "--dataset", type=Path, help="JSONL with prompts (default: the built-in ones)")
    parser.add_argument("--limit", type=int, default=32, help="problems")
    parser.add_argument("-n", type=int, default=128, help="new tokens a problem")
    parser.add_argument("--batch-sizes", default="1,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default=DEFAULT_METHODS, help=f"of: {', '.join(METHODS)}")
    parser.add_argument("--breakdown", action="store_true", help="where the time of a step goes")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    args.methods = [name.strip() for name in args.methods.split(",")]
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown:
        parser.error(f"--methods: {', '.join(unknown)} unknown; there are {', '.join(METHODS)}")

    checkpoint = checkpoints.load(args.model, device=args.device, dtype=args.dtype)
    loaded, _ = load_prompts(args.dataset, args.limit)
    prompts = encode_prompts(loaded, checkpoint.tokenizer, context_length=checkpoint.context_length)
    print(
        f"{checkpoint.name}, {args.dtype}, {checkpoint.device}, {torch.get_num_threads()} threads, "
        f"{len(prompts)} prompts, {args.n} new tokens, {args.repeats} repeats, torch {torch.__version__}\n"
    )
    if args.breakdown:
        print(breakdown(checkpoint, prompts, args))
        return
    rows = compare(checkpoint, prompts, args)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
