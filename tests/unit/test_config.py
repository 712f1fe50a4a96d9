"""Settings: where they come from, and how wrong ones are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpift.config import Config
from mpift.errors import ConfigError


def test_arguments_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {"MPIFT_MIN_SIZE": "2", "MPIFT_BUCKET_BYTES": "4096"}
    config = Config.load(environment, min_size=3)
    assert (config.min_size, config.bucket_bytes) == (3, 4096)
    assert config.rebuild_timeout == Config().rebuild_timeout


def test_an_empty_variable_is_no_setting() -> None:
    assert Config.load({"MPIFT_MIN_SIZE": ""}).min_size == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "parts"),
    [
        ({"MPIFT_MIN_SIZE": "two"}, {}, ["MPIFT_MIN_SIZE", "'two'", "int"]),
        ({"MPIFT_MIN_SIZE": "0"}, {}, ["MPIFT_MIN_SIZE", "0", "smallest", "1"]),
        ({"MPIFT_REBUILD_TIMEOUT": "nan"}, {}, ["MPIFT_REBUILD_TIMEOUT", "nan"]),
        ({"MPIFT_MPI_THREADS": "many"}, {}, ["MPIFT_MPI_THREADS", "many", "serialized, multiple"]),
        ({"MPIFT_CHAOS": "kill:x@1"}, {}, ["MPIFT_CHAOS", "kill:x@1"]),
        ({}, {"min_size": 1.5}, ["argument min_size", "1.5"]),
        ({}, {"min_size": True}, ["argument min_size", "True"]),
        ({}, {"gather_seconds": 11.0}, ["argument gather_seconds", "largest", "10"]),
        ({}, {"colour": 1}, ["unknown setting", "colour"]),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_and_source(
    environment: dict[str, str], arguments: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(environment, **arguments)
    for part in parts:
        assert part in str(caught.value)


def test_every_setting_is_documented_with_its_variable_and_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/settings.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    documented = {row[0].strip("| `"): (row[1].strip("`"), row[2]) for row in rows}
    words = {8 << 20: "8 MiB", 1 << 20: "1 MiB", "": "none"}
    for item in dataclasses.fields(Config):
        variable, default = documented.pop(item.name)
        assert variable == f"MPIFT_{item.name.upper()}"
        value = getattr(Config(), item.name)
        shown = words.get(value, f"{value:g}" if isinstance(value, int | float) else value)
        assert default.strip("` ") == shown, item.name
    assert not documented
