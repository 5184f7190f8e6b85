"""Key/value caches for rows that advance independently.

`RowCache` keeps a place for each row. Where a step's entries are written (slots), how far attention looks, and who
sees whom are the caller's (`layout`, `masking`); the cache itself knows no lengths, so nothing is ever cropped: what
lies past a row's real tokens is overwritten by the step that could first see it.

Storage is (places, slots, kv_heads, head_dim), slots before heads: one entry's keys are one contiguous piece, so a
step's writes are a single `index_copy_` a layer, and what attention reads is a view. Nothing is copied in a step.
Sliding-window and linear-attention layers are not handled; `model.check_decodable` refuses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SMALLEST_BUFFER = 64  # slots; doubling from here on


class _Plan:
    """One step's writes and reads, shared by all layers."""

    def __init__(self) -> None:
        self.places = slice(0, 0)
        self.flat_slots = torch.empty(0, dtype=torch.long)  # (rows · entries,), place · capacity + slot
        self.num_slots = 0


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, plan: _Plan, places: int, capacity: int) -> None:
        super().__init__()
        self.plan = plan
        self.places = places
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the device and in the dtype of the first keys and values, (rows, kv_heads, entries, head_dim)."""
        # Zeros and not empty: a masked slot is multiplied by zero in attention, and zero times a stray NaN is NaN.
        self.keys = self._zeros_like(key_states)
        self.values = self._zeros_like(value_states)
        self.is_initialized = True

    def _zeros_like(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.places, self.capacity, states.shape[1], states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values, (rows, kv_heads, entries, head_dim); return views with all slots to read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        plan = self.plan
        entries = states.transpose(1, 2).flatten(0, 1)
        buffer.view(-1, *buffer.shape[2:]).index_copy_(0, plan.flat_slots, entries)
        return buffer[plan.places, : plan.num_slots].transpose(1, 2)

    def grow(self, places: int, capacity: int) -> None:
        """Move to larger buffers."""
        old_places, old_capacity = self.places, self.capacity
        self.places, self.capacity = places, capacity
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(places, capacity, *old.shape[2:])
            new[:old_places, :old_capacity] = old
            setattr(self, name, new)

    def copy_place(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one place over another's."""
        if self.is_initialized:
            self.keys[target, :length] = self.keys[source, :length]
            self.values[target, :length] = self.values[source, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What transformers asks when it builds a mask itself: slots to read, and the first of them."""
        return self.plan.num_slots, 0

    def get_seq_length(self) -> int:
        """Slots that the current step reads."""
        return self.plan.num_slots

    def get_max_length(self) -> int:
        """Slots allocated a row."""
        return self.capacity


class RowCache(Cache):
    """A cache with a place for each row and a length for each row.

    Call `begin_step` before every forward pass, and pass the model a mask and position ids of your own.

    Args:
        num_layers: Attention layers of the model.
        places: Rows to allocate for at first; grows by doubling.
    """

    def __init__(self, num_layers: int, places: int = 1) -> None:
        self.plan = _Plan()
        self.places = places
        self.capacity = SMALLEST_BUFFER
        self.row_layers = [RowLayer(self.plan, places, self.capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def begin_step(self, places: slice, slots: Tensor, num_slots: int) -> None:
        """Say what the next forward pass writes and reads.

        Args:
            places: The rows that take part, neighbours in the cache.
            slots: (rows, entries), where each entry's keys and values go.
            num_slots: Slots that attention reads a row; at least the largest slot + 1.
        """
        self._reserve(places.stop, num_slots)
        first_slot = torch.arange(places.start, places.stop, device=slots.device)[:, None] * self.capacity
        self.plan.places = places
        self.plan.flat_slots = (first_slot + slots).flatten()
        self.plan.num_slots = num_slots

    def _reserve(self, places: int, capacity: int) -> None:
        if places <= self.places and capacity <= self.capacity:
            return
        while self.places < places:
            self.places *= 2
        while self.capacity < capacity:
            self.capacity *= 2
        for layer in self.row_layers:
            layer.grow(self.places, self.capacity)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Move a row of ``length`` cached tokens to another place, so that the rows in use stay neighbours."""
        for layer in self.row_layers:
            layer.copy_place(source, target, length)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(t.nbytes for layer in self.row_layers if layer.is_initialized for t in (layer.keys, layer.values))
