"""Write weave by the equations of one molecule; the engine batches molecules of any size.

The factored layer with the same weights gives the same results faster. In this way, a variant of
weave can be tried as a recording first, and a layer for it can be checked.
"""

import time

import torch

from pyg_dynbatch import schedule_recordings
from pyg_dynbatch.models import WeaveRecorder
from pyg_dynbatch.nn import Pairs, WeaveStack

torch.manual_seed(0)
NUM_CODES, ATOM_FEATURES, PAIR_FEATURES = 9, 6, 5
stack = WeaveStack(ATOM_FEATURES, PAIR_FEATURES, channels=16, num_modules=2)
table = torch.rand(NUM_CODES, PAIR_FEATURES)
weave = WeaveRecorder(stack, table)  # the stack's weights, not copies of them

# 1. Molecules of different sizes: chains of atoms, whose pair code is the number of bonds.
sizes = [int(n) for n in torch.randint(1, 12, (24,))]
x = torch.randn(sum(sizes), ATOM_FEATURES)
bonds = [[[min(abs(i - j), 8) for j in range(n)] for i in range(n)] for n in sizes]

# 2. One recording per molecule: a few hundred calls, recorded by loops over atoms and pairs.
recordings = [weave.recording(n, code) for n, code in zip(sizes, bonds, strict=True)]
schedule = schedule_recordings(recordings)
calls = sum(recording.num_calls for recording in recordings)
print(f"{calls} calls of {len(recordings)} molecules run as {len(schedule.steps)} batched calls")

# 3. The factored layer: one plan of integers for the whole batch.
upper = [code[i][j] for code in bonds for i in range(len(code)) for j in range(i, len(code))]
pairs = Pairs.from_codes(torch.tensor(upper), sizes, num_codes=NUM_CODES)


def timed(run, *arguments: object) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    """Return the result, the gradients of all weights, and the seconds."""
    start = time.perf_counter()
    found = run(*arguments)
    gradients = torch.autograd.grad(found.square().sum(), list(stack.parameters()))
    return found, list(gradients), time.perf_counter() - start


by_engine, engine_gradients, engine_seconds = timed(weave, x, recordings)
by_layer, layer_gradients, layer_seconds = timed(stack, x, table, pairs)
torch.testing.assert_close(by_engine, by_layer, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(engine_gradients, layer_gradients, rtol=1e-3, atol=1e-4)
difference = float((by_engine - by_layer).detach().abs().max())
print(f"engine and layer agree to {difference:.0e}, and so do all gradients")
print(f"engine {1e3 * engine_seconds:.0f} ms, layer {1e3 * layer_seconds:.1f} ms")
