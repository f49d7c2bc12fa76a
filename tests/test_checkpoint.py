from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.runtime import checkpoint

STATE = {
    "weights": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(4),
    "nested": {"list": [1, 2.5, None, True], 3: ("a", torch.zeros(0))},
    "empty": {},
}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(state=st.dictionaries(st.text(max_size=4), plain, max_size=4))
def test_plain_values_survive(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "a.ckpt"
    checkpoint.write(path, state)
    assert checkpoint.read(path) == state


def test_tensors_survive_and_tied_ones_too(tmp_path):
    shared = torch.ones(4)
    checkpoint.write(tmp_path / "a", {**STATE, "tied": [shared, shared, shared.view(2, 2).t()]})
    loaded = checkpoint.read(tmp_path / "a")
    assert torch.equal(loaded["weights"], STATE["weights"])
    assert loaded["half"].dtype == torch.bfloat16
    assert loaded["nested"]["list"] == [1, 2.5, None, True]
    assert loaded["nested"][3][0] == "a"
    assert loaded["nested"][3][1].shape == (0,)
    assert torch.equal(loaded["tied"][2], torch.ones(2, 2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]  # no temporary file left


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
def test_truncated(tmp_path, keep):
    path = tmp_path / "a"
    checkpoint.write(path, STATE)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if isinstance(keep, int) else keep * len(data))])
    with pytest.raises(CheckpointError, match=r"truncated|not a checkpoint"):
        checkpoint.read(path)


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "a"
    checkpoint.write(path, {"weights": torch.arange(4.0), "n": 3})
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 0x55
        path.write_bytes(bytes(bad))
        with pytest.raises(CheckpointError):
            checkpoint.read(path)


def test_foreign_and_newer(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.read(tmp_path / "none")
    (tmp_path / "foreign").write_bytes(safetensors.torch.save({"x": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="not a paceline checkpoint"):
        checkpoint.read(tmp_path / "foreign")
    torch.save({"x": 1}, tmp_path / "pickle")
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "pickle")
    monkeypatch.setattr(checkpoint, "SCHEMA", 99)
    checkpoint.write(tmp_path / "newer", STATE)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="schema 99"):
        checkpoint.read(tmp_path / "newer")


def test_what_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is of type object"):
        checkpoint.write(tmp_path / "a", {"a": [1, object()]})
    assert not (tmp_path / "a").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    checkpoint.write(path, {"n": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.write(path, {"n": 2})
    monkeypatch.undo()
    assert checkpoint.read(path) == {"n": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
