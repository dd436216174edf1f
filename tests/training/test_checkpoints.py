"""A model keeps its options: a checkpoint alone opens it, and no other model takes it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyg_dynbatch import models
from pyg_dynbatch.models import Model, TreeClassifier, TreeSchema, load
from tests.training.conftest import Fitted
from tests.training.helpers import SIZES, assert_equal_weights, task, trainer

KINDS = [
    kind
    for kind in map(models.__dict__.get, models.__all__)
    if inspect.isclass(kind) and issubclass(kind, Model) and kind is not Model
]
SCHEMAS = {"TreeClassifier": TreeSchema(num_tokens=7, num_classes=3)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.__name__ in SCHEMAS])
def test_every_argument_is_an_option_and_makes_the_same_model(kind: Any, tmp_path: Path) -> None:
    model = kind(SCHEMAS[kind.__name__])
    options = model.options()
    assert options.keys() == inspect.signature(kind).parameters.keys()
    assert kind(**options).options() == options
    model.save(tmp_path / "a.ckpt")
    again = load(tmp_path / "a.ckpt")
    assert type(again) is kind and not again.training
    assert again.options() == options
    assert_equal_weights(again.state_dict(), model.state_dict())


class Mean(Model):
    """A user's own model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 1)

    def loss(self, output: Any, batch: Any) -> Any:
        raise NotImplementedError

    def columns(self, values: Any, batch: Any, deviation: Any = None) -> Any:
        raise NotImplementedError


def test_own_models_are_opened_by_their_class(tmp_path: Path, fitted: Fitted) -> None:
    path = tmp_path / "own.ckpt"
    Mean(3).save(path)
    assert load(path, kind=Mean).width == 3
    with pytest.raises(ValueError, match="no model of the package") as caught:
        load(path)
    assert "kind=MyModel" in str(caught.value)
    with pytest.raises(ValueError, match="not one of TreeClassifier"):
        load(path, kind=TreeClassifier)
    with pytest.raises(ValueError, match="not one of Mean"):
        load(fitted.checkpoint, kind=Mean)


def test_an_argument_that_is_not_kept_is_named(tmp_path: Path) -> None:
    model = Mean(3)
    del model.width
    with pytest.raises(AttributeError, match="'width' is not kept"):
        model.save(tmp_path / "a.ckpt")


OTHERS: dict[str, Callable[[Fitted], dict[str, Any]]] = {
    "hidden_channels": lambda fitted: {"hidden_channels": 9},
    "cell": lambda fitted: {"cell": "gru"},
    "polarity": lambda fitted: {"polarity": False},
}


@pytest.mark.parametrize("option", OTHERS)
def test_a_task_refuses_the_checkpoint_of_another_model(
    option: str, fitted: Fitted, tmp_path: Path
) -> None:
    other = task(fitted.data, **{"polarity": True, **OTHERS[option](fitted)})
    with pytest.raises(ValueError, match="a different model") as caught:
        trainer(tmp_path).test(other, datamodule=fitted.data, ckpt_path=str(fitted.checkpoint))
    assert f"expected: {option}: " in str(caught.value)


def test_a_task_refuses_other_words_but_not_another_dropout(fitted: Fitted, tmp_path: Path) -> None:
    run = trainer(tmp_path)
    same = task(fitted.data, polarity=True, embedding_dropout=0.5)
    run.test(same, datamodule=fitted.data, ckpt_path=str(fitted.checkpoint), verbose=False)
    assert_equal_weights(same.state_dict(), fitted.task.state_dict())
    schema = fitted.data.schema.as_dict()
    schema["vocabulary"] = {**schema["vocabulary"], "words": schema["vocabulary"]["words"][::-1]}
    assert schema != fitted.data.schema.as_dict()
    swapped = TreeClassifier(schema, **SIZES, cell="child_sum", polarity=True)
    contents = torch.load(fitted.checkpoint, weights_only=True)
    with pytest.raises(ValueError, match=r"expected: schema\.vocabulary\.words"):
        type(same)(swapped).on_load_checkpoint(contents)


class Attack:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("attacked"),)


def test_files_that_are_no_checkpoints_are_refused(
    fitted: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = fitted.checkpoint.read_bytes()
    Path("cut.ckpt").write_bytes(whole[: len(whole) // 2])
    Path("text.ckpt").write_text("no checkpoint")
    torch.save({"state_dict": {}}, "foreign.ckpt")
    torch.save({"state_dict": {}, "attack": Attack()}, "attack.ckpt")
    for name in ("cut", "text", "foreign", "attack"):
        with pytest.raises(ValueError, match=f"not a checkpoint of a model(?s:.*){name}.ckpt"):
            load(f"{name}.ckpt")
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        load("none.ckpt")
    assert not Path("attacked").exists()
