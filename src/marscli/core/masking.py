"""Who sees whom, for training and for decoding alike.

Everything MARS lets a token see is two ranges of key slots: a *context* of real tokens, and the token's own *group* up
to itself. One predicate, two layouts (`layout`):

==========================  ==============================  =====================================
query                       context                         group
==========================  ==============================  =====================================
real token at position i    real tokens at positions < i    itself
mask, in a block or group   real tokens at positions < s,   the masks of its own block up to itself
that starts at position s
padding                     nothing                         itself (a row that sees nothing is NaN)
==========================  ==============================  =====================================

The dense mask, the flex `BlockMask` and the printed picture all derive from `Visibility.sees`. What a slot holds, and
at which position, is the layout's business and not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The two ranges of key slots that each query sees; all tensors are integer, (B, T).

    Attributes:
        context_start: First slot of the context.
        context_end: One past the last slot of the context.
        group_start: First slot of the query's own group.
        slot: The query's own slot, the last of its group that it sees.

    Example:
        One example of 3 tokens with a response of 2 (positions 1, 2), as one block of masks in slots 3 and 4:

        >>> ranges = [[0, 0, 0, 0, 0]], [[0, 1, 2, 1, 1]], [[0, 1, 2, 3, 3]], [[0, 1, 2, 3, 4]]
        >>> print(Visibility(*map(torch.tensor, ranges)).picture())
        █····
        ██···
        ███··
        █··█·
        █··██
    """

    context_start: Tensor
    context_end: Tensor
    group_start: Tensor
    slot: Tensor

    @staticmethod
    def sees(context_start: Tensor, context_end: Tensor, group_start: Tensor, slot: Tensor, key_slot: Tensor) -> Tensor:
        """The predicate: whether a query sees a key slot. Shapes broadcast; bool."""
        in_context = (key_slot >= context_start) & (key_slot < context_end)
        in_group = (key_slot >= group_start) & (key_slot <= slot)
        return in_context | in_group

    @property
    def _ranges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.context_start, self.context_end, self.group_start, self.slot

    def dense(self, num_slots: int | None = None) -> Tensor:
        """The mask for SDPA.

        Args:
            num_slots: S, the number of key slots; by default T, as many as there are queries.

        Returns:
            bool (B, 1, T, S), True where the query may look.
        """
        num_slots = self.slot.shape[1] if num_slots is None else num_slots
        key_slot = torch.arange(num_slots, device=self.slot.device)
        start, end, group, slot = (r[:, None, :, None] for r in self._ranges)
        return self.sees(start, end, group, slot, key_slot)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The predicate in flex attention's form, ``(batch, head, query, key) -> bool``."""

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            start, end, group, slot = (r[batch, query] for r in self._ranges)
            return self.sees(start, end, group, slot, key)

        return mask_mod

    def block_mask(self, num_slots: int | None = None) -> torch.nn.attention.flex_attention.BlockMask:
        """The mask for flex attention, sparse by blocks of 128 x 128; same arguments as `dense`."""
        from torch.nn.attention.flex_attention import create_block_mask

        rows, queries = self.slot.shape
        num_slots = queries if num_slots is None else num_slots
        return create_block_mask(self.mask_mod(), rows, None, queries, num_slots, device=str(self.slot.device))

    def picture(self, row: int = 0, num_slots: int | None = None) -> str:
        """One row's mask for people to look at: a line a query, a column a key slot, ``█`` where it sees."""
        seen = self.dense(num_slots)[row, 0].tolist()
        return "\n".join("".join("█" if see else "·" for see in line) for line in seen)
