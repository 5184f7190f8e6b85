"""Shows a bench: the table for the terminal, ``report.md`` for pasting, and the files beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marscli.benchmarking.results import label, to_csv
from marscli.output import atomic_write, markdown_table, write_json, write_text

if TYPE_CHECKING:
    from rich.table import Table

PICTURES = {
    "pareto.png": "Quality against speed",
    "speedup.png": "Speed-up by batch size",
    "acceptance.png": "Tokens by the mask that predicted them",
}
FILES = ("results.json", "results.csv", "report.md", *PICTURES)

COLUMNS = {
    "batch": "rows decoded together",
    "method": "see docs/BENCHMARKING.md",
    "tokens/forward": "completion tokens a row gained per forward pass it took part in, its prompt's included; AR is "
    "1.00",
    "tokens/s": "completion tokens of all rows a second of wall time, prompts' reading included; median of the repeats",
    "min–max": "the same in the slowest and in the fastest repeat",
    "vs hf": "tokens/s over those of transformers' `generate` (greedy, KV cache, sdpa) at the same batch size",
    "vs ar": "tokens/s over those of marscli decoding one token a forward at the same batch size",
    "same as ar": "share of the prompts with the output of `ar` at the same batch size, token for token; in brackets "
    "where the others first differ, in tokens, on average",
    "accuracy": "share of the prompts whose last number is the reference answer's",
    "first ms": "time to the first token of a prompt, once its turn has come: the call that reads it",
    "step ms": "time of a step after that, all rows together, with what lies between two calls of the model",
    "width": "entries that a step runs for each row, mean: newest tokens, drafts, masks, padding",
    "floor": "time of a step over the time that reading the weights once takes at the bandwidth measured here",
    "MB": "highest memory of a pass, 10⁶ bytes (GPU: allocated by torch; CPU: resident memory of the process)",
}
DETAILS = ("first ms", "step ms", "width", "floor", "MB")
"""Columns that a narrow terminal leaves out."""


def write(meta: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write all result files; the numbers first, so that a failing picture cannot cost them."""
    from marscli.benchmarking import figures

    write_numbers(meta, rows, folder)
    drawn = {
        "pareto.png": figures.pareto(rows, headline(meta)),
        "speedup.png": figures.speedup(rows, headline(meta)),
        "acceptance.png": figures.acceptance(rows, headline(meta)),
    }
    for name, picture in drawn.items():
        if picture is None:
            (folder / name).unlink(missing_ok=True)  # --force: an older run's picture does not belong to these numbers
            continue
        with atomic_write(folder / name, "wb") as handle:
            handle.write(picture)
    write_text(folder / "report.md", markdown(meta, rows, [name for name in PICTURES if drawn[name] is not None]))


