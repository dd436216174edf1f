"""Find out what JSON documents consist of: the kinds of values at every path, and their encoding.

A path names the position of values in all documents: ``$`` is the document, ``$.atoms[].charge``
the key ``charge`` of every element of the list at the key ``atoms``.
"""

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch

_KIND_OF_CLASS: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "number", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
_KINDS = tuple(dict.fromkeys(_KIND_OF_CLASS.values()))
_READOUTS = ["+".join(each) for n in (1, 2, 3) for each in permutations(("mean", "max", "sum"), n)]
# The kinds of values that each choice is about.
_CHOICES = {
    **{"number": ("number",), "categories": ("number", "string"), "text": ("string",)},
    **dict.fromkeys(_READOUTS, ("array",)),
    **{"like": _KINDS, "ignore": _KINDS},
}
LARGEST = 1e150
# Pieces of the texts at a path that have vectors; the rarest of more are left out.
_MAX_PIECES = 2**14
# With more different values, they are not categories.
_MAX_CATEGORIES = 100
_MAX_LEVELS = 64
_MAX_BITS = 64  # of the length of a list


def kind_of(value: Any, where: object = "") -> str:
    """Return the kind of a JSON value; raise an error for anything else."""
    kind = _KIND_OF_CLASS.get(type(value), "")
    if not kind or (kind == "number" and not abs(value) <= LARGEST):
        expected = f"null, true, false, a string, array, object, or number up to {LARGEST:.0e}"
        got = "a larger number, or NaN" if kind else type(value).__name__
        raise mismatch(ValueError, "the value cannot be used", expected, got, where=where)
    return kind


def category_of(value: Any) -> str:
    """Return the name of a category, which distinguishes 1, "1" and true, but not 1 and 1.0."""
    zero = isinstance(value, float) and not value  # of either sign
    return json.dumps(0 if zero else value).removesuffix(".0")


def pieces_of(text: str) -> list[str]:
    """Return the names of a text, of its words and of their trigrams, as often as they occur."""
    words = text.lower().split()
    marked = [(f"<{word}>", len(word)) for word in words]
    trigrams = [f"*{word[n : n + 3]}" for word, length in marked for n in range(length)]
    return [f"={text.lower()}", *(f"~{word}" for word in words), *trigrams]


def step_to(key: Any) -> str:
    """Return the part of a path that names a key."""
    return f".{key}" if str(key).isidentifier() else f"[{json.dumps(key)}]"


@dataclass
class Node:
    """The values at one path: how many there are, and how each kind is encoded."""

    path: str
    count: int
    missing: int  # objects that lack this key
    kinds: dict[str, dict[str, Any]]
    ignored: bool = False

    def children(self) -> Iterator[tuple[str, str]]:
        """Iterate over the paths inside, and the paths of the nodes that describe their values."""
        for how in self.kinds.values():
            for key, path in how.get("fields", {}).items():
                yield self.path + step_to(key), path
            if "element" in how:
                yield f"{self.path}[]", how["element"]

    def lines(self) -> Iterator[str]:
        """Describe each kind of values in one line."""
        missing = f"missing in {self.missing:,} of {self.count + self.missing:,}"
        for kind, how in self.kinds.items() or [("ignored" if self.ignored else "nothing", {})]:
            notes = [_NOTES[key](value) for key, value in how.items() if key in _NOTES]
            yield f"{kind:<8} {'; '.join(notes + [missing] * (self.missing > 0))}".strip()
        yield from (f"{name} is like {path}" for name, path in self.children() if name != path)

    def features(self, documents: int) -> Iterator[tuple[str, float]]:
        """Iterate over the names of all that is counted at this path, and their weights."""
        for kind, how in self.kinds.items():
            for name, number in how.get("pieces", {}).items():
                yield name, 1 + math.log((1 + documents) / (1 + number))
            names = [kind, *how.get("categories", ())]
            names += ["mean", *(f"near {n / 2}" for n in range(-6, 7))] * ("deviation" in how)
            names += [f"length {n}" for n in range(_MAX_BITS)] * (kind == "array")
            yield from ((name, 1.0) for name in names)

    def counted(self, value: Any) -> list[str]:
        """Return the names of what is counted in a value: itself, words, size or length."""
        kind = kind_of(value)
        how = self.kinds[kind]
        if "pieces" in how:
            return pieces_of(value)
        if kind == "array":
            return [f"length {len(value).bit_length()}"]
        names = [category_of(value)] if "categories" in how else []
        if scale := self.scale_of(value):  # in halves of the deviation
            distance = min(max((value - scale[0]) / scale[1], -3.0), 3.0)
            names.append(f"near {round(2 * distance) / 2}")
        return names or [kind]

    def scale_of(self, value: Any) -> tuple[float, float] | None:
        """Return mean and deviation of the numbers here, if the value is one of them."""
        how = self.kinds.get("number", {}) if kind_of(value) == "number" else {}
        return (how["mean"], how["deviation"]) if "deviation" in how else None


