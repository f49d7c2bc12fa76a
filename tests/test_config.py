from __future__ import annotations

import json

import pytest

from paceline.config import Settings, resolve
from paceline.errors import ConfigError
from paceline.policies.balance import Affine


def test_precedence(tmp_path):
    (tmp_path / "paceline.toml").write_text('balance = "dbs"\nseed = 2\ngranularity = 8\n')
    environ = {
        "PACELINE_BALANCE": "equal",
        "PACELINE_TIMEOUT_S": "9.5",
        "PACELINE_MAX_LOCAL_BATCH": "64,null,32",
        "PACELINE_CLI": json.dumps({"seed": 3, "granularity": 4}),
    }
    settings, sources = resolve({"granularity": 2}, environ, tmp_path)
    assert (settings.balance, settings.seed, settings.granularity, settings.timeout_s) == ("dbs", 3, 2, 9.5)
    assert settings.max_local_batch == (64, None, 32)
    assert sources == {
        "balance": "file",
        "seed": "command line",
        "granularity": "argument",
        "timeout_s": "environment",
        "max_local_batch": "environment",
    }


def test_named_file(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text("seed = 11\n")
    assert resolve({}, {"PACELINE_CONFIG": str(path)}, tmp_path)[0].seed == 11
    with pytest.raises(ConfigError, match="there is no"):
        resolve({}, {"PACELINE_CONFIG": str(tmp_path / "gone.toml")}, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"balance": "afine"}, "did you mean 'affine'"),
        ({"seed": -1}, "seed must be a whole number, at least 0; got -1"),
        ({"replan_every": 0}, "replan_every must be a whole number, at least 1"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"granularity": 2.5}, "granularity must be a whole number"),
        ({"max_local_batch": (4, 0)}, "max_local_batch must be whole numbers"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**values)


def test_unknown_setting_and_broken_file(tmp_path):
    (tmp_path / "paceline.toml").write_text("granularty = 8\n")
    with pytest.raises(ConfigError, match=r"from the file.*did you mean 'granularity'"):
        resolve({}, {}, tmp_path)
    (tmp_path / "paceline.toml").write_text("granularity =\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve({}, {}, tmp_path)
    (tmp_path / "paceline.toml").unlink()
    with pytest.raises(ConfigError, match="PACELINE_SEED must be a number"):
        resolve({}, {"PACELINE_SEED": "many"}, tmp_path)


def test_a_policy_object_is_a_balance():
    settings = Settings(balance=Affine())
    assert settings.policy == Affine()
    assert "Affine" in settings.plain()["balance"]


def test_a_recipe_stands_in_for_what_nobody_gave(tmp_path):
    settings, sources = resolve({"recipe": "adaptive-local"}, {}, tmp_path)
    assert (settings.sync, settings.batch) == ("local:h=16", "norm-test:eta=0.8,at=last")
    assert settings.batch_policy.at == "last"
    assert sources == {"recipe": "argument", "sync": "recipe", "batch": "recipe"}
    settings, _ = resolve({"recipe": "adaptive-local"}, {"PACELINE_SYNC": "local:h=8"}, tmp_path)
    assert settings.sync == "local:h=8"
    with pytest.raises(ConfigError, match="did you mean 'adaptive-local'"):
        resolve({}, {"PACELINE_RECIPE": "adaptive-lokal"}, tmp_path)
