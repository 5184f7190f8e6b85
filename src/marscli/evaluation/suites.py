"""``--tasks paper``: the six benchmarks of arXiv 2604.07023 in its settings, and the figures that it published.

Numbers and names only. The paper does not say which of a benchmark's metrics it reports, so ours may be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER = "paper"
PAPER_MAX_NEW_TOKENS = 256
SOURCE = "arXiv 2604.07023, tables 2, 4 and 8"


@dataclass(frozen=True)
class Benchmark:
    """One of the six.

    Attributes:
        title: Its name in the paper.
        task: lm-eval's task or group.
        problems: How many it has. A data set of another size is a part of it, or something else.
        num_fewshot: Worked examples, where lm-eval's own number is not the paper's.
    """

    title: str
    task: str
    problems: int
    num_fewshot: int | None = None


BENCHMARKS = (
    Benchmark("IFEval", "ifeval", 541),
    Benchmark("BBH", "bbh_cot_fewshot", 6511),
    Benchmark("MMLU-Pro", "mmlu_pro", 12032, num_fewshot=0),
    Benchmark("GPQA", "gpqa_main_cot_zeroshot", 448),
    Benchmark("GSM8K", "gsm8k_cot_zeroshot", 1319),
    Benchmark("HumanEval", "humaneval_instruct", 164),
)


@dataclass(frozen=True)
class Published:
    """A published row; scores in %.

    Attributes:
        model: Size, method and block size.
        threshold: τ; 1.0 is one-token mode.
        scores: By the benchmark's title.
        average: Over the six.
        change: Of the average, against τ = 1.0.
        tokens_per_forward: Over the six, or on GSM8K where that is the only score.
        table: The paper's.
    """

    model: str
    threshold: float
    table: int
    scores: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None
    change: float | None = None
    tokens_per_forward: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As ``results.json`` holds it."""
        return {**self.__dict__, "scores": dict(self.scores), "source": "published, not measured here"}


def _table_2(model: str, *scores: float, average: float) -> Published:
    titles = (benchmark.title for benchmark in BENCHMARKS)
    return Published(model, 1.0, 2, dict(zip(titles, scores, strict=True)), average)


PUBLISHED = (
    _table_2("0.5B AR SFT", 48.4, 26.3, 11.9, 17.9, 32.0, 35.4, average=28.7),
    _table_2("0.5B Block Diffusion, B=4", 47.1, 7.5, 2.0, 17.9, 30.6, 31.7, average=22.8),
    _table_2("0.5B MARS without SFT loss, B=4", 48.5, 27.4, 12.3, 19.0, 29.5, 33.5, average=28.4),
    _table_2("0.5B MARS, B=4", 51.3, 26.6, 12.4, 19.4, 32.8, 40.2, average=30.4),
    Published("0.5B MARS, B=4", 0.95, 4, average=29.0, change=-1.4, tokens_per_forward=1.46),
    Published("0.5B MARS, B=8", 0.95, 4, average=28.6, change=-1.1, tokens_per_forward=1.49),
    _table_2("7B AR SFT", 67.0, 54.0, 43.9, 27.5, 68.7, 78.7, average=56.6),
    _table_2("7B MARS, B=4", 68.2, 54.6, 44.4, 26.6, 73.2, 81.7, average=58.1),
    Published("7B MARS, B=4", 0.95, 4, average=56.8, change=-1.3, tokens_per_forward=1.68),
    Published("7B MARS, B=8", 0.95, 4, average=56.1, change=-1.0, tokens_per_forward=1.82),
    Published("7B MARS, B=16", 0.95, 4, average=55.1, change=-1.4, tokens_per_forward=1.87),
    *(
        Published("7B MARS, B=4", tau, 8, {"GSM8K": score}, tokens_per_forward=speed)
        for tau, score, speed in (
            (1.0, 73.2, 1.00),
            (0.95, 71.0, 1.79),
            (0.9, 70.3, 1.96),
            (0.8, 67.7, 2.19),
            (0.7, 63.8, 2.37),
            (0.6, 60.3, 2.55),
            (0.5, 56.0, 2.77),
        )
    ),
)
