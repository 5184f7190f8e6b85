"""What a MARS training step costs, beside ordinary fine-tuning and beside the published layout.

    python benchmarks/train_cost.py -m runs/ar -d gsm8k_train.jsonl --batch-size 8 --repeats 3

Four steps over the same examples, interleaved in one run (forward, backward, AdamW), each with its seconds per example,
their spread, and the peak of memory during the pass:

=============  =========================================================================================================
ar             ``--objective ar``: L positions, logits of the labels alone
transformers   the library's causal-LM loss on the same padded batches: logits of all positions
mars           ours: L + R positions, logits of the labels alone, in chunks
published      the published code's layout: a masked copy of the whole sequence (2L positions, padded to blocks), logits
               of all of them over the whole vocabulary, one dense mask
=============  =========================================================================================================

Not measured: data loading, and the warm-up pass that each of the four gets.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from marscli import checkpoint
from marscli.benchmarking.memory import peak_megabytes, start_watching, synchronize
from marscli.core.attention import use_grouped_attention
from marscli.core.layout import NO_TARGET, TrainingBatch, ar_example, collate, two_stream_example
from marscli.core.masking import Visibility
from marscli.data.encoding import Encoded, Encoder
from marscli.data.prepare import ExampleReader
from marscli.output import atomic_write
from marscli.training.objective import label_counts, step_loss, term_weights

Step = Callable[[Sequence[Encoded]], Tensor]


def ours(model: nn.Module, block_size: int | None, mask_token_id: int, device: torch.device) -> Step:
    """``--objective mars``, or without a block size ``--objective ar``."""

    def loss(examples: Sequence[Encoded]) -> Tensor:
        rows = [
            ar_example(e.ids, e.turns)
            if block_size is None
            else two_stream_example(e.ids, e.turns, block_size=block_size, mask_token_id=mask_token_id)
            for e in examples
        ]
        batch = TrainingBatch(**{name: tensor.to(device) for name, tensor in vars(collate(rows, 0)).items()})
        most_offsets = block_size or 0
        weights = term_weights(label_counts([batch], most_offsets))
        return step_loss(model, batch, weights, most_offsets=most_offsets).loss

    return loss


def transformers_loss(model: nn.Module, device: torch.device) -> Step:
    """The library's own loss."""

    def loss(examples: Sequence[Encoded]) -> Tensor:
        width = max(len(e.ids) for e in examples)
        ids = torch.zeros(len(examples), width, dtype=torch.long)
        attention_mask, labels = torch.zeros_like(ids), torch.full_like(ids, NO_TARGET)
        for row, example in enumerate(examples):
            length = len(example.ids)
            ids[row, :length] = torch.from_numpy(example.ids)
            attention_mask[row, :length] = 1
            for start, end in example.turns:
                labels[row, start:end] = ids[row, start:end]
        ids, attention_mask, labels = (tensor.to(device) for tensor in (ids, attention_mask, labels))
        return model(input_ids=ids, attention_mask=attention_mask, labels=labels, use_cache=False).loss

    return loss


