"""Where every entry of a forward pass stands: its position, its slot, and the ranges of slots that it sees.

Two layouts (arXiv 2604.07023). `two_stream_example` is training's: clean tokens, then the response again as masks,
cut into blocks from its first token. `decode_layout` is a decode step's: newest tokens, drafts to verify, and groups
of masks behind them. A mask of either sees real tokens before its block and its own block up to itself, so training and
decoding compute the same logits: a test holds them to that.

Positions follow AR models everywhere: the logits of the entry at position t predict token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from marscli.core.masking import Visibility

Ints = npt.NDArray[np.int64]

NO_TARGET = -100  # as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class TrainingExample:
    """One example's entries, 1-D tensors of L + R (two streams) or L (AR) elements; slots are the entries' own indices.

    Attributes:
        input_ids: Clean tokens, then one mask token for each response token.
        position_ids: A mask has the position of the token that it stands for.
        targets: The token that each entry's logits are trained on, `NO_TARGET` where none. Already shifted.
        offsets: 0 for a clean entry, i ≥ 1 for the i-th mask of its block.
        context_start: See `Visibility`; the slot of the example's first token, 0 unless it was packed behind others.
        context_end: See `Visibility`; a clean entry's own slot, or the start of a mask's block.
        group_start: See `Visibility`; the entry's own slot, or that of the first mask of its block.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    offsets: Tensor
    context_start: Tensor
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
    zeros = torch.zeros_like(tokens)
    return TrainingExample(tokens, positions, targets, zeros, zeros, positions, positions)


def two_stream_example(
    ids: Sequence[int],
    turns: Sequence[tuple[int, int]],
    *,
    block_size: int,
    mask_token_id: int,
    first_block: int | None = None,
) -> TrainingExample:
    """Lay out one example for MARS: the clean stream of `ar_example`, then each response as blocks of masks.

    Args:
        ids: As for `ar_example`.
        turns: As for `ar_example`; every response starts a block of its own.
        block_size: B.
        mask_token_id: The mask token.
        first_block: Size of each response's first block, 1 … B; B by default, as in the paper. Drawn anew for every
            example it trains every position at every offset.

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
        # The first block, if it is shorter, is one whose beginning lies before the response.
        before = 0 if first_block is None else block_size - first_block
        index_in_block = torch.minimum((positions - start + before) % block_size, positions - start)
        targets = torch.full_like(positions, NO_TARGET)
        targets[:-1] = clean.input_ids[start + 1 : end]
        streams.append(
            TrainingExample(
                input_ids=torch.full_like(positions, mask_token_id),
                position_ids=positions,
                targets=targets,
                offsets=index_in_block + 1,
                context_start=torch.zeros_like(positions),
                context_end=positions - index_in_block,
                group_start=slot + torch.arange(end - start) - index_in_block,
            )
        )
        slot += end - start
    return _concatenated(streams)


def pack(examples: Sequence[TrainingExample]) -> TrainingExample:
    """Put examples behind one another in one row. Both streams of each stay apart from all others'; positions restart.

    Example:
        A prompt of one token with a response of two, twice:

        >>> e = two_stream_example([7, 4, 5], [(1, 3)], block_size=2, mask_token_id=0)
        >>> print(collate([pack([e, e])], pad_token_id=9).visibility.picture())
        █·········
        ██········
        ███·······
        █··█······
        █··██·····
        ·····█····
        ·····██···
        ·····███··
        ·····█··█·
        ·····█··██
    """
    shifted = []
    first_slot = 0
    for example in examples:
        slots = {name: getattr(example, name) + first_slot for name in ("context_start", "context_end", "group_start")}
        shifted.append(replace(example, **slots))
        first_slot += len(example)
    return _concatenated(shifted)


def _concatenated(parts: Sequence[TrainingExample]) -> TrainingExample:
    return TrainingExample(*(torch.cat(tensors) for tensors in zip(*(vars(p).values() for p in parts), strict=True)))


class TrainingBatch(TrainingExample):
    """Rows padded to one length on the right: the same fields, (B, T). Padding has no target, sees only itself."""

    @property
    def visibility(self) -> Visibility:
        """Who sees whom in this batch."""
        slot = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        return Visibility(self.context_start, self.context_end, self.group_start, slot)

    @property
    def clean_slot(self) -> Tensor:
        """(B, T), the slot of the clean entry at each entry's position: itself, or the token that a mask stands for."""
        return self.context_start + self.position_ids


