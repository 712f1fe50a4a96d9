"""Wrong settings are refused: by key, value and source, with what is allowed or may be meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mpift.config import SETTINGS, Config, unknown_variables
from mpift.errors import ConfigError
from mpift.settings import OTHER_VARIABLES
from tests.unit.settings_places import REPOSITORY, folder

__all__ = ["folder"]  # a fixture for these tests


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"MPIFT_MIN_SIZE": "two"}, {}, "min_size = 'two' (environment variable MPIFT_MIN_SIZE)"),
        ({"MPIFT_MIN_SIZE": "two"}, {}, " must be a whole number, at least 1"),
        ({"MPIFT_MIN_SIZE": "0"}, {}, "min_size = 0 (environment variable MPIFT_MIN_SIZE) must be"),
        ({"MPIFT_REBUILD_TIMEOUT": "nan"}, {}, "rebuild_timeout = nan (env"),
        ({"MPIFT_REBUILD_TIMEOUT": "inf"}, {}, "must be a number from 1 to 604800"),
        ({"MPIFT_MPI_THREADS": "many"}, {}, "must be one of serialized, multiple"),
        ({"MPIFT_CHAOS": "kill:x@1"}, {}, "(environment variable MPIFT_CHAOS): chaos item"),
        ({"MPIFT_WATCHDOG": "maybe"}, {}, "must be true or false (1 or 0, yes or no, on or off)"),
        ({}, {"watchdog": 2}, "watchdog = 2 (argument) must be true or false"),
        ({}, {"min_size": 1.5}, "min_size = 1.5 (argument) must be a whole number"),
        ({}, {"min_size": True}, "min_size = True (argument) must be a whole number"),
        ({}, {"retries": "3"}, "retries = '3' (argument) must be a whole number from 0 to 100"),
        ({}, {"gather_seconds": 11.0}, "gather_seconds = 11.0 (argument) must be a number from 0"),
        ({}, {"gather_seconds": 10**400}, "must be a number from 0 to 10"),
        (
            {},
            {"heartbeat_timout": 1},
            "unknown setting 'heartbeat_timout' (argument); did you mean",
        ),
        ({}, {"colour": 1}, "`mpift doctor --config` shows all settings"),
        ({"MPIFT_MIN_SIZE": "0"}, {"min_size": 2}, "MPIFT_MIN_SIZE"),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_source_and_what_is_allowed(
    environment: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.load(environment, **arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_size = 0", "min_size = 0 (PATH) must be a whole number, at least 1"),
        ("detector = 1", "detector = 1 (PATH) must be one of adaptive, static, phi"),
        ("start_timeout = 2024-01-01", "start_timeout = datetime.date(2024, 1, 1) (PATH) must be"),
        (
            "heartbeat_intervall = 1",
            "unknown setting 'heartbeat_intervall' (PATH); did you mean heartbeat_interval?",
        ),
        ("[mpift]\nmin_size = 1", "'mpift' (PATH): settings stand at the top level of the file"),
        ("min_size = 1\nmin_size = 2", "PATH is not valid TOML: "),
        ("min_size: 1", "PATH is not valid TOML: "),
        (b'checkpoint_directory = "\xff"', "PATH is not valid TOML: "),
    ],
)
def test_a_wrong_line_of_the_file_is_refused_with_file_and_key(
    folder: Path, text: str | bytes, message: str
) -> None:
    path = folder / "mpift.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=re.escape(message.replace("PATH", str(path)))):
        Config.load({})


def test_a_file_that_is_named_must_be_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file.*MPIFT_CON"):
        Config.load({"MPIFT_CONFIG": "nowhere.toml"})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"heartbeat_interval": 8.0, "heartbeat_timeout": 15.0}, ["heartbeat_interval = 8"]),
        ({"heartbeat_interval": 16.0}, ["heartbeat_interval = 16", "heartbeat_timeout = 15"]),
        ({"stall_timeout": 30.0}, ["stall_timeout = 30", "stall_warning_seconds = 60"]),
        (
            {f"health_{metric}_weight": 0.0 for metric in ("cpu", "memory", "disk", "network")},
            ["health_cpu_weight = 0 (argument)", "health_network_weight = 0 (argument)"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_names(
    arguments: dict[str, Any], names: list[str]
) -> None:
    for make in (Config, lambda **values: Config.load({}, **values)):
        with pytest.raises(ConfigError, match="do not go together") as caught:
            make(**arguments)
        assert [name for name in names if name not in str(caught.value)] == []
    assert Config(stall_timeout=60.0).stall_timeout == 60.0
    assert Config(health_cpu_weight=0.0).health_cpu_weight == 0.0


def test_what_goes_with_one_preset_alone_is_judged_once_the_nodes_are_known() -> None:
    config = Config(heartbeat_interval=10.0)  # half of large's timeout, more than half of small's
    assert config.for_nodes(9).heartbeat_timeout == 30.0
    with pytest.raises(ConfigError, match=r"heartbeat_timeout = 15 \(preset small \(8 nodes\)\)"):
        config.for_nodes(8)
    with pytest.raises(ConfigError, match="go together"):
        Config(heartbeat_interval=10.0, preset="small")
    with pytest.raises(ConfigError, match="nodes = 0"):
        config.for_nodes(0)


def test_a_variable_that_is_no_setting_is_warned_about_with_the_nearest_one() -> None:
    known = dict.fromkeys([s.variable for s in SETTINGS.values()] + sorted(OTHER_VARIABLES), "1")
    assert unknown_variables(known) == ()
    typo, strange = unknown_variables({"MPIFT_HEARTBEAT_TIMOUT": "1", "MPIFT_XY": "1", "HOME": "/"})
    assert "MPIFT_HEARTBEAT_TIMOUT is not known" in typo
    assert typo.endswith("did you mean MPIFT_HEARTBEAT_TIMEOUT?")
    assert strange.endswith("`mpift doctor --config` shows all settings")


def test_every_variable_that_the_package_reads_is_known() -> None:
    found = {
        name
        for path in (REPOSITORY / "mpift").rglob("*.py")
        for name in re.findall(r'"(MPIFT_[A-Z_]*[A-Z])"', path.read_text())
    }
    assert "MPIFT_LAUNCHED" in found
    assert found - {s.variable for s in SETTINGS.values()} <= OTHER_VARIABLES
