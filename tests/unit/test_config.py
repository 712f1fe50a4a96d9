"""Settings: where they come from, what a preset gives, and how ranks compare theirs."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpift._version import __version__
from mpift.config import FOLLOWS, PRESETS, SETTINGS, Config
from mpift.settings import VERSION_KEY, Setting, differences
from tests.unit.settings_places import REPOSITORY, folder

__all__ = ["folder"]  # a fixture for these tests

PAGE = REPOSITORY / "docs/reference/settings.md"


def another(setting: Setting) -> Any:
    """An allowed value that is not the default."""
    value = getattr(Config(), setting.name)
    if setting.choices:
        return next(choice for choice in setting.choices if choice != value)
    texts = {"chaos": "kill:1@2", "quorum": "0.75", "patience": "adaptive"}
    if setting.name in texts:
        return texts[setting.name]
    by_kind = {"bool": lambda: not value, "int": lambda: value + 1, "str": lambda: "elsewhere"}
    return by_kind.get(setting.kind, lambda: value * 1.01 or 300.0)()


def as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


# -- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_can_be_given_in_each_of_the_three_ways(
    setting: Setting, folder: Path
) -> None:
    name, value = setting.name, another(setting)
    assert getattr(Config(), name) != value
    text = str(value)
    by_variable = Config.load({setting.variable: text})
    assert by_variable.source(name) == f"environment variable {setting.variable}"
    by_argument = Config.load({}, **{name: value})
    assert by_argument.source(name) == Config(**{name: value}).source(name) == "argument"
    (folder / "mpift.toml").write_text(f"{name} = {as_toml(value)}\n")
    by_file = Config.load({})
    assert by_file.source(name) == str(folder / "mpift.toml")
    assert by_variable == by_argument == by_file == Config(**{name: value})
    assert getattr(by_file, name) == value


def test_arguments_win_over_variables_those_over_the_file_and_that_over_presets_and_defaults(
    folder: Path,
) -> None:
    lines = ("min_size = 4", "retries = 4", "observers = 4", "heartbeat_timeout = 44")
    (folder / "mpift.toml").write_text("\n".join(lines))
    environment = {"MPIFT_MIN_SIZE": "5", "MPIFT_RETRIES": "5"}
    config = Config.load(environment, nodes=9, min_size=6, observers=None)
    assert (config.min_size, config.retries, config.observers) == (6, 5, 4)
    assert (config.heartbeat_timeout, config.sync_timeout) == (44.0, 20.0)
    assert config.rebuild_timeout == Config().rebuild_timeout
    assert [config.source(name) for name in ("sync_timeout", "rebuild_timeout")] == [
        "preset large (9 nodes)",
        "default",
    ]


def test_an_empty_variable_is_no_setting() -> None:
    assert Config.load({"MPIFT_MIN_SIZE": "", "MPIFT_CONFIG": ""}).source("min_size") == "default"


def test_the_settings_file_can_be_named_and_then_replaces_the_usual_one(folder: Path) -> None:
    (folder / "mpift.toml").write_text("min_size = 2")
    (folder / "other.toml").write_text("observers = 2")
    config = Config.load({"MPIFT_CONFIG": "other.toml"})
    assert (config.min_size, config.observers) == (1, 2)
    assert config.source("observers") == str(folder / "other.toml")


@pytest.mark.parametrize(
    ("words", "value"),
    [(("1", "true", "Yes", "ON", " on "), True), (("0", "False", "no", "off"), False)],
)
def test_a_switch_understands_the_usual_words(words: tuple[str, ...], value: bool) -> None:
    for word in words:
        assert Config.load({"MPIFT_WATCHDOG": word}).watchdog is value


def test_a_whole_number_is_a_number_and_is_kept_as_one() -> None:
    assert repr(Config(gather_seconds=1).gather_seconds) == "1.0"
    assert Config(gather_seconds=1) == Config(gather_seconds=1.0)


# -- presets ---------------------------------------------------------------------------------------


def test_the_presets_are_those_that_were_promised() -> None:
    names = "heartbeat_interval heartbeat_timeout checkpoint_every sync_timeout retries".split()
    values = {
        8: (3.0, 15.0, 100, 10.0, 3),
        9: (5.0, 30.0, 500, 20.0, 5),
    }
    for nodes, expected in values.items():
        by_name = Config(preset="small" if nodes == 8 else "large")
        for config in (Config().for_nodes(nodes), Config.load({}, nodes=nodes), by_name):
            assert tuple(getattr(config, name) for name in names) == expected


def test_what_the_preset_gives_is_allowed() -> None:
    for preset in PRESETS.values():
        for name, value in preset.items():
            assert SETTINGS[name].accept(value, "preset") == value
            assert SETTINGS[name].default is None
    for name, leader in FOLLOWS.items():
        for bound in (SETTINGS[leader].low, SETTINGS[leader].high):
            assert SETTINGS[name].accept(bound, leader) == bound


def test_once_the_nodes_are_known_exactly_what_the_preset_gave_changes() -> None:
    before = Config.load({"MPIFT_SYNC_TIMEOUT": "11"}, retries=3)
    after = before.for_nodes(100)
    changed = {name for name in SETTINGS if getattr(before, name) != getattr(after, name)}
    assert changed == {
        *("heartbeat_interval", "heartbeat_timeout", "hang_timeout", "checkpoint_every"),
    }
    assert before.source("heartbeat_timeout") == "preset small (nodes unknown)"
    assert after.source("heartbeat_timeout") == "preset large (100 nodes)"
    assert after.source("hang_timeout") == "as heartbeat_timeout"
    assert (after.source("retries"), after.preset) == ("argument", "auto")
    assert after.for_nodes(1) == before
    assert after.for_nodes(1).source("retries") == "argument"
    named = Config(preset="small")
    assert named.for_nodes(100) == named
    assert named.for_nodes(100).source("retries") == "preset small"


def test_the_hang_timeout_follows_the_heartbeats_unless_it_is_set() -> None:
    assert Config(heartbeat_timeout=40.0).for_nodes(9).hang_timeout == 40.0
    assert Config(heartbeat_timeout=40.0, hang_timeout=2.0).for_nodes(9).hang_timeout == 2.0


# -- the object ------------------------------------------------------------------------------------


def test_equality_and_hash_go_by_values_not_by_sources() -> None:
    one, other = Config.load({"MPIFT_MIN_SIZE": "2"}), Config(min_size=2)
    assert one.source("min_size") != other.source("min_size")
    assert one == other
    assert hash(one) == hash(other)
    assert one != Config()


def test_it_cannot_be_changed_and_holds_nothing_else() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_size = 2  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


def test_a_copy_keeps_values_and_sources() -> None:
    config = Config.load({"MPIFT_MIN_SIZE": "2"}, nodes=9)
    changed = dataclasses.replace(config, observers=2)
    for copy in (pickle.loads(pickle.dumps(config)), changed):
        assert copy.source("min_size") == "environment variable MPIFT_MIN_SIZE"
        assert copy.source("retries") == "preset large (9 nodes)"
        assert copy.for_nodes(1).retries == 3
    assert (changed.observers, changed.source("observers")) == (2, "argument")
    assert dataclasses.replace(config, retries=7).for_nodes(1).retries == 7


# -- ranks that differ -----------------------------------------------------------------------------


def test_equal_settings_have_one_digest_in_every_process_and_others_another() -> None:
    code = "from mpift.config import Config; print(Config(min_size=2).digest())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert int(done.stdout) == Config.load({"MPIFT_MIN_SIZE": "2"}).digest()
    assert 0 <= int(done.stdout) < 1 << 63
    assert len({Config(min_size=size).digest() for size in range(1, 100)}) == 99


def test_what_may_differ_between_ranks_changes_neither_digest_nor_comparison() -> None:
    own: dict[str, Any] = {
        "checkpoint_directory": "/local",
        "link_bytes_per_second": 1e9,
        "network_interface": "eth1",
        "preset": "small",
    }
    assert {name for name, setting in SETTINGS.items() if setting.per_rank} == set(own)
    one, other = Config(), Config(**own)
    assert one != other
    assert one.digest() == other.digest()
    assert differences([one.as_text(), other.as_text()]) is None


def test_ranks_with_other_settings_are_named_with_values_and_sources() -> None:
    usual = Config().for_nodes(3).as_text()
    other = Config.load({"MPIFT_OBSERVERS": "2"}, nodes=3, min_size=2).as_text()
    argued = Config.load({}, nodes=3, min_size=1).as_text()
    text = differences([usual, usual, other, argued, other])
    assert text == (
        "ranks differ in what must be equal:"
        " min_size is 1 on ranks 0-1, 3 (default or argument), 2 on ranks 2, 4 (argument);"
        " observers is 3 on ranks 0-1, 3 (default),"
        " 2 on ranks 2, 4 (environment variable MPIFT_OBSERVERS)."
        " Start all ranks with the same settings"
    )
    assert differences([usual, usual]) is None


def test_numbers_that_differ_in_the_last_digit_differ() -> None:
    rows = [Config(gather_seconds=value).as_text() for value in (0.1 + 0.2, 0.3)]
    assert "0.30000000000000004 on rank 0" in str(differences(rows))


def test_another_version_is_told_first_and_its_unknown_settings_with_it() -> None:
    here = Config().as_text()
    there = {key: value for key, value in here.items() if key != "observers"}
    there[VERSION_KEY] = ("0.0.1", "/old/mpift")
    text = str(differences([here, there]))
    assert text.startswith(f"ranks differ in what must be equal: mpift version is {__version__} on")
    assert "0.0.1 on rank 1 (/old/mpift)" in text
    assert "observers is 3 on rank 0 (default), not known on rank 1 (another version)" in text
    assert text.endswith("Start all ranks with one version")


def test_an_error_about_many_ranks_and_settings_stays_short() -> None:
    one = Config().as_text()
    other = Config(**{name: another(SETTINGS[name]) for name in list(SETTINGS)[1:12]}).as_text()
    text = str(differences([one, other] * 500))
    assert "on ranks 0, 2, 4, 6 and 496 more" in text
    assert "; and 7 more. Start" in text
    assert len(text) < 1000


# -- the page --------------------------------------------------------------------------------------


def documented_default(setting: Setting) -> str:
    if setting.name in PRESETS["small"]:
        return " / ".join(setting.text(PRESETS[preset][setting.name]) for preset in PRESETS)
    if setting.name in FOLLOWS:
        return f"as {FOLLOWS[setting.name]}"
    words = {32 << 20: "32 MiB", 1 << 20: "1 MiB"}
    return words.get(setting.default) or setting.text(setting.default)


def test_every_setting_is_documented_with_variable_default_and_range() -> None:
    lines = PAGE.read_text().partition("## All settings")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(SETTINGS)
    for (_, variable, default, range_, meaning), setting in zip(
        rows, SETTINGS.values(), strict=True
    ):
        assert variable == f"`{setting.variable}`"
        assert default.replace("`", "") == documented_default(setting), setting.name
        assert range_ == setting.allowed, setting.name
        assert meaning.endswith("†") == setting.per_rank, setting.name


def test_the_presets_of_the_page_are_the_real_ones() -> None:
    part = PAGE.read_text().partition("## Presets")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    assert rows == [
        [f"`{name}`", *(SETTINGS[name].text(preset[name]) for preset in PRESETS.values())]
        for name in PRESETS["small"]
    ]


def test_the_file_shown_on_the_page_is_accepted(folder: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    (folder / "mpift.toml").write_text(example[1])
    config = Config.load({})
    assert config.source("detector") == str(folder / "mpift.toml")
    assert (config.heartbeat_interval, config.watchdog) == (2.0, True)