def collate(examples: Sequence[TrainingExample], pad_token_id: int, multiple_of: int = 1) -> TrainingBatch:
    """Pad rows to the longest of them, rounded up to a multiple."""
    width = -(-max(len(example) for example in examples) // multiple_of) * multiple_of
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
        context_start=pad("context_start", 0),
        context_end=pad("context_end", 0),
        group_start=pad("group_start", own_slot),
    )


@dataclass(frozen=True)
class StepLayout:
    """One decode step's entries, on the host; every array (rows, W) but the last two.

    Attributes:
        position_ids: Position of each entry.
        context_end: See `Visibility`; a context starts at slot 0.
        group_start: See `Visibility`.
        slot: Where an entry's keys and values are written.
        read: (rows, Q), the entries whose logits are read: from the newest token on, drafts, group 0, group 1, …
        group_read: (rows, K + 1), where in ``read`` the groups begin.
    """

    position_ids: Ints
    context_end: Ints
    group_start: Ints
    slot: Ints
    read: Ints
    group_read: Ints


def decode_layout(cached: Ints, newest: Ints, drafts: Ints, groups: Ints, width: int | None = None) -> StepLayout:
    """Lay out a step: newest tokens and drafts, then a group of masks for each outcome, then padding.

    Entry e of a row that has n tokens cached is written to slot n + e. Real tokens thus stand at slot = position; what
    drafts, masks and padding write past the row's accepted tokens is overwritten by the next step before anything may
    see it. Group j stands for "exactly j drafts are right": its masks follow draft j in position and see no later one.
    Groups share positions, never slots.

    Args:
        cached: (rows,) n, the tokens whose keys and values are cached.
        newest: (rows,) N ≥ 1, accepted tokens that are not cached yet.
        drafts: (rows,) k ≥ 0, drafts behind them.
        groups: (rows, K + 1) masks of each group; none past group k.
        width: W, if more than the widest row needs.
    """
    if width is None and newest.max() == 1 and not drafts.any() and not groups.any():  # AR decoding, far quicker
        own, zero = cached[:, None], np.zeros((len(cached), 1), dtype=np.int64)
        return StepLayout(own, own, own, own, zero, zero + 1)
    real = newest + drafts
    group_end = real[:, None] + groups.cumsum(1)
    group_first = group_end - groups
    width = max(width or 0, int(group_end[:, -1].max()))
    entry = np.arange(width)
    n = cached[:, None]
    slot = n + entry
    is_real = entry < real[:, None]
    is_mask = ~is_real & (entry < group_end[:, -1:])
    # The group of a mask is the number of groups that end at or before it.
    group = np.minimum((entry[:, None] >= group_end[:, None, :]).sum(2), groups.shape[1] - 1)
    index = entry - np.take_along_axis(group_first, group, 1)
    context_end = n + newest[:, None] + group  # one past the last token that a group takes for right
    last_read = int((group_end[:, -1] - newest).max())
    return StepLayout(
        position_ids=np.where(is_mask, context_end + index, np.where(is_real, slot, 0)),
        context_end=np.where(is_mask, context_end, np.where(is_real, slot, 0)),
        group_start=np.where(is_mask, slot - index, slot),
        slot=slot,
        read=np.minimum(newest[:, None] - 1 + np.arange(last_read + 1), width - 1),
        group_read=group_first - newest[:, None] + 1,
    )
