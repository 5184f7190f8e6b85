"""A tiny model with a real tokenizer, a scripted model, and small local tasks, so that most tests need no others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = """
Question: Anna has 3 apples and buys 4 more. How many apples does she have? Answer: 3 + 4 = 7. The answer is 7.
Question: A train has 12 wagons with 5 boxes each. How many boxes are there? Answer: 12 * 5 = 60. The answer is 60.
user assistant system You are a helpful assistant, be brief.
0 1 2 3 4 5 6 7 8 9 10 11 14 16 18 20 red blue green yellow"""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, chat_template: bool = True, text: str = TEXT, vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of a chat model, mask included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    if chat_template:
        fast.chat_template = TEMPLATE
    return fast


def make_model(
    vocabulary: int, *, context: int = 4096, eos: list[int], seed: int = 0, favoured: slice | None = None
) -> LlamaForCausalLM:
    """A random model whose greedy text does not loop at once and whose best two logits are far apart.

    Args:
        vocabulary: Number of tokens.
        context: Longest text.
        eos: Tokens that end it.
        seed: Of the weights.
        favoured: Tokens that are chosen more often, so that a mask is now and then right and a draft accepted.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=eos,
        bos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    if favoured is not None:
        with torch.no_grad():
            model.lm_head.weight[favoured] *= 3
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=0)
    return model


def save_checkpoint(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a MARS checkpoint, B = 4."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    mask = tokenizer.mask_token_id
    config |= {"mask_token_id": mask, "pard_token": mask, "mars": {"version": 1, "block_size": 4, "ar_weight": 1.0}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Tasks:
    """A folder of local task files with their data.

    Args:
        folder: Where they go; what ``--include-path`` takes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [{"question": f"What is {n} + {n + 3}?", "answer": str(2 * n + 3)} for n in range(1, 7)]
        rows[3]["question"] += " Anna has 3 apples." * 8  # unequal lengths
        choices = ["red", "blue", "green apples"]
        rows = [{**row, "choices": choices, "label": n % 3} for n, row in enumerate(rows)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def data(self) -> dict[str, Any]:
        """The part of a task file that names the data."""
        return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(self.folder / "data.jsonl")}}}

    def add(self, name: str, **config: Any) -> str:
        """Write a task file and return the task's name."""
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **config}))
        return name

    def sums(self, name: str = "sums", **generation: Any) -> str:
        """A task with generated answers."""
        return self.add(
            name,
            **self.data(),
            output_type="generate_until",
            test_split="test",
            doc_to_text="Question: {{question}}\nAnswer:",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": ["Question:", "\n\n"], "do_sample": False, **generation},
            metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            filter_list=[
                {
                    "name": "number",
                    "filter": [
                        {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1},
                        {"function": "take_first"},
                    ],
                }
            ],
            metadata={"version": 1.0},
        )

    def colours(self, name: str = "colours") -> str:
        """A multiple-choice task."""
        return self.add(
            name,
            **self.data(),
            output_type="multiple_choice",
            test_split="test",
            doc_to_text="{{question}}\nAnswer:",
            doc_to_choice="{{choices}}",
            doc_to_target="{{label}}",
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            metadata={"version": 1.0},
        )

    def group(self, name: str, tasks: list[str], metric: str, filters: str = "none") -> str:
        """A group with a score of its own."""
        aggregate = [{"metric": metric, "filter_list": [filters], "aggregation": "mean", "weight_by_size": True}]
        config = {"group": name, "task": tasks, "aggregate_metric_list": aggregate}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        return name


class ScriptedModel(nn.Module):
    """Writes the same tokens whatever it is asked: the one at position p is ``script[p - start]``.

    Args:
        script: Token ids.
        start: Length of the prompt.
        mask: The mask's id, from which every prediction has probability ``sure``.
    """

    def __init__(self, script: list[int], start: int, vocabulary: int, mask: int, sure: float = 0.99) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
        self.device = torch.device("cpu")
        self.script, self.start, self.mask, self.sure = script, start, mask, sure
        self.head = nn.Identity()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def tie_weights(self) -> None:
        """Nothing to tie; HFLM calls it."""

    def forward(
        self, input_ids, position_ids=None, attention_mask=None, cache=None, use_cache=True, logits_to_keep=None
    ):
        index = (position_ids + 1 - self.start).clamp(0, len(self.script) - 1)
        tokens = torch.tensor(self.script)[index]
        p = torch.where(input_ids == self.mask, self.sure, 0.999)
        logits = torch.log((1 - p) / self.config.vocab_size)[..., None].repeat(1, 1, self.config.vocab_size)
        logits.scatter_(2, tokens[..., None], p.log()[..., None])
        if logits_to_keep is not None:
            logits = torch.take_along_dim(logits, logits_to_keep[..., None], dim=1)
        return SimpleNamespace(logits=self.head(logits))
