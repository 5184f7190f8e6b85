"""The model card (``README.md``) of a trained checkpoint: what it is made of and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import marscli
from marscli.training.config import TrainConfig


def model_card(config: TrainConfig, summary: Mapping[str, Any]) -> str:
    """Write the card of a finished run.

    Args:
        config: The run's options. Folders and files are named without the path to them.
        summary: What ``summary.json`` holds.
    """
    mars = config.objective == "mars"
    base = _public_name(config.model)
    name = Path(config.output_dir).resolve().name
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [marscli, mars]"]
    if _is_hub_id(config.model):
        header.append(f"base_model: {config.model}")
    hub_data = [source.split(":")[0] for source in config.dataset if not Path(source).exists()]
    if hub_data:
        header.append(f"datasets: [{', '.join(hub_data)}]")
    if mars:
        what = (
            f"{base}, fine-tuned with MARS (arXiv 2604.07023) to predict up to {config.block_size} tokens in one "
            "forward pass. It is still an ordinary causal language model: no heads, no extra parameters."
        )
        use = (
            f"Several tokens a forward, with [marscli](https://pypi.org/project/marscli/):\n\n"
            f'```bash\nmars generate -m {name} "Your question" --threshold 0.95\n```\n\n'
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
        "steps": f"{summary['steps']:,} ({summary['epochs']:.2f} epochs)",
        "examples a step": config.batch_size * config.grad_accum,
        "longest example": f"{config.max_length} tokens",
        "learning rate": f"{config.lr:g}, cosine, warm-up {config.warmup_ratio:g}",
        "dtype": summary["meta"]["dtype"],
        "seed": config.seed,
        "final loss": f"{summary['loss']:.3f}",
        "versions": f"marscli {marscli.__version__}, transformers {summary['meta']['versions']['transformers']}",
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return (
        "\n".join([*header, "---"])
        + f"\n\n# {name}\n\n{what}\n\n## Use\n\n{use}\n\n"
        + "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        + f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        + f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        + f"## Training\n\n| | |\n| --- | --- |\n{rows}\n\n![Loss and accuracy](loss.png)\n"
    )


def _is_hub_id(model: str) -> bool:
    return not Path(model).exists()


def _public_name(source: str) -> str:
    return Path(source).name if Path(source).exists() else source
