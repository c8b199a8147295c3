"""The registry class of datasets, partitions, models, methods and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from fedprism.errors import ConfigError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to objects; an unknown name is an error that suggests the closest known one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers its object under `name`; a name can be registered once."""

        def add(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.kind} {name!r} is registered twice; choose another name.")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise ConfigError(unknown(self.kind, name, self._items))
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def items(self) -> list[tuple[str, T]]:
        return list(self._items.items())
