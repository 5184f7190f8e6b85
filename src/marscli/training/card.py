"""The model card (``README.md``) of a trained checkpoint: what it is made of and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import marscli
from marscli.training.config import TrainConfig

BEYOND_THE_PAPER = ("distill", "balance", "random_offset", "block_curriculum")


def model_card(config: TrainConfig, summary: Mapping[str, Any]) -> str:
    """Write the card of a finished run.

    Args:
        config: The run's options. Folders and files are named without the path to them.
        summary: What ``summary.json`` holds.
    """
    mars = config.objective == "mars"
    base = _public_name(config.model)
    name = Path(config.output_dir).resolve().name
    adapters = config.lora_rank is not None and not config.merge
    library = "peft" if adapters else "transformers"
    header = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags: [marscli, mars]"]
    if not Path(config.model).exists():
        header.append(f"base_model: {config.model}")
    hub_data = [name for name in (source.split(":")[0] for source in config.dataset) if not Path(name).exists()]
    if hub_data:
        header.append(f"datasets: [{', '.join(hub_data)}]")
    if mars:
        what = (
            f"{base}, fine-tuned with MARS (arXiv 2604.07023) to predict up to {config.block_size} tokens in one "
            "forward pass. "
            + (
                "This folder holds low-rank adapters for it, and the embedding of the mask token."
                if adapters
                else "It is still an ordinary causal language model: no heads, no extra parameters."
            )
        )
        use = (
            "Several tokens a forward, with marscli's command `mars`, in this folder:\n\n"
            '```bash\nmars generate -m . "Your question" --threshold 0.95\n```\n\n'
            "`--threshold` (τ) trades exactness for speed; `exact` gives one-token mode's output. "
            "As an ordinary model, one token a forward:"
        )
    else:
        what = f"{base}, fine-tuned on instruction data. The first of the two stages of MARS training."
        use = "An ordinary causal language model:"
    settings = {
        "data": ", ".join(map(_public_name, config.dataset)),
        "rows used": f"{summary['rows']['used']:,} of {summary['rows']['rows']:,}",
        "objective": config.objective,
        **({"block size": config.block_size, "weight of the AR loss": config.ar_weight} if mars else {}),
        **{flag.replace("_", " "): "on" for flag in BEYOND_THE_PAPER if mars and getattr(config, flag)},
        **({"rank of the adapters": config.lora_rank} if config.lora_rank is not None else {}),
        "steps": f"{summary['steps']:,}" + (f" ({summary['epochs']:.2f} epochs)" if summary["epochs"] else ""),
        "examples a step": config.batch_size * config.grad_accum * summary["processes"],
        "longest example": f"{config.max_length} tokens",
        "learning rate": f"{config.lr:g}, cosine, warm-up {config.warmup_ratio:g}",
        "dtype": summary["meta"]["dtype"],
        "seed": config.seed,
        "final loss": f"{summary['loss']:.3f}",
        **({"held-out loss": f"{summary['eval_loss']:.3f}"} if summary["eval_loss"] is not None else {}),
        "versions": f"marscli {marscli.__version__}, transformers {summary['meta']['versions']['transformers']}",
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return (
        "\n".join([*header, "---"])
        + f"\n\n# {name}\n\n{what}\n\n## Use\n\n{use}\n\n"
        + "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        + 'model = AutoModelForCausalLM.from_pretrained(".")\n'
        + 'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
        + f"## Training\n\n| | |\n| --- | --- |\n{rows}\n\n![Loss and accuracy](loss.png)\n"
    )


def _public_name(source: str) -> str:
    """A Hub id as it is; of a file or folder, which may be followed by config and split, no more than its name."""
    path, *rest = [source] if Path(source).exists() else source.split(":")
    return ":".join([Path(path).name if Path(path).exists() else path, *rest])
