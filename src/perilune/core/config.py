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
from perilune.core.text import has_half_pair

LARGEST = 2**63
"""What whole numbers stay below: tensors and files count no further."""
DEEPEST = 100
"""How deep values may be nested: no configuration goes further, and what walks through them stays on the stack."""


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
        _check_plain(values, where=cls.__name__)
        return _build(cls, values, where="")

    def override(self, assignments: Iterable[str]) -> Self:
        """A copy changed by `key=value` strings; keys may be dotted, lists take an index, values are JSON or text."""
        values = self.to_dict()
        for text in assignments:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text}: expected key=value, got no '='; write for example {text}=1")
            _assign(values, key, value)
        return type(self).from_dict(values)


def require(holds: bool, name: str, expected: str, got: Any, advice: str) -> None:
    """Raises ConfigError about `name` unless it `holds`: how a configuration checks itself."""
    if not holds:
        raise ConfigError(f"{name}: expected {expected}, got {got}; {advice}")


def _assign(values: Any, key: str, text: str) -> None:
    """Puts what `text` means at the dotted `key` of nested dicts and lists."""
    *path, last = key.split(".")
    for i, part in enumerate(path):
        values = values[_index(values, part, key, path[:i])]
    index = _index(values, last, key, path)
    values[index] = _parse(text, instead_of=values[index])


def _index(values: Any, part: str, key: str, path: list[str]) -> Any:
    """`part` as a key of the dict or an index of the list `values`, which is found at `path`."""
    if isinstance(values, list):
        if not part.isdecimal() or int(part) >= len(values):
            raise ConfigError(f"{key}: expected an index below {len(values)}, got {part!r}; there is no such item")
        return int(part)
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{key}: {'.'.join(path)} has no parts; assign to it as a whole")
    if part not in values:
        raise ConfigError(f"{key}: unknown key {part!r}; {nearest(part, values)}")
    return part


def _parse(text: str, instead_of: Any) -> Any:
    """The value `text` spells; where it replaces text, `512` and `true` are text too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # thousands of digits among them
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return text if isinstance(instead_of, str) and not isinstance(value, str) else value


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Raises ConfigError for what JSON can spell and no configuration can hold, wherever it is in `value`."""
    require(depth <= DEEPEST, where, f"at most {DEEPEST} values in one another", "more", "nest them less")
    if isinstance(value, str):
        require(not has_half_pair(value), where, "text", f"half of a surrogate pair in {value!r}", "write it as UTF-8")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(key, where, depth)
            _check_plain(inner, str(key) if depth == 0 else f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{where}.{i}", depth + 1)


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        what = where.removesuffix(".") or cls.__name__
        raise ConfigError(f"{what}: expected an object, got {values!r}; write key: value pairs")
    types_of = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}{key}: unknown key for {cls.__name__}; {nearest(str(key), known)}")
    missing = [name for name, field in known.items() if name not in values and _is_required(field)]
    if missing:
        raise ConfigError(f"{where}{missing[0]}: expected a value, got none ({len(missing)} missing); give one")
    converted = {key: _convert(types_of[key], value, f"{where}{key}") for key, value in values.items()}
    try:
        return cls(**converted)
    except ConfigError as error:  # the class knows its own key, not the way to it
        raise ConfigError(f"{where}{error}") from None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, turned into the type `hint`; ConfigError where it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is typing.Literal:
        require(value in args, where, f"one of {', '.join(map(repr, args))}", repr(value), "choose one of them")
        return value
    if origin in (tuple, list):
        return _convert_list(origin, args, value, where)
    if origin is dict:
        require(isinstance(value, Mapping), where, "an object", repr(value), "write key: value pairs")
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _build(hint, value, where + ".")
    if isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < LARGEST, where, "a whole number below 2^63", value, "no size or length is larger")
        if hint is float:
            return float(value)
    fits = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    require(fits, where, hint.__name__, repr(value), "give a value of that type")
    return value


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """`value` as the first of the types that takes it; None where the union allows it."""
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:  # X | None: what is wrong with an X says more
        return _convert(options[0], value, where)
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}: expected {' or '.join(map(_spell, options))}, got {value!r}; choose one of them")


def _spell(hint: Any) -> str:
    return " or ".join(map(repr, typing.get_args(hint))) or hint.__name__


def _convert_list(kind: Any, args: tuple[Any, ...], value: Any, where: str) -> Any:
    """A list of any length (`list[X]`, `tuple[X, ...]`), or a tuple with a type for every place."""
    require(isinstance(value, (list, tuple)), where, "a list", repr(value), "write [a, b, ...]")
    if kind is tuple and args[-1] is not Ellipsis:
        require(len(args) == len(value), where, f"{len(args)} items", len(value), f"give exactly {len(args)}")
        return tuple(_convert(a, v, f"{where}.{i}") for i, (a, v) in enumerate(zip(args, value)))
    return kind(_convert(args[0], v, f"{where}.{i}") for i, v in enumerate(value))
