"""Tiny random models for tests of the core, and the slow decoders that they are held against.

By default weights are scaled up so that argmaxes are clear and confidences spread over (0, 1).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from marscli.core.layout import NO_TARGET, StepLayout, collate, two_stream_example
from marscli.core.masking import Visibility
from marscli.core.model import forward_logits

ARCHITECTURES = ("qwen2", "qwen3", "llama")
VOCAB_SIZE = 48
MASK = 47
CLEAR = 1e-5  # two logits closer than this are a tie that rounding may break either way


@lru_cache
def tiny_model(architecture: str, seed: int = 0, *, clear: bool = True) -> PreTrainedModel:
    """Two layers, two query heads for each key/value head, float32.

    Args:
        architecture: One of `ARCHITECTURES`.
        seed: Of the weights.
        clear: Scale weights up so that argmaxes are clear; without it logits are of the order of 1, which absolute
            tolerances are made for.
    """
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25 if clear else 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if architecture == "qwen2":
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**common))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **common))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common))
    if clear:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(2.0)
    return model.float().eval()


def random_ids(length: int, seed: int) -> list[int]:
    """A prompt without the mask token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MASK, (length,), generator=generator).tolist()


def transformers_greedy(
    model: PreTrainedModel, ids: list[int], max_new_tokens: int, eos_token_ids: list[int]
) -> list[int]:
    """What transformers' own ``generate`` gives for one prompt, the end-of-sequence token included."""
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        suppress_tokens=[MASK],
        eos_token_id=eos_token_ids or None,
        pad_token_id=0,
    )
    return output[0, len(ids) :].tolist()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) of an ordinary causal forward, the mask token ruled out."""
    logits = model(torch.tensor([ids])).logits[0]
    logits[:, MASK] = -torch.inf
    return logits


@torch.no_grad()
def paper_reference(
    model: PreTrainedModel, ids: list[int], *, max_new_tokens: int, threshold: float, block_size: int, eos: list[int]
) -> list[int]:
    """The paper's scheme by its definition: no cache, no batch, an ordinary causal forward over tokens and masks.

    Masks stand last, so ordinary causal attention is all that they need.
    """
    out: list[int] = []
    while len(out) < max_new_tokens:
        masks = min(block_size - 1, max_new_tokens - len(out) - 1)
        logits = plain_logits(model, ids + out + [MASK] * masks)[len(ids) + len(out) - 1 :]
        confidences, tokens = logits.softmax(-1).max(-1)
        accepted = [int(tokens[0])]
        for token, confidence in zip(tokens[1:].tolist(), confidences[1:].tolist(), strict=True):
            if accepted[-1] in eos or confidence < threshold:
                break
            accepted.append(token)
        out += accepted
        if out[-1] in eos:
            break
    return out


def is_tie(model: PreTrainedModel, prefix: list[int]) -> bool:
    """Whether the reference's two best next tokens are too close to call."""
    best = plain_logits(model, prefix)[-1].topk(2).values
    return bool(best[0] - best[1] < CLEAR)


def on_device(layout: StepLayout) -> tuple[torch.Tensor, Visibility, torch.Tensor]:
    """A decode step's position ids, visibility and entries to read, as tensors."""
    position_ids, end, group, slot, read = (
        torch.from_numpy(array)
        for array in (layout.position_ids, layout.context_end, layout.group_start, layout.slot, layout.read)
    )
    return position_ids, Visibility(torch.zeros_like(slot), end, group, slot), read


@lru_cache
def memoriser() -> tuple[PreTrainedModel, list[list[int]]]:
    """A model that was MARS-trained on three texts of 32 tokens until it knows them, with B = 4; and the texts."""
    torch.manual_seed(0)
    model = tiny_model("llama", seed=90, clear=False)
    texts = [random_ids(32, seed) for seed in (1, 2, 3)]
    examples = [
        two_stream_example(text, [(start, len(text))], block_size=4, mask_token_id=MASK)
        for text in texts
        for start in (4, 5, 6, 7)  # blocks begin at every offset
    ]
    batch = collate(examples, pad_token_id=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    labelled = batch.targets != NO_TARGET
    for _ in range(120):
        logits = forward_logits(
            model,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            mask=batch.visibility.dense(),
            keep=labelled,
        )
        loss = torch.nn.functional.cross_entropy(logits, batch.targets[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02, loss
    return model.eval(), texts
