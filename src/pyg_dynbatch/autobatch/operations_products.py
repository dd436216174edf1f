"""Products of the table: of vectors and matrices, and sums over indices."""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.autobatch.operations_table import (
    ROW,
    Batched,
    Call,
    aligned,
    filled,
    form_of,
    is_autocast,
    repeated,
)


@form_of("matmul mm mv bmm dot vdot inner __matmul__ __rmatmul__")
def product(call: Call) -> Batched | None:
    """Multiply vectors and matrices."""
    if len(call.args) + len(call.kwargs) != 2 or call.has_nested_rows:
        return None
    is_matmul = call.name in ("matmul", "__matmul__", "__rmatmul__")
    if is_autocast() and not is_matmul and call.name not in ("mm", "bmm"):
        return None
    values = [*call.args, *call.kwargs.values()]
    ranks = [len(operand.shape) for operand in call.operands]
    is_swapped = call.name == "__rmatmul__"
    if [*call.kwargs] not in ([], ["other"], ["mat2"], ["vec"], ["tensor"]):
        return None
    if call.name == "inner" and ranks != [1, 1]:
        return None
    if call.name == "vdot" and any(each.dtype.is_complex for each in call.rows):
        return None
    if is_matmul and _is_direct(values[::-1] if is_swapped else values, sorted_(ranks, is_swapped)):
        return call.direct()
    if is_swapped:
        form = _multiplied(values[::-1], ranks[::-1])
        return call.form(lambda *rows: form(*rows[::-1]))
    return call.form(_multiplied(values, ranks))


def sorted_(ranks: list[int], is_swapped: bool) -> list[int]:
    """Return the ranks of the left and of the right factor."""
    return ranks[::-1] if is_swapped else ranks


def _is_direct(values: Sequence[Any], ranks: Sequence[int]) -> bool:
    """Return whether a batch axis in front of rows has no part in the product."""
    (left, right), (left_rank, right_rank) = values, ranks
    if left is ROW and right is ROW:
        return left_rank == right_rank >= 2
    if left is ROW:
        return 1 <= right_rank <= 2 or left_rank >= right_rank >= 2
    return right_rank >= 2 and right_rank >= left_rank


def _multiplied(values: Sequence[Any], ranks: Sequence[int]) -> Any:
    """Return what multiplies stacked rows."""
    left, right = values
    left_rank, right_rank = ranks

    def form(*rows: Tensor) -> Tensor:
        a, b = filled(list(values), iter(rows))
        if left_rank == right_rank == 1:
            return _product_of_vectors(a, b)
        if left is not ROW and left_rank == 2 and right_rank == 1:
            return b @ a.mT
        if right is not ROW and right_rank == 2:
            return a @ b
        # Vectors become matrices on the way.
        a = a.unsqueeze(-2) if left_rank == 1 else a
        b = b.unsqueeze(-1) if right_rank == 1 else b
        rank = max(*ranks, 2)
        result = (aligned(a, rank) if left is ROW else a) @ (
            aligned(b, rank) if right is ROW else b
        )
        result = result.squeeze(-2) if left_rank == 1 else result
        return result.squeeze(-1) if right_rank == 1 else result

    return form


def _product_of_vectors(a: Tensor, b: Tensor) -> Tensor:
    if is_autocast():
        b = b.unsqueeze(-1)
        return (a.unsqueeze(-2) @ b).flatten()
    terms = a * b
    return terms.sum(-1, dtype=terms.dtype)


@form_of("outer ger")
def outer_product(call: Call) -> Batched | None:
    """Multiply each element of a vector with each of another."""
    if len(call.operands) != 2 or call.kwargs or call.has_nested_rows or is_autocast():
        return None
    if any(len(operand.shape) != 1 for operand in call.operands):
        return None

    def form(*rows: Tensor) -> Tensor:
        a, b = filled(list(call.args), iter(rows))
        return a.unsqueeze(-1) * b.unsqueeze(-2)

    return call.form(form)


@form_of("addmm")
def added_product(call: Call) -> Batched | None:
    """Add a product of matrices to a matrix, or to each of its rows."""
    values = call.bound("input mat1 mat2 beta alpha", beta=1, alpha=1)
    ranks = dict(zip([n for n in values if _is_tensor(values[n])], call.operands, strict=True))
    if len(ranks["mat1"].shape) != 2 or len(ranks["mat2"].shape) != 2:
        return None

    def form(*rows: Tensor) -> Tensor:
        given = filled(values, iter(rows))
        size = rows[0].size(0)
        bias = given["input"]
        bias = aligned(bias, 2) if values["input"] is ROW else bias
        factors = [
            given[name] if values[name] is ROW else repeated(given[name], size)
            for name in ("mat1", "mat2")
        ]
        return torch.baddbmm(bias, *factors, beta=values["beta"], alpha=values["alpha"])

    return call.form(form)


@form_of("baddbmm")
def added_products(call: Call) -> Batched | None:
    """Add products of matrices to matrices."""
    if not call.has_equal_rows or call.rank != 3:
        return None
    form = call.on_stacked_rows

    def folded(*rows: Tensor) -> Tensor:
        size = rows[1].shape[:2]
        every = [row.expand(*size, *row.shape[2:]).flatten(0, 1) for row in rows]
        return form(*every).unflatten(0, size)

    return call.form(folded)


def _is_tensor(value: Any) -> bool:
    return value is ROW or isinstance(value, Tensor)


@form_of("einsum")
def einsum(call: Call) -> Batched | None:
    """Give each term of a row one more index."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or call.kwargs or not all(map(_is_tensor, operands)):
        return None
    terms, result = _terms(equation.replace(" ", ""))
    if len(terms) != len(operands):
        return None
    if "->" in equation and _takes_batches(call, terms, result, operands):
        return call.direct()
    letter = next(each for each in ascii_letters if each not in equation)
    terms = [
        letter + term if operand is ROW else term
        for term, operand in zip(terms, operands, strict=True)
    ]
    extended = f"{','.join(terms)}->{letter}{result}"

    def form(*rows: Tensor) -> Tensor:
        return torch.einsum(extended, *filled(operands, iter(rows)))

    return call.form(form)


def _terms(equation: str) -> tuple[list[str], str]:
    """Return the terms of an equation, and its result, which may be left out."""
    left, arrow, result = equation.partition("->")
    if not arrow:
        letters = sorted({letter for letter in left if letter.isalpha()})
        result = "".join(letter for letter in letters if left.count(letter) == 1)
        result = "..." * ("..." in left) + result
    return left.split(","), result


def _takes_batches(call: Call, terms: list[str], result: str, operands: list[Any]) -> bool:
    """Return whether a batch axis becomes part of an ellipsis in front."""
    types = iter(call.rows)
    lengths = set()
    for term, operand in zip(terms, operands, strict=True):
        if operand is ROW:
            if not term.startswith("..."):
                return False
            lengths.add(len(next(types).shape) - len(term[3:]))
        elif "..." in term:
            return False
    return result.startswith("...") and len(lengths) == 1
