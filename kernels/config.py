"""What all kernel configs share: frozen, tagged with their GPU generation, JSON round trip."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, ClassVar, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every kernel's config.  `generation` is the tag; two generations never share a config type."""

    generation: ClassVar[str]
    kernel: ClassVar[str]

    def __post_init__(self) -> None:
        """ValueError for a value of another type than its field's, which would show up far from here."""
        for name, allowed in _types(type(self)):
            value = getattr(self, name)
            # JSON's 1 is a float where one is asked for; True is no number, though Python has bool below int.
            if type(value) not in allowed and not (type(value) is int and float in allowed):
                wanted = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
                raise ValueError(f"{type(self).__name__}: {name}={value!r} is not of type {wanted}")

    def to_json(self) -> dict[str, Any]:
        """Plain data with the tag."""
        return {"generation": self.generation, "kernel": self.kernel, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The config that `to_json` gave; ValueError for another kernel's, another generation's or an unknown field."""
        fields = dict(data)
        tag = (fields.pop("generation", None), fields.pop("kernel", None))
        if tag != (cls.generation, cls.kernel):
            raise ValueError(
                f"a config of {tag[1]} for {tag[0]}; {cls.__name__} is for {cls.kernel} on {cls.generation}"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = set(fields) - set(known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}; it has {', '.join(known)}")
        return cls(**fields)


@functools.cache
def _types(cls: type[Config]) -> list[tuple[str, tuple[type, ...]]]:
    """The fields of plain types, and which."""
    hints = typing.get_type_hints(cls)
    fields = [(f.name, typing.get_args(hints[f.name]) or (hints[f.name],)) for f in dataclasses.fields(cls)]
    plain = (int, float, bool, str, type(None))
    return [(name, allowed) for name, allowed in fields if all(t in plain for t in allowed)]
