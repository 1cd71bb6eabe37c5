"""What estimated costs depend on in a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from liveroll.config_checks import check_whole, naming_unknown_options
from liveroll.errors import ConfigError


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """The attention layers of a model, as cost formulas count them.

    Where layers differ, a tuple gives the number of each layer, and the formulas add up over layers. Under tensor
    parallelism the heads are those that this process computes.

    Args:
        layers: attention layers.
        query_heads: query heads of a layer.
        kv_heads: key and value heads of a layer.
        head_dim: elements of a key, and of a value; the mean of the two where they differ.
        element_bytes: bytes of one element of keys and values.

    Raises:
        ConfigError: a number is not positive, or a tuple does not have one for each layer.
    """

    layers: int
    query_heads: int | tuple[int, ...]
    kv_heads: int | tuple[int, ...]
    head_dim: int | tuple[int, ...]
    element_bytes: int

    def __post_init__(self) -> None:
        check_whole(self, "layers", low=1)
        check_whole(self, "element_bytes", low=1)
        for name in ("query_heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, _one_each(self, name, tuple(value)))
            else:
                check_whole(self, name, low=1)

    @property
    def query_width(self) -> int:
        """Elements of a token's queries over all layers: layers · query_heads · head_dim where layers are alike."""
        return self._width(self.query_heads)

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys over all layers: layers · kv_heads · head_dim where layers are alike."""
        return self._width(self.kv_heads)

    def _width(self, heads: int | tuple[int, ...]) -> int:
        if isinstance(heads, int) and isinstance(self.head_dim, int):
            return self.layers * heads * self.head_dim
        counts = (heads,) * self.layers if isinstance(heads, int) else heads
        sizes = (self.head_dim,) * self.layers if isinstance(self.head_dim, int) else self.head_dim
        return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _one_each(geometry: ModelGeometry, name: str, values: tuple[Any, ...]) -> int | tuple[int, ...]:
    """One number where all layers have the same, so that equal shapes are equal geometries."""
    good = all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values)
    if not good or len(values) != geometry.layers:
        raise ConfigError(
            f"ModelGeometry.{name} must be a whole number of at least 1, or one for each of {geometry.layers} "
            f"layers, not {values!r}"
        )
    return values[0] if len(set(values)) == 1 else values