def write_numbers(meta: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write ``results.json`` and ``results.csv``."""
    write_json(folder / "results.json", {"meta": meta, "rows": rows})
    write_text(folder / "results.csv", to_csv(rows))


def headline(meta: dict[str, Any]) -> str:
    """Model, machine and workload in one line."""
    prompts = meta["prompts"]
    count = f"{prompts['used']} of {prompts['available']}" if prompts["partial"] else f"{prompts['used']}"
    device = meta["device"] if meta["device"] == "cpu" else f"{meta['device']} ({meta['device_name']})"
    threads = f", {meta['threads']} thread{'s' * (meta['threads'] > 1)}" if meta["device"] == "cpu" else ""
    return (
        f"{_short(meta['model'])} · {meta['dtype']} on {device}{threads} · {count} prompts, up to "
        f"{meta['options']['max_new_tokens']} new tokens"
    )


def _short(model: str) -> str:
    """A Hub id as it is; of a folder its own name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns, rows of text, and footnotes: what the terminal and the Markdown table share."""
    columns = [name for name in COLUMNS if name != "accuracy" or any(row["accuracy"] is not None for row in rows)]
    lines: list[list[str]] = []
    reasons: list[str] = []
    for row in rows:
        if row["skipped"]:
            if row["skipped"] not in reasons:
                reasons.append(row["skipped"])
            reason = f"skipped [{reasons.index(row['skipped']) + 1}]"
            lines.append([str(row["batch_size"]), label(row), reason, *[""] * (len(columns) - 3)])
            continue
        slowest, fastest = (row["tokens"] / row[key] for key in ("seconds_max", "seconds_min"))
        same = _share(row["agrees_with_ar"])
        if row["first_difference"] is not None:
            same += f" ({row['first_difference']:.0f})"
        step, floor = row["step_milliseconds"], row["floor_milliseconds"]
        values = {
            "batch": str(row["batch_size"]),
            "method": label(row),
            "tokens/forward": f"{row['tokens_per_forward']:.2f}",
            "tokens/s": _speed(row["tokens_per_second"]),
            "min–max": f"{_speed(slowest)}–{_speed(fastest)}",
            "vs hf": _ratio(row["speedup_vs_hf"]),
            "vs ar": _ratio(row["speedup_vs_ar"]),
            "same as ar": same,
            "accuracy": _share(row["accuracy"]),
            "first ms": _number(1000 * row["first_token_seconds"]),
            "step ms": _number(step),
            "width": _number(row["step_width"]),
            "floor": f"{step / floor:.1f}×" if step and floor else "–",
            "MB": "–" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.0f}",
        }
        lines.append([values[column] for column in columns])
    return columns, lines, [f"[{number}] skipped: {reason}" for number, reason in enumerate(reasons, start=1)]


def table(meta: dict[str, Any], rows: Sequence[dict[str, Any]], *, details: bool = True) -> Table:
    """The table for a terminal, batch sizes apart; the fastest row of each batch size stands out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, lines, notes = cells(rows)
    kept = [place for place, column in enumerate(columns) if details or column not in DETAILS]
    shown = Table(
        title=headline(meta),
        caption="\n".join([*notes, *_margin(rows), _caption(meta)]),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
    )
    for place in kept:
        column = columns[place]
        shown.add_column(
            column.replace("/", "\n/").replace(" ms", "\nms"), justify="left" if column == "method" else "right"
        )
    for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
        rivals = [r["tokens_per_second"] or 0 for r in rows if r["batch_size"] == row["batch_size"]]
        best = not row["skipped"] and row["tokens_per_second"] == max(rivals)
        last = place + 1 == len(rows) or rows[place + 1]["batch_size"] != row["batch_size"]
        style = "bold" if best else "dim" if row["skipped"] else ""
        shown.add_row(*(Text(line[column]) for column in kept), style=style, end_section=last)
    return shown


def _caption(meta: dict[str, Any]) -> str:
    options = meta["options"]
    text = (
        "hf = transformers generate (greedy, KV cache, sdpa); ar = marscli one token a forward; tokens/s with prompts; "
        f"median of {options['repeats']} interleaved repeat{'s' if options['repeats'] > 1 else ''}; "
        f"{_floor(meta)}"
    )
    return "INTERRUPTED: fewer repeats than asked for\n" + text if meta["interrupted"] else text


def _margin(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a lossless row that is not the same as ar must answer for."""
    margins = [row["largest_margin"] for row in rows if row["largest_margin"] is not None]
    if not margins:
        return []
    return [f"lossless rows differ from ar only where two tokens' log-probabilities are within {max(margins):.2g} nats"]


def _floor(meta: dict[str, Any]) -> str:
    weights, bandwidth = meta["weights_mb"], meta["bandwidth_gb_per_second"]
    return f"floor = {weights:.4g} MB of weights at {bandwidth:.3g} GB/s: {weights / bandwidth:.3g} ms a step"


def markdown(meta: dict[str, Any], rows: Sequence[dict[str, Any]], pictures: Sequence[str]) -> str:
    """``report.md``: ready to paste."""
    columns, lines, notes = cells(rows)
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items() if version)
    named = [name for name in meta["baselines"] if any(row["method"] == name for row in rows)]
    baselines = ". ".join(f"`{name}`: {meta['baselines'][name]}" for name in named)
    parts = [
        "# mars bench",
        headline(meta) + ".",
        "**Interrupted: some rows have fewer repeats than asked for, or none.**" if meta["interrupted"] else "",
        markdown_table(columns, lines),
        "\n".join(f"{note}  " for note in [*notes, *_margin(rows)]),
        *(f"![{PICTURES[name]}]({name})" for name in pictures),
        "## What the columns say",
        "\n".join(f"* **{column}**: {COLUMNS[column]}" for column in columns),
        f"{_floor(meta)}. {baselines}.",
        "Methods took turns within each repeat, after a warm-up that is not counted. "
        f"Repeats: {meta['options']['repeats']}. Prompts: {meta['data']}, {meta['prompt_tokens']} tokens in all.",
        "## How it was measured",
        f"```\n{meta['command']}\n```",
        f"{versions}. {meta['platform']}, {meta['device']} ({meta['device_name']}), threads: {meta['threads']}, "
        f"{meta['dtype']}, seed {meta['seed']}, {meta['time']}"
        + (f", commit {meta['git_commit'][:12]}." if meta["git_commit"] else "."),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