def _names(known: list[str]) -> str:
    return f"categories ({len(known)}): {', '.join(known[:4])}{', …' * (len(known) > 4)}"


_NOTES = {
    "mean": "mean {:.4g}".format,
    "deviation": "deviation {:.4g}".format,
    "categories": _names,
    "pieces": lambda pieces: f"texts, words and trigrams: {len(pieces):,}",
    "readout": "{} of its elements".format,
    "fields": lambda fields: f"keys: {len(fields)}",
}


class Part(NamedTuple):
    """One value inside a document."""

    path: str  # such as $.atoms[3].charge
    schema_path: str  # such as $.atoms[].charge
    value: Any
    owner: Any = None  # the object or list that holds the value
    key: Any = None
    problem: str = ""  # why the schema does not know it

    def inside(self, step: str, schema_path: str, key: Any) -> "Part":
        """Return a value directly inside this one."""
        return Part(self.path + step, schema_path, self.value[key], self.value, key)


@dataclass
class DocumentSchema:
    """What JSON documents consist of; ``str(schema)`` lists all paths with their encodings."""

    nodes: dict[str, Any]  # Node by path
    documents: int
    version: int = 2  # of the encoding

    @classmethod
    def infer(
        cls, documents: Iterable[tuple[str, Any]], overrides: Mapping[str, str] | None = None
    ) -> "DocumentSchema":
        """Infer a schema from documents, given with their places for messages."""
        inference, count = _Inference(dict(overrides or {})), 0
        for place, document in documents:
            try:
                inference.add(document)
            except ValueError as error:
                error.add_note(f"  document: {place}")
                raise
            count += 1
        if not count:
            what = "from_examples: there are no documents"
            raise mismatch(ValueError, what, "at least one example", 0)
        return cls(inference.nodes(), count)

    def walk(self, document: Any) -> Iterator[Part]:
        """Iterate over the parts of a document that are not ignored, outer ones first."""
        left = deque([Part("$", "$", document)])
        while left:
            part = left.popleft()
            node = self.nodes.get(part.schema_path)
            if node is not None and node.ignored:
                continue
            kind = kind_of(part.value, part.path)
            if node is None or kind not in node.kinds:
                known = " or ".join(node.kinds) or "nothing" if node else ""
                yield part._replace(problem=f"{kind}, expected {known}" if node else "unknown key")
                continue
            yield part
            how = node.kinds[kind]
            if kind == "array":
                numbers = range(len(part.value))
                left += (part.inside(f"[{n}]", how["element"], n) for n in numbers)
            for key in part.value if kind == "object" else ():
                step = step_to(key)
                left.append(part.inside(step, how["fields"].get(key, part.schema_path + step), key))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "DocumentSchema":
        """Build a schema from the result of :meth:`as_dict`."""
        if (version := plain.get("version", 1)) != cls.version:
            what = "the schema of documents was saved by another version of pyg_dynbatch"
            hint = "train again; its weights belong to another network"
            raise mismatch(ValueError, what, f"version {cls.version}", version, hint=hint)
        nodes = {path: Node(**node) for path, node in plain["nodes"].items()}
        return cls(nodes, plain["documents"])

    def __str__(self) -> str:
        width = min(48, max(map(len, self.nodes)))
        pairs = [(path, line) for path, node in self.nodes.items() for line in node.lines()]
        lines = [f"{path:<{width}}  {line}" for path, line in pairs]
        return "\n".join([f"{self.documents:,} documents", *lines])


