"""Measure the memory of one training step on a document with a list of 100,000 elements.

    python examples/cases/json_memory.py

Printed per kind of element: the largest memory of the process in forward and backward, less that
before the document was traced. Each kind runs in a process of its own.
"""

import random
import resource
import subprocess
import sys

import torch

from pyg_dynbatch.blocks import Compiler, from_examples

KINDS = ["numbers", "objects", "texts"]
ELEMENTS = 100_000


def peak() -> float:
    """Return the largest memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str) -> None:
    """Print what a step takes."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    drawn = {
        "numbers": lambda: draw.random(),
        "objects": lambda: {"price": draw.random(), "tag": draw.choice("abc")},
        "texts": lambda: " ".join(draw.choices(words, k=5)),
    }
    document = [drawn[kind]() for _ in range(ELEMENTS)]
    model = Compiler.create(from_examples([document[:1000], document[:1000]], width=32))
    model([document[:100]]).output.sum().backward()
    before = peak()
    model([document]).output.sum().backward()
    print(f"{kind:<8} {peak() - before:4.0f} MB")


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        measure(kind)
    for kind in KINDS * (len(sys.argv) == 1):
        subprocess.run([sys.executable, __file__, kind], check=True)
