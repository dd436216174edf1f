"""Write one page of molecules, predictions and what they rest on, which needs no other file."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOBase

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #222; background: #fff; }
.molecules { display: grid; gap: 1.2rem;
             grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); }
.molecule { border: 1px solid #ccc; border-radius: 6px; padding: .8rem; }
.molecule svg { max-width: 100%; height: auto; }
h2 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
code { font-size: .85rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .1rem .6rem .1rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.bad { color: #8a3b00; }
"""


@dataclass(frozen=True)
class Card:
    """Holds what the page shows of one molecule.

    Args:
        title: Its name, or its number.
        smiles: Its text.
        picture: The picture as SVG; empty for a record that is no molecule.
        predictions: Names and texts of what was predicted.
        atoms: Lines of the table of atoms.
        problem: Why it is no molecule; empty if it is one.
    """

    title: str
    smiles: str
    picture: str = ""
    predictions: Sequence[tuple[str, str]] = ()
    atoms: Sequence[Sequence[str]] = ()
    problem: str = ""


class HtmlReport:
    r"""Writes a page molecule by molecule, so that a long one needs no memory.

    Args:
        file: Where to write.
        title: Title of the page.
        facts: Names and texts that stand above the molecules.
        atom_columns: Names of the columns of the tables of atoms.

    Example:
        >>> import io
        >>> page = io.StringIO()
        >>> report = HtmlReport(page, "TPSA", [("checkpoint", "best.ckpt")], ["atom"])
        >>> report.add(Card("1", "C<O", problem="no molecule"))
        >>> report.finish()
        >>> "C&lt;O" in page.getvalue(), page.getvalue().endswith("</html>\n")
        (True, True)
    """

    def __init__(
        self,
        file: TextIOBase,
        title: str,
        facts: Sequence[tuple[str, str]],
        atom_columns: Sequence[str],
    ) -> None:
        self.file = file
        self.atom_columns = atom_columns
        name = html.escape(title)
        file.write(
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        )
        file.write(_table(facts))
        file.write('<div class="molecules">\n')

    def add(self, card: Card) -> None:
        """Adds one molecule.

        Args:
            card: What to show of it.
        """
        write = self.file.write
        write(f'<div class="molecule">\n<h2>{html.escape(card.title)}</h2>\n')
        write(f"<p><code>{html.escape(card.smiles)}</code></p>\n")
        if card.problem:
            write(f'<p class="bad">{html.escape(card.problem)}</p>\n')
        # Without the prologue of a file, which has no place within a page.
        write(card.picture[max(0, card.picture.find("<svg")) :])
        write(_table(card.predictions))
        if card.atoms:
            write("<details><summary>atoms</summary>\n")
            write(_table(card.atoms, self.atom_columns))
            write("</details>\n")
        write("</div>\n")

    def finish(self) -> None:
        """Writes the end of the page."""
        self.file.write("</div>\n</body>\n</html>\n")


def _table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"
