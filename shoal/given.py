"""Values that users give by name, in a file of settings or with --set."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from shoal.errors import SettingsContradict

_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}


def fitted(values: Mapping[str, Any], of: type, names: Collection[str], where: str) -> dict[str, Any]:
    """The values as the fields of the dataclass `of` take them: a number is text where text is wanted. Fails with
    SettingsContradict for a name that is not one of `names`, and for a value of another type than its field has."""
    hints = typing.get_type_hints(of)
    found = {}
    for name, value in values.items():
        if name not in names:
            raise SettingsContradict(f"{where} has {name!r}; there are {', '.join(sorted(names))}")
        kinds = _kinds(hints[name])
        if str in kinds and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not any(_fits(value, kind) for kind in kinds):
            allowed = " or ".join(_SAID.get(kind, str(kind)) for kind in kinds if kind is not types.NoneType)
            raise SettingsContradict(f"{where} has {name} = {value!r}; write {allowed}")
        found[name] = value
    return found


def _kinds(hint: Any) -> tuple[Any, ...]:
    """A union's members; of a Literal, the words that it allows; dict for any kind of dict."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union, typing.Literal):
        return typing.get_args(hint)
    return (typing.get_origin(hint) or hint,)


def _fits(value: Any, kind: Any) -> bool:
    if not isinstance(kind, type):
        return bool(value == kind)
    if kind is float:
        kind = (int, float)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
