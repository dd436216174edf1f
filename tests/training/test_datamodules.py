"""Data modules of single data sets: what is wrong with a user's files is said."""

from pathlib import Path

import pytest

from pyg_dynbatch.tasks import TreeFileData


@pytest.mark.parametrize("vocabulary", ["train", "all"])
def test_files_without_a_label_have_no_classes(tmp_path: Path, vocabulary: str) -> None:
    train, val = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("((good) (film))\n(-1 (dull) (film))\n", encoding="utf-8")
    val.write_text("((dull) (film))\n", encoding="utf-8")
    data = TreeFileData(str(train), str(val), labels="optional", vocabulary=vocabulary)
    with pytest.raises(ValueError, match="TreeFileData: no node has a label") as caught:
        _ = data.num_classes
    files = [str(train)] if vocabulary == "train" else [str(train), str(val)]
    assert f"where:    {', '.join(files)}" in str(caught.value)
    with pytest.raises(ValueError, match="no node has a label"):
        data.dataset("train")


def test_a_given_number_of_classes_needs_no_label(tmp_path: Path) -> None:
    path = tmp_path / "trees.txt"
    path.write_text("((good) (film))\n", encoding="utf-8")
    data = TreeFileData(str(path), str(path), labels="optional", classes=3)
    assert data.num_classes == data.dataset("train").num_classes == 3
