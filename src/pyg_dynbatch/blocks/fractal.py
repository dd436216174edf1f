"""Fractal networks: layers of many depths side by side, with paths dropped in training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.layers import TensorToTensorLayer
from pyg_dynbatch.core.errors import mismatch


def mean_of_two(a: Tensor, b: Tensor) -> Tensor:
    """Joins two paths by their mean.

    Example:
        >>> mean_of_two(torch.ones(1), torch.zeros(1))
        tensor([0.5000])
    """
    return (a + b) / 2


class FractalNet(TensorToTensorLayer):
    """Stacks fractal blocks; each joins a short path and a path of two smaller fractals.

    f_0 = base; f_{d+1}(x) = mix(base(x), f_d(f_d(x))). With ``drop_path``, in training, each join
    keeps both paths or one of them: per mini-batch either all joins draw on their own (local), or
    one column is kept throughout (global).

    Args:
        num_fractal_blocks: Number of blocks one after another.
        fractal_block_depth: Depth d of each: how often it holds two smaller ones; 0 for a block
            of one base layer.
        base_layer_builder: Makes a base layer, given its ``name``; its output must be of its
            input's type.
        mixer: Joins two paths; the mean where left out.
        drop_path: Whether paths are dropped; may be set later.
        p_local_drop_path: Share of mini-batches that drop locally.
        p_drop_base_case: Chance that a local drop takes the short path.
        p_drop_recursive_case: Chance that it takes the long one.
        name: For messages and pictures.

    Raises:
        ValueError: If the depth is below 0.

    Reference:
        Larsson, Maire, Shakhnarovich (2017), arXiv:1605.07648, section 2, where d + 1 is
        C. Differs: drawn once a batched call, for all its rows.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> net = td.FractalNet(2, 2, lambda name: td.FC(4, name=name))
        >>> (td.Vector(4) >> net).eval([1, 2, 3, 4]).shape
        torch.Size([4])
    """

    def __init__(
        self,
        num_fractal_blocks: int,
        fractal_block_depth: int,
        base_layer_builder: Callable[..., Any],
        mixer: Any = None,
        drop_path: bool = False,
        p_local_drop_path: float = 0.5,
        p_drop_base_case: float = 0.25,
        p_drop_recursive_case: float = 0.25,
        name: Any = None,
    ) -> None:
        super().__init__(name_or_scope=name)
        if fractal_block_depth < 0:
            raise ValueError(
                mismatch(
                    "FractalNet: fractal_block_depth is below 0",
                    expected="0 or more",
                    got=fractal_block_depth,
                )
            )
        # Number of columns.
        self.depth = fractal_block_depth + 1
        self.mixer = mean_of_two if mixer is None else mixer
        self.drop_path = drop_path
        self.p_local_drop_path = p_local_drop_path
        self.p_drop_base_case, self.p_drop_recursive_case = p_drop_base_case, p_drop_recursive_case
        # A block of c columns holds 2^c - 1 base layers, in the order in which they are met.
        per_block = 2**self.depth - 1
        self.blocks = nn.ModuleList(
            nn.ModuleList(base_layer_builder(name=f"block_{b}_{n}") for n in range(per_block))
            for b in range(num_fractal_blocks)
        )
        self._say(
            num_fractal_blocks, fractal_block_depth, base_layer_builder, mixer=mixer,
            drop_path=True if drop_path else None,
        )  # fmt: skip

    @property
    def random(self) -> bool:
        """Whether calls draw random numbers."""
        return self.drop_path

    def _create(self, input_type: Any) -> None:
        for layer in self.modules():
            if isinstance(layer, TensorToTensorLayer) and layer is not self:
                layer.build(input_type)

    def _process(self, *rows: Any) -> Any:
        (x,) = rows
        for block in self.blocks:
            layers = iter(block)  # type: ignore[call-overload]
            drops = self.drop_path and self.training
            kept = -1
            if drops and float(torch.rand(())) >= self.p_local_drop_path:
                kept = int(torch.randint(self.depth, ()))
            x = self._fractal(x, self.depth, layers, kept, drops)
        return x

    def _fractal(self, x: Tensor, depth: int, layers: Any, kept: int, drops: bool) -> Tensor:
        base = next(layers)
        if depth == 1:
            return base(x)
        inner = [next(layers) for _ in range(2**depth - 2)]
        half = len(inner) // 2
        takes_short, takes_long = self._draw(depth, kept, drops)
        short = base(x) if takes_short else None
        if not takes_long:
            return short if short is not None else x
        long = self._fractal(x, depth - 1, iter(inner[:half]), kept, drops)
        long = self._fractal(long, depth - 1, iter(inner[half:]), kept, drops)
        return long if short is None else self.mixer(short, long)

    def _draw(self, depth: int, kept: int, drops: bool) -> tuple[bool, bool]:
        """Whether a join takes its short and its long path; never neither."""
        if not drops:
            return True, True
        if kept >= 0:
            return depth == kept + 1, depth > kept + 1
        draw = float(torch.rand(()))
        short = draw >= self.p_drop_base_case
        return short, not short or draw < 1.0 - self.p_drop_recursive_case
