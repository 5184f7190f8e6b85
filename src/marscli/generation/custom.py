"""Decoding of ours behind transformers' own ``generate``: `custom_generate` makes what its argument of that name takes.

    inputs = tokenizer(["Why is the sky blue?", "Name three rivers."], padding=True, padding_side="left", ...)
    model.generate(**inputs, max_new_tokens=64, custom_generate=marscli.custom_generate(threshold=0.9))

Length, end-of-sequence tokens and sampling are as the generation config says; what it asks for and the engine cannot do
is refused rather than left out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from marscli.checkpoint import metadata_of
from marscli.core.decoding import Engine, Request, decode
from marscli.core.model import check_model
from marscli.core.params import Confidence, DecodingParams, parse_threshold
from marscli.errors import InputError


def custom_generate(
    *,
    threshold: str | float | None = "exact",
    confidence: Confidence = "probability",
    verify: bool = True,
    block_size: int | None = None,
    draft_tokens: int | None = None,
    mask_token_id: int | None = None,
    seed: int | None = None,
) -> Callable[..., Tensor]:
    """Make a decoding function for ``model.generate(..., custom_generate=…)`` of transformers.

    Args:
        threshold: See ``mars generate``, as the following.
        confidence: What τ is compared with.
        verify: Keep what τ did not pass as drafts.
        block_size: B; None takes the checkpoint's.
        draft_tokens: Masks a group and drafts; None lets the engine choose.
        mask_token_id: None takes the checkpoint's.
        seed: Of sampling; None draws one from torch's generator, so that ``torch.manual_seed`` rules.

    Returns:
        A function that ``generate`` calls; it returns ids as ``generate`` does, the prompt first.

    Raises:
        InputError: An option is outside its range. The function itself refuses likewise what cannot be done.
    """
    tau = parse_threshold(threshold, confidence)
    DecodingParams(threshold=tau, confidence=confidence, draft_tokens=draft_tokens, block_size=block_size or 1)

    def run(
        model: Any,
        input_ids: Tensor,
        logits_processor: Iterable[Any],
        stopping_criteria: Iterable[Any],
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        _check_settings(generation_config, stopping_criteria, model_kwargs)
        check_model(model)
        mars = metadata_of(model.config, "the model")
        mask = mask_token_id if mask_token_id is not None else mars and mars.mask_token_id
        if mask is None and tau is not None:
            raise InputError(
                f"threshold {tau:g}: the model was never MARS-trained",
                hint="train it with `mars train`, or use threshold='exact'",
            )
        trained = mask is not None
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        sampling = _sampling(logits_processor, generation_config.do_sample, mask)
        params = [
            DecodingParams(
                max_new_tokens=generation_config.max_length - input_ids.shape[1],
                threshold=tau,
                confidence=confidence,
                verify=verify and trained,
                block_size=(block_size or (mars.block_size if mars else 4)) if trained else 1,
                draft_tokens=draft_tokens if verify and trained else None,
                seed=_seed(row, seed) if sampling else 0,
                **sampling,
            )
            for row in range(len(prompts))
        ]
        ends = generation_config._eos_token_tensor
        engine = Engine(
            model,
            mask_token_id=mask,
            eos_token_ids=[] if ends is None else ends.tolist(),
            context_length=model.config.get_text_config().max_position_embeddings,
            max_rows=len(prompts),
        )
        try:
            requests = [Request(ids, each) for ids, each in zip(prompts, params, strict=True)]
            completions = decode(engine, requests)
        except ValueError as error:
            raise InputError(str(error), hint="change the prompt, or max_new_tokens") from error
        pad = generation_config._pad_token_tensor
        rows = [torch.tensor(completion.tokens) for completion in completions]
        answers = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0 if pad is None else int(pad))
        return torch.cat([input_ids, answers.to(input_ids)], dim=1)

    return run


def _check_settings(generation_config: Any, stopping_criteria: Iterable[Any], model_kwargs: dict[str, Any]) -> None:
    """Refuse what a generation config may ask for and the engine does not do."""
    if (generation_config.num_beams or 1) > 1:
        raise InputError(f"num_beams={generation_config.num_beams} is not handled", hint="use num_beams=1")
    if generation_config.return_dict_in_generate:
        raise InputError("return_dict_in_generate is not handled", hint="leave it out: ids are returned")
    if "inputs_embeds" in model_kwargs:
        raise InputError("inputs_embeds is not handled", hint="give input_ids")
    for criterion in stopping_criteria:
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise InputError(f"{type(criterion).__name__} is not handled", hint="leave that stopping criterion out")


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding."""
    if attention_mask is None:
        return input_ids.tolist()
    return [ids[kept.bool()].tolist() for ids, kept in zip(input_ids, attention_mask, strict=True)]


def _sampling(processors: Iterable[Any], do_sample: bool, mask_token_id: int | None) -> dict[str, float | int]:
    """Temperature, top-k and top-p as ``generate`` made them of its config; none of them if it is greedy.

    Raises:
        InputError: A processor that changes logits in another way.
    """
    settings: dict[str, float | int] = {"temperature": 1.0} if do_sample else {}
    for processor in processors:
        if isinstance(processor, TemperatureLogitsWarper):
            settings["temperature"] = processor.temperature
        elif isinstance(processor, TopKLogitsWarper):
            settings["top_k"] = processor.top_k
        elif isinstance(processor, TopPLogitsWarper):
            settings["top_p"] = processor.top_p
        elif not (
            isinstance(processor, SuppressTokensLogitsProcessor)
            and set(processor.suppress_tokens.tolist()) <= {mask_token_id}
        ):
            raise InputError(
                f"{type(processor).__name__} is not handled", hint="leave the setting out that asks for it"
            )
    return settings


def _seed(row: int, seed: int | None) -> int:
    """Rows differ, as they do in ``generate``."""
    return int(torch.randint(2**31, ()).item()) if seed is None else seed + row
