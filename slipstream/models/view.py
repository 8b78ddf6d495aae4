"""What a model or drafter may see of the cache: its own layers' memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slipstream.kernels.types import GdnState, PagedKV


class CacheView(Protocol):
    """The cache as models and drafters know it; `engine.cache.Cache` is one."""

    table: Tensor  # [slots, pages per sequence] int64

    def paged(self, layer: int) -> PagedKV:
        """Keys and values of a layer declared as `Paged`."""
        ...

    def gdn(self, layer: int) -> GdnState:
        """State and rings of a layer declared by `stores.gated_delta`."""
        ...

    def fields(self, layer: int) -> dict[str, Tensor]:
        """Tensors of a layer declared as `PerSlot`, by name."""
        ...
