"""Read a YAML file into a frozen model; refuse nonsense by its path, its line and the nearest right key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from tidegate.errors import PolicyError
from tidegate.spec.policy import Policy

M = TypeVar("M", bound=BaseModel)

_UNIT = re.compile(r"_(s|ms|m|min|h|sec|secs|seconds|minutes|hours|bytes|kb|mb|gb|celsius|c|f|usd|eur)$")


def load_policy(path: Path) -> Policy:
    """Read `policy.yaml`.

    Raises:
        PolicyError: with one line for each thing that is wrong: `file:line: path: what; hint`.
    """
    return load_model(path, Policy)


def load_model(path: Path, model: type[M]) -> M:
    """Read any YAML file into `model`, with the same errors as `load_policy`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError((f"{path}: cannot be read: {error.strerror}",)) from None
    return parse_model(text, model, name=str(path))


def parse_model(text: str, model: type[M], name: str = "policy.yaml") -> M:
    """As `load_model`, from text. `name` stands before each problem."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        raise PolicyError((f"{where}: not YAML: {getattr(error, 'problem', None) or error}",)) from None
    twice = tuple(_keys_given_twice(root, name)) if root is not None else ()
    if twice:
        raise PolicyError(twice)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise PolicyError((f"{name}:1: must be a mapping of settings, got {_shown(values)}",))
    try:
        # JSON mode of strictness: a YAML list may fill a tuple, yet "5" is no number and 1 is no truth value.
        return TypeAdapter(model).validate_python(_tuples(values))
    except ValidationError as error:
        problems = tuple(_problem(name, root, model, dict(item)) for item in error.errors())
        raise PolicyError(problems) from None


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _problem(name: str, root: yaml.Node | None, model: type[BaseModel], item: Mapping[str, Any]) -> str:
    path = tuple(part for part in item["loc"] if isinstance(part, str | int))
    line = _line_of(root, path)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    where = f"{name}:{line}: {dotted}" if dotted else f"{name}:{line}"
    if item["type"] == "extra_forbidden":
        return f"{where}: no such key{_nearest(model, path)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{where}: missing; it has no default"
    if item["type"].endswith("_error"):  # our own validators
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]}, got {_shown(item.get('input'))}"


def _nearest(model: type[BaseModel], path: tuple[str | int, ...]) -> str:
    owner = _model_at(model, path[:-1])
    wrong = str(path[-1])
    known = list(owner.model_fields) if owner is not None else []
    bare = _UNIT.sub("", wrong)
    same_without_unit = [key for key in known if _UNIT.sub("", key) == bare]
    near = same_without_unit or difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if same_without_unit and near[0] != wrong:
        unit = near[0][len(_UNIT.sub("", near[0])) + 1 :]
        names = {"s": "seconds", "celsius": "°C", "usd": "US dollars", "bytes": "bytes"}
        return f"; the unit stands in the name: `{near[0]}`, in {names.get(unit, unit)}"
    if near:
        return f"; did you mean `{near[0]}`?"
    return f"; known here: {', '.join(sorted(known))}" if known else ""


def _model_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    here: Any = model
    for part in path:
        if isinstance(part, int):
            models = [arg for arg in get_args(here) if isinstance(arg, type) and issubclass(arg, BaseModel)]
            here = models[0] if models else None
        else:
            field = getattr(here, "model_fields", {}).get(part)
            here = field.annotation if field is not None else None
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _line_of(root: yaml.Node | None, path: tuple[str | int, ...]) -> int:
    """The line (from 1) of the deepest part of `path` that the file has."""
    node, line = root, 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _keys_given_twice(node: yaml.Node, name: str) -> Iterator[str]:
    """YAML lets the last one win in silence; a setting that somebody wrote must not vanish."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                yield f"{name}:{line}: {key.value}: given twice, first in line {lines[key.value]}"
            lines[key.value] = line
            yield from _keys_given_twice(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _keys_given_twice(item, name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
