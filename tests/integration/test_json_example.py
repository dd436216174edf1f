"""The example of JSON documents infers a network, trains it with our task and predicts a file."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.models import load, predict
from tests.example_files import defined_in


def draw_orders(count: int) -> list[dict[str, Any]]:
    """Draw orders that are returned if one of their items is red and large."""
    rng = random.Random(0)
    orders: list[dict[str, Any]] = []
    for number in range(count):
        items = [
            {"colour": rng.choice(["red", "blue"]), "size": rng.choice([1.5, 40.0])}
            for _ in range(rng.randint(0, 3))
        ]
        is_returned = any(item["colour"] == "red" and item["size"] == 40 for item in items)
        order = {"id": number, "items": items, "note": f"order {number % 7} of today"}
        order["returned"] = "yes" if is_returned else "no"
        if number % 5 == 0:
            order |= {"gift": None, "note": 3}
        orders.append(order)
    return orders


def test_orders_are_learned_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = defined_in("json_documents")
    orders = draw_orders(150)
    file = tmp_path / "orders.jsonl"
    file.write_text("\n".join(map(json.dumps, orders)))
    checkpoint = tmp_path / "orders.ckpt"
    arguments = ["--label", "returned", "--epochs", "10", "--checkpoint", str(checkpoint)]
    names["main"]([str(file), *arguments])
    network, vote = re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out)
    # Without the nesting, it is unknown which item is red.
    assert float(network) > 0.85 and 0.5 < float(vote) < float(network)

    model = load(checkpoint, kind=names["DocumentClassifier"])
    unknown = [{"items": "none", "colour": 3}, {"items": [{"size": None}]}]
    table = predict(model, [*orders[:2], "no object", *unknown])
    assert np.isnan(table["prediction"]).tolist() == [False, False, True, False, False]
    assert table["fault"][2] == "expected an object, got str"
    one_by_one = predict(model, file, batch_size=1)
    together = predict(model, file)
    np.testing.assert_allclose(one_by_one["probability"], together["probability"], atol=1e-6)
    assert torch.tensor(together["target"]).long().bincount().tolist() == [
        sum(order["returned"] == name for order in orders) for name in ("no", "yes")
    ]
