"""A digest of plain values and compiled code, which is the same in every process."""

from hashlib import sha256
from types import CodeType
from typing import Any

import pyg_dynbatch


def digest(value: Any) -> str:
    """Digest strings, numbers, compiled code, and lists and tuples of them."""
    text = f"{pyg_dynbatch.__version__} {_text_of(value)}"
    return sha256(text.encode()).hexdigest()


def _text_of(value: Any) -> str:
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames
        parts = [value.co_code, value.co_exceptiontable, names, *value.co_consts]
        return f"code {_text_of(parts)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text_of, value))})"
    # The order of a set differs between processes.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
