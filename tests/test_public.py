from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import paceline
from paceline.bench.peers import PEERS


def test_public_names():
    assert len(paceline.__all__) <= 25
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert dir(paceline) == sorted(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.nothing


def test_import_loads_nothing_heavy():
    code = "import sys, paceline, paceline.cli; print([m for m in ('torch', 'numpy', 'rich', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def modules():
    peers = tuple(f"paceline.bench.contenders.{name}" for name in PEERS)  # their libraries live elsewhere
    skip = ("paceline.cli.__main__", *peers)
    return [m.name for m in pkgutil.walk_packages(paceline.__path__, "paceline.") if not m.name.startswith(skip)]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0
