import pickle

import numpy as np
import pytest

from pyg_dynbatch.molecules.store import Shard, shard_bytes, write_shard

ARRAYS = {
    "bits": np.arange(35, dtype=np.uint8).reshape(7, 5),
    "none": np.empty((0, 3), np.float32),
    "y": np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2),
    "row": np.arange(1000),
}


def test_what_is_written_is_read(tmp_path):
    path = write_shard(tmp_path / "a.bin", ARRAYS, {"digest": "abc", "errors": [1]})
    shard = Shard(path)
    assert shard.facts == {"digest": "abc", "errors": [1]}
    for name, array in ARRAYS.items():
        assert shard[name].dtype == array.dtype
        assert np.array_equal(shard[name], array)
    with pytest.raises(ValueError, match="read-only"):
        shard["row"][0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_arrays_are_plain_ones(tmp_path):
    path = write_shard(tmp_path / "a.bin", {"row": np.arange(3)}, {})
    assert type(Shard(path)["row"]) is type(Shard(path)["row"][1:]) is np.ndarray


def test_in_memory():
    shard = Shard(shard_bytes(ARRAYS, {}))
    assert np.array_equal(shard["y"], ARRAYS["y"])
    assert np.array_equal(pickle.loads(pickle.dumps(shard))["y"], ARRAYS["y"])


def test_a_mapping_does_not_travel_to_workers(tmp_path):
    arrays = {"long": np.zeros(1_000_000, np.uint8)}
    shard = Shard(write_shard(tmp_path / "a.bin", arrays, {})).check()
    pickled = pickle.dumps(shard)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)["long"].shape == (1_000_000,)


def test_the_header_is_read_without_the_arrays(tmp_path):
    arrays = {"long": np.zeros(1_000_000, np.uint8)}
    path = write_shard(tmp_path / "a.bin", arrays, {"molecules": 3})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shard = Shard(path)
    assert shard.facts == {"molecules": 3}
    with pytest.raises(ValueError, match="a shard is damaged") as caught:
        shard["long"]
    assert "expected: checksum" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "bytes"),
        (lambda content: content[:10], "got:      10 bytes"),
        (lambda content: b"", "got:      0 bytes"),
        (lambda content: content + b"x", "bytes"),
        (lambda content: b"X" + content[1:], "a whole shard"),
        (lambda content: content[:40] + b"X" + content[41:], "header"),
        (lambda content: content[:8] + b"\x09" + content[9:], "version 9"),
    ],
)
def test_damage_is_named(tmp_path, change, message):
    path = tmp_path / "a.bin"
    path.write_bytes(change(shard_bytes(ARRAYS, {})))
    with pytest.raises(ValueError, match="packed molecules: a shard is damaged") as caught:
        Shard(path).check()
    assert message in str(caught.value)
    assert "delete the file; the data set makes it again" in str(caught.value)


def test_big_arrays_are_checked_in_pieces(tmp_path):
    array = np.arange(3_000_000, dtype=np.int32)
    shard = Shard(write_shard(tmp_path / "a.bin", {"a": array}, {})).check()
    assert np.array_equal(shard["a"], array)
