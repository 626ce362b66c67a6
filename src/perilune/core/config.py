"""Configurations: frozen, keyword-only dataclasses that check themselves when built and never guess.

    @dataclass(frozen=True, kw_only=True)
    class Optim(Config):
        lr: float = 1e-2

`from_dict` refuses unknown keys, `override` takes `stages.0.lr=3e-3` from a command line, `to_dict` gives plain JSON.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

from perilune.core.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The base of every configuration."""

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration with these values; raises ConfigError on an unknown key or a value of the wrong type."""
        return _build(cls, values, where="")

    def override(self, assignments: Iterable[str]) -> Self:
        """A copy changed by `key=value` strings; keys may be dotted, lists take an index, values are JSON or text."""
        values = self.to_dict()
        for text in assignments:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text}: expected key=value, got no '='; write for example {text}=1")
            _assign(values, key.split("."), _parse(value), key)
        return type(self).from_dict(values)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(values, list):
            if not part.isdigit() or int(part) >= len(values):
                raise ConfigError(
                    f"{key}: expected an index from 0 to {len(values) - 1}, got {part!r}; there is no such item"
                )
            index: Any = int(part)
        elif isinstance(values, dict):
            if part not in values:
                raise ConfigError(f"{key}: unknown key {part!r}; {nearest(part, values)}")
            index = part
        else:
            raise ConfigError(f"{key}: {'.'.join(path[:i])} has no parts; assign to it as a whole")
        if last:
            values[index] = value
        else:
            values = values[index]


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or cls.__name__}: expected an object, got {values!r}; write key: value pairs")
    types_of = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}{key}: unknown key for {cls.__name__}; {nearest(str(key), known)}")
    fields = {key: _convert(types_of[key], value, f"{where}{key}") for key, value in values.items()}
    try:
        return cls(**fields)
    except TypeError as error:  # a required field is missing
        raise ConfigError(f"{where or cls.__name__}: {error}".replace("__init__() ", "")) from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, turned into the type `hint`; ConfigError where it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        for option in rest:
            try:
                return _convert(option, value, where)
            except ConfigError:
                if option is rest[-1]:
                    raise
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(
                f"{where}: expected one of {', '.join(map(repr, args))}, got {value!r}; choose one of them"
            )
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}; write [a, b, ...]")
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if len(args) != len(value):
                raise ConfigError(f"{where}: expected {len(args)} items, got {len(value)}; give exactly {len(args)}")
            return tuple(_convert(a, v, f"{where}.{i}") for i, (a, v) in enumerate(zip(args, value)))
        return origin(_convert(args[0], v, f"{where}.{i}") for i, v in enumerate(value))
    if origin is dict:
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _build(hint, value, where + ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}; give a value of that type")
    return value
