"""Check an installed wheel: the extension is there, and its kernels compute a Tree-LSTM.

``python tests/check_wheel.py`` needs nothing but the package.
"""

import sys

import torch

from pyg_dynbatch.core.native import describe_native, loaded_extension
from pyg_dynbatch.nn import NaryTreeLSTM


def main() -> None:
    """Compare a training step in single precision, in C, with plain torch in double precision."""
    print(describe_native())
    native = loaded_extension()
    assert native is not None
    assert sys.platform == "win32" or native.variant() == native.variants()[0]
    layer, x = NaryTreeLSTM(5, 20), torch.randn(9, 5, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [4, 4, 5, 5, 6, 6, 8, 8]])
    found = layer(x, edges)
    found.square().sum().backward()
    single = [found, x.grad, *(each.grad for each in layer.parameters())]
    exact = x.detach().double().requires_grad_()
    layer.double().zero_grad()
    right = layer(exact, edges)
    right.square().sum().backward()
    double = [right, exact.grad, *(each.grad for each in layer.parameters())]
    for mine, wanted in zip(single, double, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-5)
    print("right")


if __name__ == "__main__":
    main()