class _Found:
    """What was found at one path so far."""

    def __init__(self, path: str, choice: str, owner: Any) -> None:
        self.path, self.choice, self.owner = path, choice, owner
        self.level: int = 0 if owner is None else owner.level + 1
        self.kinds: Counter[str] = Counter()
        self.categories: dict[str, Counter[str]] = {"number": Counter(), "string": Counter()}
        self.pieces: Counter[str] = Counter()  # by documents
        self.is_whole = True
        self.mean = self.squares = 0.0
        self.fields: dict[str, _Found] = {}
        self.element: _Found | None = None

    def add(self, kind: str, value: Any) -> None:
        """Add a value that contains no others."""
        if kind == "number":
            # Welford's method, which is exact for large numbers that differ little.
            self.is_whole &= float(value).is_integer()
            change = value - self.mean
            self.mean += change / self.kinds["number"]
            self.squares += change * (value - self.mean)
        known = self.categories.get(kind)
        if known is not None and (self.choice == "categories" or len(known) <= _MAX_CATEGORIES):
            known[category_of(value)] += 1

    def encoding(self, kind: str) -> dict[str, Any]:
        """Decide how the values of a kind are encoded."""
        if kind == "array" and self.element is not None:
            readout = self.choice if self.choice in _READOUTS else "mean+max+sum"
            return {"readout": readout, "element": self.element.path}
        if kind == "object":
            return {"fields": {key: field.path for key, field in self.fields.items()}}
        if kind not in self.categories:
            return {"categories": ["false", "true"]} if kind == "boolean" else {}
        counts = self.categories[kind]
        names = sorted(counts, key=lambda name: (-counts[name], name))
        few = len(names) <= _MAX_CATEGORIES and 2 * len(names) <= self.kinds[kind]
        if self.choice == "categories" or (kind == "string" and few and self.choice != "text"):
            return {"categories": names}
        if kind == "string":
            common = self.pieces.most_common(_MAX_PIECES)  # a text of one document is its name
            return {"pieces": {name: n for name, n in sorted(common) if n > 1 or name[0] != "="}}
        scale = {"mean": self.mean, "deviation": math.sqrt(self.squares / self.kinds[kind]) or 1.0}
        both = few and self.is_whole and self.choice != "number"
        return {**scale, "categories": names} if both else scale


class _Inference:
    """Collect what example documents consist of."""

    def __init__(self, choices: dict[str, str]) -> None:
        self.choices = choices
        self.found: dict[str, _Found] = {}
        self.root = self._at("$", None)

    def _at(self, path: str, owner: Any) -> _Found:
        choice = self.choices.get(path, "")
        found = _Found(path, choice, owner)
        if choice.startswith("like "):
            while found is not None and f"like {found.path}" != choice:
                found = found.owner
            if found is None:
                what, expected = "from_examples: an override is unknown", "a path that contains it"
                raise mismatch(ValueError, what, expected, choice, where=path)
        if found.level > _MAX_LEVELS:
            what, expected = "the documents are nested deeply", f"at most {_MAX_LEVELS} levels"
            hint = 'overrides such as {"$.replies[]": "like $"}, if documents are recursive'
            where = f"{path[:40]} … {path[-30:]}"
            raise mismatch(ValueError, what, expected, "one more", where=where, hint=hint)
        self.found[path] = found
        return found

    def add(self, document: Any) -> None:
        """Add the values of a document; without recursion, since it can be nested deeply."""
        left, texts = [(self.root, document)], defaultdict[Any, set[str]](set)
        while left:
            found, value = left.pop()
            kind = kind_of(value, found.path)
            found.kinds[kind] += 1
            if found.choice == "ignore":
                continue
            if kind == "array":
                found.element = found.element or self._at(f"{found.path}[]", found)
                left += [(found.element, part) for part in value]
            elif kind == "object":
                for key in [key for key in value if key not in found.fields]:
                    if type(key) is not str:
                        what, got = "a key cannot be used", f"{type(key).__name__} {key!r}"
                        raise mismatch(ValueError, what, "a string", got, where=found.path)
                    found.fields[key] = self._at(found.path + step_to(key), found)
                left += [(found.fields[key], part) for key, part in value.items()]
            else:
                found.add(kind, value)
                if kind == "string" and found.choice != "categories":
                    texts[found].update(pieces_of(value))
        for found, pieces in texts.items():
            found.pieces.update(pieces)

    def nodes(self) -> dict[str, Any]:
        """Decide on the encodings."""
        for path, choice in self.choices.items():
            kinds = self.found[path].kinds if path in self.found else {}
            name = "like" if choice.startswith("like ") else choice
            if not any(kind in kinds for kind in _CHOICES.get(name, ())):
                what = f"from_examples: the override {choice!r} fits no value"
                expected = "a path of print(schema), with number, categories, text, mean, max, sum"
                expected += " or several joined by +, like PATH, or ignore"
                got = f"{' and '.join(kinds) or 'nothing'} at {path}"
                raise mismatch(ValueError, what, expected, got)
        nodes: dict[str, Node] = {}
        left = [(self.root, 0)]
        while left:
            found, possible = left.pop()
            if found.path in nodes:  # of what it is like
                continue
            count, ignored = found.kinds.total(), found.choice == "ignore"
            kept = [kind for kind in _KINDS if found.kinds[kind] and not ignored]
            encodings = {kind: found.encoding(kind) for kind in kept}
            missing = max(0, possible - count)
            nodes[found.path] = Node(found.path, count, missing, encodings, ignored)
            left += [(found.element, 0)] if found.element else []
            left += [(field, found.kinds["object"]) for field in [*found.fields.values()][::-1]]
        return nodes
