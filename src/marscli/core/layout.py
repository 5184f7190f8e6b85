"""Where every entry of a forward pass stands: its position, its slot, and the ranges of slots that it sees.

Two layouts (arXiv 2604.07023). `two_stream_example` is training's: clean tokens, then the response again as masks,
cut into blocks from its first token. `decode_layout` is a decode step's: newest tokens and a group of masks behind
them. A mask of either sees real tokens before its block and its own block up to itself, so training and decoding
compute the same logits: a test holds them to that.

Positions follow AR models everywhere: the logits of the entry at position t predict token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marscli.core.masking import Visibility

NO_TARGET = -100  # as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class TrainingExample:
    """One example's entries, 1-D tensors of L + R (two streams) or L (AR) elements; slots are the entries' own indices.

    Attributes:
        input_ids: Clean tokens, then one mask token for each response token.
        position_ids: A mask has the position of the token that it stands for.
        targets: The token that each entry's logits are trained on, `NO_TARGET` where none. Already shifted.
        offsets: 0 for a clean entry, i ≥ 1 for the i-th mask of its block.
        context_end: See `Visibility`; a clean entry's own slot, or the start of a mask's block.
        group_start: See `Visibility`; the entry's own slot, or that of the first mask of its block.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    offsets: Tensor
    context_end: Tensor
    group_start: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


def ar_example(ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> TrainingExample:
    """Lay out one example for ordinary AR fine-tuning.

    Args:
        ids: The L token ids of prompt and response.
        turns: ``(start, end)`` of every response, its end-of-sequence token included; labels go by position, never by
            id, so a padding token that equals the end-of-sequence token does no harm.

    Returns:
        L entries; the one before each response token has that token as its target. A response that starts at
        position 0 has no entry before its first token.
    """
    tokens = torch.tensor(ids)
    positions = torch.arange(len(ids))
    targets = torch.full_like(tokens, NO_TARGET)
    for start, end in turns:
        first = max(start, 1)
        targets[first - 1 : end - 1] = tokens[first:end]
    return TrainingExample(tokens, positions, targets, torch.zeros_like(tokens), positions, positions)


def two_stream_example(
    ids: Sequence[int],
    turns: Sequence[tuple[int, int]],
    *,
    block_size: int,
    mask_token_id: int,
) -> TrainingExample:
    """Lay out one example for MARS: the clean stream of `ar_example`, then each response as blocks of masks.

    Args:
        ids: As for `ar_example`.
        turns: As for `ar_example`; every response starts a block of its own.
        block_size: B.
        mask_token_id: The mask token.

    Returns:
        L + R entries. The mask at position i is trained on token i + 1, if that is of the same response: R − 1 targets
        a response.

    Example:
        Prompt 7 8, response 4 5 6 (positions 2, 3, 4), B = 2, mask token 0:

        >>> e = two_stream_example([7, 8, 4, 5, 6], [(2, 5)], block_size=2, mask_token_id=0)
        >>> e.input_ids.tolist(), e.position_ids.tolist()
        ([7, 8, 4, 5, 6, 0, 0, 0], [0, 1, 2, 3, 4, 2, 3, 4])
        >>> e.targets.tolist(), e.offsets.tolist()
        ([-100, 4, 5, 6, -100, 5, 6, -100], [0, 0, 0, 0, 0, 1, 2, 1])
        >>> print(collate([e], pad_token_id=9).visibility.picture())
        █·······
        ██······
        ███·····
        ████····
        █████···
        ██···█··
        ██···██·
        ████···█
    """
    clean = ar_example(ids, turns)
    streams = [clean]
    slot = len(clean)
    for start, end in turns:
        positions = torch.arange(start, end)
        index_in_block = (positions - start) % block_size
        targets = torch.full_like(positions, NO_TARGET)
        targets[:-1] = clean.input_ids[start + 1 : end]
        streams.append(
            TrainingExample(
                input_ids=torch.full_like(positions, mask_token_id),
                position_ids=positions,
                targets=targets,
                offsets=index_in_block + 1,
                context_end=positions - index_in_block,
                group_start=slot + torch.arange(end - start) - index_in_block,
            )
        )
        slot += end - start
    return TrainingExample(*(torch.cat(parts) for parts in zip(*(vars(s).values() for s in streams), strict=True)))


@dataclass(frozen=True)
class TrainingBatch:
    """Examples padded to one length on the right; every tensor (B, T). Padding has no target and sees only itself."""

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    offsets: Tensor
    context_end: Tensor
    group_start: Tensor

    @property
    def visibility(self) -> Visibility:
        """Who sees whom in this batch."""
        slot = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        return Visibility(torch.zeros_like(slot), self.context_end, self.group_start, slot)


def collate(examples: Sequence[TrainingExample], pad_token_id: int) -> TrainingBatch:
    """Pad examples to the longest of them."""
    width = max(len(example) for example in examples)
    own_slot = torch.arange(width)

    def pad(name: str, fill: int | Tensor) -> Tensor:
        out = torch.empty(len(examples), width, dtype=torch.long)
        out[:] = fill
        for row, example in enumerate(examples):
            out[row, : len(example)] = getattr(example, name)
        return out

    return TrainingBatch(
        input_ids=pad("input_ids", pad_token_id),
        position_ids=pad("position_ids", 0),
        targets=pad("targets", NO_TARGET),
        offsets=pad("offsets", 0),
        context_end=pad("context_end", 0),
        group_start=pad("group_start", own_slot),
    )


@dataclass(frozen=True)
class StepLayout:
    """One decode step's entries; every tensor (rows, W) but `read`.

    Attributes:
        position_ids: Position of each entry.
        visibility: Who sees whom; its ``slot`` says where keys and values are written.
        read: (rows, M + 1), the entries whose logits the acceptance reads: the newest token, then the masks of group 0.
    """

    position_ids: Tensor
    visibility: Visibility
    read: Tensor


def decode_layout(cached: Tensor, newest: Tensor, masks: Tensor, *, width: int, reads: int) -> StepLayout:
    """Lay out a step: each row's newest tokens, then masks, then padding up to the common width.

    Entry e of a row that has n tokens cached is written to slot n + e. Real tokens thus stand at slot = position; what
    masks and padding write lies past the row's length, where the next step overwrites it before anything may see it.

    Args:
        cached: (rows,) n, the tokens whose keys and values are cached.
        newest: (rows,) N ≥ 1, accepted tokens that are not cached yet.
        masks: (rows,) m ≥ 0, masks behind them.
        width: W, at least the largest N + m.
        reads: Entries to read a row, at least the largest m + 1. A row with fewer masks repeats its last entry.
    """
    entry = torch.arange(width, device=cached.device)
    n, newest_count, mask_count = cached[:, None], newest[:, None], masks[:, None]
    slot = n + entry
    is_newest = entry < newest_count
    is_mask = ~is_newest & (entry < newest_count + mask_count)
    group_position = n + newest_count  # where the masks' block starts
    visibility = Visibility(
        context_start=torch.zeros_like(slot),
        context_end=torch.where(is_newest, slot, torch.where(is_mask, group_position, 0)),
        group_start=torch.where(is_mask, group_position, slot),
        slot=slot,
    )
    offset = torch.arange(reads, device=cached.device)
    read = newest_count - 1 + torch.minimum(offset, mask_count)
    return StepLayout(position_ids=slot, visibility=visibility, read=read)