def published_layout(model: nn.Module, block_size: int, mask_token_id: int, end: int, device: torch.device) -> Step:
    """As METHOD describes the published code: both streams over the whole sequence, everything computed everywhere."""

    def loss(examples: Sequence[Encoded]) -> Tensor:
        width = -(-max(len(e.ids) for e in examples) // block_size) * block_size
        clean = torch.full((len(examples), width), end)
        targets = torch.full_like(clean, NO_TARGET)
        for row, example in enumerate(examples):
            clean[row, : len(example.ids)] = torch.from_numpy(example.ids)
            for start, stop in example.turns:
                targets[row, start - 1 : stop - 1] = clean[row, start:stop]
        positions = torch.arange(width).expand_as(clean)
        block = positions // block_size * block_size
        slot = torch.arange(2 * width).expand(len(examples), -1)
        visibility = Visibility(
            context_start=torch.zeros_like(slot),
            context_end=torch.cat([positions, block], dim=1),
            group_start=torch.cat([positions, width + block], dim=1),
            slot=slot,
        )
        logits = model(
            input_ids=torch.cat([clean, torch.full_like(clean, mask_token_id)], dim=1).to(device),
            position_ids=torch.cat([positions, positions], dim=1).to(device),
            attention_mask=visibility.dense().to(device),
            use_cache=False,
        ).logits.float()
        targets = targets.to(device).flatten()
        terms = [nn.functional.cross_entropy(half.flatten(0, 1), targets) for half in logits.split(width, dim=1)]
        return terms[0] + terms[1]

    return loss


def load_examples(source: str, loaded: checkpoint.Checkpoint, count: int, max_length: int) -> list[Encoded]:
    """The first examples of a data set, as training encodes them."""
    encoder = Encoder(loaded.tokenizer, loaded.eos_token_ids)
    return list(ExampleReader([source], encoder, max_length=max_length, limit=count, skip_bad_rows=True).read_all())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-d", "--dataset", required=True)
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=2, help="batches of a pass (default 2)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()

    loaded = checkpoint.load(args.model, device=args.device, dtype="float32")
    model, device = loaded.model.train(), loaded.model.device
    _, mask_token_id = checkpoint.choose_mask_token(loaded.tokenizer, model.get_input_embeddings().weight.shape[0])
    examples = load_examples(args.dataset, loaded, args.batch_size * args.batches, args.max_length)
    batches = [examples[i : i + args.batch_size] for i in range(0, len(examples), args.batch_size)]
    response = sum(e.response_tokens for e in examples) / sum(len(e.ids) for e in examples)
    steps: dict[str, Step] = {
        "ar": ours(model, None, mask_token_id, device),
        "transformers": transformers_loss(model, device),
        "mars": ours(model, args.block_size, mask_token_id, device),
        "published": published_layout(model, args.block_size, mask_token_id, loaded.eos_token_ids[0], device),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # lr 0: every pass meets the same weights

    def one_pass(name: str) -> tuple[float, float | None]:
        # The library's paths run with its own attention, ours with ours.
        if name in ("ar", "mars"):
            use_grouped_attention(model)
        else:
            model.set_attn_implementation("sdpa")
        start_watching(device)
        synchronize(device)
        started = time.perf_counter()
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = steps[name](batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize(device)
        return (time.perf_counter() - started) / len(examples), peak_megabytes(device)

    passes: dict[str, list[tuple[float, float | None]]] = {name: [] for name in steps}
    for name in steps:
        one_pass(name)
    order = list(steps)
    for repeat in range(args.repeats):
        random.Random(repeat).shuffle(order)
        for name in order:
            passes[name].append(one_pass(name))

    kind = "bf16 autocast" if args.bf16 else "float32"
    print(f"{args.model} on {device}, {kind}, {torch.get_num_threads()} threads")
    print(f"{len(examples)} examples in batches of {args.batch_size}; L + R is {1 + response:.2f} L here")
    print("| step | s per example | spread | over ar | over transformers | peak MB | over ar |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = [
        {
            "step": name,
            "seconds_per_example": statistics.median(seconds for seconds, _ in measured),
            "seconds_min": min(seconds for seconds, _ in measured),
            "seconds_max": max(seconds for seconds, _ in measured),
            "peak_memory_mb": max((peak for _, peak in measured if peak is not None), default=math.nan),
        }
        for name, measured in passes.items()
    ]
    ar, library = rows[0], rows[1]
    for row in rows:
        seconds, peak = row["seconds_per_example"], row["peak_memory_mb"]
        print(
            f"| {row['step']} | {seconds:.3f} | {row['seconds_min']:.3f} … {row['seconds_max']:.3f} "
            f"| {seconds / ar['seconds_per_example']:.2f} | {seconds / library['seconds_per_example']:.2f} "
            f"| {peak:,.0f} | {peak / ar['peak_memory_mb']:.2f} |"
        )
    if args.json:
        with atomic_write(args.json) as file:
            json.dump({"options": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
