"""The parameter server on real ranks: versions, copies, deaths, training through it."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpift.testing.histories import load, violations
from mpift.testing.ranks import run_job, run_ranks
from tests.mpi import parameter_server_scenarios as scenarios

REPOSITORY = Path(__file__).resolve().parents[2]

# Scenarios without deaths, all on one start of three ranks; the last one ends it.
SHARED = [
    scenarios.basics,
    scenarios.stale,
    scenarios.hammered,
    scenarios.refused_optimizers,
    scenarios.stale_gradients,
    scenarios.left_early,
]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """By scenario, what the three ranks returned."""
    outcome = run_ranks(3, SHARED, timeout_seconds=100)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in (0, 1, 2)]
        for index, scenario in enumerate(SHARED)
    }


def test_all_ranks_see_what_rank_0_began_with_and_what_others_push(seen: dict[str, Any]) -> None:
    for found in seen["basics"]:
        assert found["first"] == {
            "matrix": [0, [[0.0] * 3] * 2],
            "scalar": [0, 7],
            "empty": [0, []],
            "flags": [0, [True, False]],
        }
        assert found["newer"] == [[[5.0] * 3] * 2, 1]
        assert found["again"] == [1, 0]
        assert found["kept"] == [[0.0], 0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("shape", r"ValueError: .*'matrix' has shape \(3,\), but the key has \(2, 3\)"),
        ("key", r"KeyError: .*no key 'nothing'.*'matrix', 'scalar'"),
        ("time", r"VersionTimeoutError: .*0.1 s: version 2 of 'matrix' \(the newest is 1\)"),
        (
            "future",
            r"StalePushError: .*'matrix' was computed at version 9, but the newest one is 1",
        ),
        ("alike", r"MismatchError: .*rank 0 has 'a0' of float32\[1\], rank 1 has 'a1' of float32"),
        ("bfloat16", r"ValueError: 'a' cannot be kept"),
        ("closed", r"NotInitializedError: this parameter server is closed"),
    ],
)
def test_a_mistake_is_told_in_words(seen: dict[str, Any], mistake: str, words: str) -> None:
    for found in seen["basics"]:
        assert re.match(words, found["refusals"][mistake]), found["refusals"][mistake]


def test_a_push_that_is_too_stale_changes_nothing_and_is_told_why(seen: dict[str, Any]) -> None:
    refused = seen["stale"][0]["refused"]
    for words in ("StalePushError", "'w'", "version 0", "newest, 3", "staleness=2"):
        assert words in refused
    for found in seen["stale"]:
        assert (found["value"], found["version"]) == ([-4.0, -4.0], 4)


def test_readers_are_answered_while_writers_never_pause(seen: dict[str, Any]) -> None:
    reader, *writers = seen["hammered"]
    assert len(reader["versions"]) >= 30
    assert reader["versions"] == sorted(reader["versions"])
    assert reader["longest"] < 5.0
    # Nobody waited for the reader either, and every push counts once.
    assert all(writer["pushed"] for writer in writers)
    assert reader["final"] == sum(writer["pushed"] for writer in writers)


def test_ranks_that_have_left_serve_the_one_that_still_works(seen: dict[str, Any]) -> None:
    assert set(seen["left_early"][2]["found"].values()) == {10}


def test_optimizers_that_the_server_cannot_stand_in_for_are_refused(seen: dict[str, Any]) -> None:
    for found in seen["refused_optimizers"]:
        assert "no formula for Adam" in found["adam"]
        assert "has made steps already" in found["stepped"]
        assert "asynchronous already" in found["twice"]
        assert "takes no more parameters" in found["group"]


def test_stale_gradients_are_counted_and_training_goes_on(seen: dict[str, Any]) -> None:
    found = seen["stale_gradients"]
    assert [each["stale"] for each in found] == [2, 0, 0]
    assert all(each["versions"] == {"weight": 5, "bias": 5} for each in found)
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.long
def test_one_rank_trains_as_torch_does() -> None:
    outcome = run_ranks(1, scenarios.like_torch)
    assert 0 in outcome.results, str(outcome)
    for kind, ours in outcome.results[0].items():
        theirs = scenarios.trained(kind, through_server=False)
        for mine, plain in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6, err_msg=kind)


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["primary", pytest.param("backup", marks=pytest.mark.long)])
def test_a_holder_s_death_loses_nothing_that_was_acknowledged(which: str) -> None:
    outcome = run_ranks(4, scenarios.one_holder_dies, which)
    assert sorted(outcome.results) == [0, 2, 3], str(outcome)
    # 3 survivors push 8 times, the dead one 4 times.
    for found in outcome.results.values():
        assert found["rising"]
        assert found["versions"] == [28] * 3, str(outcome)
        assert found["values"] == [-28.0] * 3


@pytest.mark.long
def test_the_example_survives_a_death_and_reports_no_lost_key(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    words = ["-m", "mpift", "run", "-np", "3", "--chaos", "kill:1@10", "--summary", str(summary)]
    script = [str(REPOSITORY / "examples/parameter_server.py"), "--epochs", "3"]
    command = [sys.executable, *words, sys.executable, *script, "--at-least", "0.15"]
    outcome = run_job(command, ranks=3)
    assert outcome.exit_code == 0, str(outcome)
    assert "keys: 8, lost: none" in outcome.stdout
    found = json.loads(summary.read_text())
    assert (found["keys_lost"], found["keys"]) == ([], 8)
    assert found["accuracy"] >= 0.15  # by chance 0.1; 0.93 takes ten epochs


def test_keys_whose_holders_both_died_are_lost_by_name_and_others_go_on() -> None:
    outcome = run_ranks(4, scenarios.both_holders_die)
    assert sorted(outcome.results) == [0, 3], str(outcome)
    for found in outcome.results.values():
        lost = found["lost"]
        for words in found["refused"].values():
            assert words.startswith("KeyLostError"), words
            assert repr(lost[0]) in words
        assert all(repr(key) in found["refused"]["many"] for key in lost)
        assert len(found["kept"]) > 0
        assert all(version == 6 for version in found["kept"])
    assert "lost in the parameter server" in outcome.stderr


def check_history(folder: Path, seed: int, deaths: int) -> None:
    """Random pushes and pulls while ranks die. MPI itself crashes in some double faults; then fewer
    are left, and what they saw must be right all the same."""
    chance = random.Random(seed)
    ranks = chance.choice((2, 3, 4)) if deaths == 1 else 4
    dying = [(m, chance.randrange(10, 400)) for m in chance.sample(range(ranks), deaths)]
    way = f"seed {seed}: of {ranks} ranks these die after milliseconds: {dying}"
    print(way)
    outcome = run_ranks(ranks, scenarios.recorded, str(folder), seed, dying, 60)
    told = f"{way}\n{outcome}"
    assert not outcome.timed_out, told
    survivors = set(range(ranks)) - {member for member, _ in dying}
    crashed = deaths > 1 and "ompi_comm_" in outcome.stderr
    assert set(outcome.results) == survivors or (crashed and set(outcome.results) < survivors), told
    history = load(folder)
    assert len(history) > 60 * len(outcome.results), told
    wrong = violations(history, lambda _: 0.0, lambda value, update: value + update)  # type: ignore[operator]
    assert not wrong, "\n".join([told, *wrong])
    found = list(outcome.results.values())
    assert all(each == found[0] for each in found), told
    if deaths == 1:
        assert not found[0]["lost"], told
    for operation in history if found else ():
        last = found[0]["final"].get(operation.key)
        assert last is None or (operation.version or 0) <= last, told


def test_a_history_with_a_death_is_linearizable(tmp_path: Path) -> None:
    check_history(tmp_path, random.SystemRandom().randrange(1 << 32), deaths=1)


@pytest.mark.long
@pytest.mark.parametrize("deaths", [1] * 20 + [2] * 20)
def test_many_histories_with_deaths_are_linearizable(tmp_path: Path, deaths: int) -> None:
    check_history(tmp_path, random.SystemRandom().randrange(1 << 32), deaths)
