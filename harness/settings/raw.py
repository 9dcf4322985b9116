"""Reads settings before they are validated: YAML text and `path=value` overrides."""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .errors import SpecError
from .paths import flat

MAX_BYTES, MAX_DEPTH = 100_000, 50  # of a file
MAX_INTEGER = 2**53  # doubles (and so MLflow and JSON in JavaScript) round larger ones
_TAGS = {None, *(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))}


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`path=value` strings as a mapping; values are read as YAML (`true`, `0.1`, `[1, 2]`, text). `@FILE` stands for
    all settings of a YAML file, nested or by path."""
    result: dict[str, Any] = {}
    for item in items:
        if item.startswith("@"):
            read = read_yaml(path := Path(item[1:]))
            if not isinstance(read, Mapping):
                rule = f"@{path}: the file must hold settings, such as engine: vllm"
                raise SpecError(f"{rule}, got {type(read).__name__}")
            result |= flat(read)
            continue
        path, equals, value = item.partition("=")
        if not equals or not path.strip():
            raise SpecError(f"a setting must be path=value, got '{item}'; for example algorithm.kl_beta=0.01")
        try:
            result[path.strip()] = _Loader(value).get_single_data()
        except yaml.YAMLError as error:
            fix = f"quote a text, as in '{path.strip()}=\"...\"'"
            raise SpecError(f"{path.strip()}: the value is not valid YAML: {_words(error)}; {fix}") from None
    return result


def differences(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, then, now) of each setting that differs between two mappings."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            yield from differences(then.get(key, "absent"), now.get(key, "absent"), f"{path}.{key}".lstrip("."))
    elif then != now:
        yield path, str(then), str(now)


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any], whole: Sequence[str] = ()) -> dict[str, Any]:
    """A deep copy of `raw` with each dotted path set.

    `whole` names mappings whose keys may contain dots: the rest of a path below them is one key. A plain value with a
    path below it becomes the mapping that it stands for: text names a plugin, a number in `rewards` is a weight. A
    number for a reward changes only its weight. A stage is the key that its name says.
    """
    result = deepcopy(dict(raw))
    for dotted, value in overrides.items():
        start = next((name for name in whole if dotted.startswith(f"{name}.")), "")
        keys = [*start.split("."), dotted.removeprefix(f"{start}.")] if start else dotted.split(".")
        *above, last = keys
        if len(keys) > MAX_DEPTH:
            raise SpecError(f"a path must have at most {MAX_DEPTH} keys, got {len(keys)}: '{dotted[:40]}...'")
        node: Any = result
        for depth, key in enumerate(above, start=1):
            if isinstance(node, list):  # of stages or tests, by their names
                node = next((one for one in node if isinstance(one, dict) and one.get("name") == key), None)
                if node is None:
                    raise SpecError(f"'{dotted}': {'.'.join(above[: depth - 1])} has none that is called '{key}'")
                continue
            child, holders = node.get(key), dict if depth == len(above) else dict | list  # whose items have names
            if isinstance(child, str):
                child = {"name": child}
            elif above[0] == "rewards" and depth == 2 and is_number(child):
                child = {"weight": child}
            elif child is not None and not isinstance(child, holders):
                raise SpecError(f"'{dotted}': '{'.'.join(above[:depth])}' is {child!r}, which has no keys")
            node[key] = {} if child is None else child
            node = node[key]
        old = node.get(last)
        if above == ["rewards"] and isinstance(old, dict) and is_number(value):
            value = {**old, "weight": value}
        node[last] = deepcopy(value)  # later paths may change it
    return result


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_yaml(path: Path) -> Any:
    """The content of a YAML (or JSON) file; SpecError for a file that is missing, malformed or too large, or repeats a
    key."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    if len(content) > MAX_BYTES:
        raise SpecError(f"{path}: a file of settings must have at most {MAX_BYTES:,} bytes, got more; shorten it")
    try:
        return _Loader(content.decode()).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {_words(error)}") from None


def _words(error: Exception) -> str:
    """The error in one line, with the line number in the file."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"line {error.problem_mark.line + 1}: {error.problem}"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, restricted to JSON-like values: a date is text, and sets and bytes are errors. It refuses
    aliases, with which small files expand to large values, and repeated keys, of which PyYAML would take the last."""

    yaml_constructors: ClassVar[Any] = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in _TAGS
    }
    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise _marked("an alias (*) is not read; write out the value that it stands for", mark)
        if self._depth >= MAX_DEPTH:
            raise _marked(f"must be nested at most {MAX_DEPTH} deep, got more", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                raise _marked(f"key '{key.value}' is already in line {lines[key.value]}; remove one", key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, ArithmeticError):  # from a tag such as !!int, or a number with too many digits
            raise _marked(f"must match its YAML tag, got {_short(node)}", node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 100 or abs(value := super().construct_yaml_int(node)) > MAX_INTEGER:
            rule = f"a whole number must be from -2^53 to 2^53 ({MAX_INTEGER}), because doubles round others"
            raise _marked(f"{rule}, got {_short(node)}; use a smaller one", node.start_mark)
        return value


def _short(node: yaml.Node) -> str:
    text = str(node.value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text):,} characters)"


def _marked(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
