"""The directory of checkpoints: what counts, what is damaged, and who may write there."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mpift.checkpoint import manifest as manifests
from mpift.checkpoint.damage import work_bytes
from mpift.checkpoint.directory import MAINTENANCE, Directory, block_name, step_of, written_at
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.occupancy import LEASE_SECONDS, READER_SECONDS, Live
from mpift.errors import CheckpointDamagedError, CheckpointError
from mpift.transport.processes import identify
from tests.unit.checkpoints import arrays, commit, flip, save

# -- names -----------------------------------------------------------------------------------------


def test_a_block_file_names_the_generation_and_the_step_that_wrote_it() -> None:
    name = block_name(150, member=1, epoch=0, attempt=2, generation=3)
    assert name == "0000000150-w1-e0-a2-g3.h5"
    assert written_at(name) == written_at(f"{name}.0a1b2c3d.new") == (3, 150)
    assert written_at("notes.h5") is None
    assert step_of("0000000150") == (150, None)
    assert step_of("0000000150.g4") == (150, 4)
    assert step_of("0000000150.0a1b2c3d.new") is None


# -- what there is ---------------------------------------------------------------------------------


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "none")
    assert not directory.committed()
    assert not directory.damaged()
    assert not directory.readers()
    assert directory.newest_good() == (None, [])
    assert directory.live() is None
    assert directory.generation() == 0
    assert not (tmp_path / "none").exists()


def test_a_folder_without_commit_is_no_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    (saved.committed.folder / "COMMIT").unlink()
    assert Directory(tmp_path).committed() == []


def test_steps_of_a_later_generation_are_newer_than_higher_steps_of_an_older_one(
    tmp_path: Path,
) -> None:
    save(tmp_path, 100, arrays(w=10))
    save(tmp_path, 150, arrays(w=10))
    save(tmp_path, 110, arrays(w=10), generation=2)
    again = save(tmp_path, 150, arrays(1, w=10), generation=3)
    directory = Directory(tmp_path)
    found = [(c.order, c.folder.name) for c in directory.committed()]
    assert found == [
        ((1, 100), "0000000100"),
        ((1, 150), "0000000150"),
        ((2, 110), "0000000110"),
        ((3, 150), "0000000150.g3"),
    ]
    assert directory.find(150) == again.committed
    assert directory.find(150, 1).folder.name == "0000000150"
    assert directory.generation() == 3


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 100, arrays(w=10))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*newest ones are: 100"):
        Directory(tmp_path).find(7)
    with pytest.raises(CheckpointError, match="step 100 of generation 9"):
        Directory(tmp_path).find(100, 9)


def test_pins_are_listed_by_name(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    for name in ("PIN.paper", "PIN.best", "PIN.half.0a1b2c3d.new"):
        (saved.committed.folder / name).touch()
    assert Directory(tmp_path).committed()[0].pins == ("best", "paper")


# -- damage ----------------------------------------------------------------------------------------


def test_a_commit_that_says_nothing_is_listed_as_damaged_and_not_as_a_checkpoint(
    tmp_path: Path,
) -> None:
    good, bad, moved = (save(tmp_path, step, arrays(w=10)).committed for step in (1, 2, 3))
    (bad.folder / "COMMIT").write_bytes(b"\0" * 90)
    moved.folder.rename(tmp_path / "steps" / "0000000004")
    directory = Directory(tmp_path)
    assert [c.step for c in directory.committed()] == [good.step]
    (first, why), (second, other) = directory.damaged()
    assert first == bad.folder
    assert "COMMIT is no COMMIT file" in why
    assert second.name == "0000000004"
    assert "is that of step 3, not of 4" in other


def test_a_changed_manifest_is_named_with_both_digests(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10)).committed
    path = saved.folder / "manifest.json"
    directory = Directory(tmp_path)
    flip(path, 60)
    with pytest.raises(CheckpointDamagedError) as caught:
        directory.manifest(saved)
    found = manifests.manifest_digest(path.read_bytes())
    for part in (str(path), "not what was committed", found, saved.record.manifest):
        assert part in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json is missing"):
        directory.manifest(saved)


def test_a_manifest_of_another_checkpoint_is_refused_even_if_commit_names_it(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    directory = Directory(tmp_path)
    for change, what in (({"step": 6}, "step 6"), ({"order": (9, 5)}, r"order \(9, 5\)")):
        data = manifests.encode(replace(saved.manifest, **change))
        (saved.committed.folder / "manifest.json").write_bytes(data)
        record = replace(saved.committed.record, manifest=manifests.manifest_digest(data))
        with pytest.raises(CheckpointDamagedError, match=f"has {what}, and COMMIT says"):
            directory.manifest(replace(saved.committed, record=record))


def test_a_look_at_the_files_sees_missing_and_short_ones_and_a_thorough_one_every_bit(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=1000))
    directory = Directory(tmp_path)
    path = tmp_path / saved.manifest.files[0].name
    size = path.stat().st_size
    assert directory.check(saved.committed, thorough=True) == saved.manifest

    flip(path, saved.manifest.tensors[0].blocks[2].offset)
    directory.check(saved.committed)
    with pytest.raises(CheckpointDamagedError, match=f"step 5: .*{path.name}"):
        directory.check(saved.committed, thorough=True)

    os.truncate(path, size - 1)
    with pytest.raises(CheckpointDamagedError, match=f"has {size - 1} bytes instead of {size}"):
        directory.check(saved.committed)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{path.name} is missing"):
        directory.check(saved.committed)


def test_every_damage_is_told_and_the_whole_way_is_counted(tmp_path: Path) -> None:
    first = save(tmp_path, 5, arrays(w=1000, v=300))
    both = {**arrays(w=1000, v=300), "u": arrays(3, u=600)["u"]}
    second = save(tmp_path, 6, both, base=first)
    directory = Directory(tmp_path)
    w = second.manifest.named()["w"].blocks
    path = tmp_path / w[0].file
    for index in (0, 3):
        flip(path, w[index].offset)
    (tmp_path / second.manifest.named()["u"].blocks[0].file).unlink()
    went: list[int] = []
    told = list(directory.damage(second.committed, went.append))
    assert sum(went) == work_bytes(second.manifest)
    assert len(told) == 4, told
    assert f"{path} is not what was written" in told[0]
    assert "g1.h5 is missing" in told[1]
    for line, index in zip(told[2:], (0, 3), strict=True):
        assert "w" in line
        assert f"block {index}" in line
    assert len(list(directory.damage(first.committed))) == 3


def test_the_newest_good_checkpoint_comes_with_the_damaged_newer_ones(tmp_path: Path) -> None:
    saved = [save(tmp_path, step, arrays(step, w=100)) for step in (1, 2, 3, 4)]
    directory = Directory(tmp_path)
    assert directory.newest_good() == ((saved[3].committed, saved[3].manifest), [])
    (saved[3].committed.folder / "COMMIT").write_text("{")
    flip(saved[2].committed.folder / "manifest.json", 9)
    (tmp_path / saved[1].manifest.files[0].name).unlink()
    good, problems = directory.newest_good()
    assert good == (saved[0].committed, saved[0].manifest)
    assert [folder.name[-1] for folder, _ in problems] == ["4", "3", "2"]


def test_quarantine_moves_the_folder_with_its_reason_and_leaves_the_blocks(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=100))
    directory = Directory(tmp_path)
    place = directory.quarantine(saved.committed.folder, "a block is wrong")
    assert place == tmp_path / "quarantine" / "0000000005"
    assert (place / "REASON.txt").read_text() == "a block is wrong\n"
    assert directory.committed() == []
    assert (tmp_path / saved.manifest.files[0].name).exists()
    # Another rank that found the same gets there too late.
    assert directory.quarantine(saved.committed.folder, "a block is wrong") == place

    save(tmp_path, 5, arrays(w=101), generation=2)
    again = directory.quarantine(saved.committed.folder, "again")
    assert again.name == "0000000005-2"
    assert directory.quarantine(saved.committed.folder, "again") == again
    with pytest.raises(FileNotFoundError):
        directory.quarantine(tmp_path / "steps" / "0000000009", "never was")


# -- writing ---------------------------------------------------------------------------------------


def test_a_new_checkpoint_has_the_plain_name_unless_a_committed_one_has_it(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    directory = Directory(tmp_path)
    assert directory.free_name(6, 1) == "0000000006"
    assert directory.free_name(5, 2) == "0000000005.g2"
    with pytest.raises(CheckpointError, match=r"step 5 can't be saved twice in generation 1"):
        directory.free_name(5, 1)
    commit(directory, replace(saved.manifest, order=(2, 5)))
    with pytest.raises(CheckpointError, match=r"0000000005\.g2 is committed already"):
        directory.free_name(5, 2)
    # What a damaged one was is not known: it keeps its name.
    (saved.committed.folder / "COMMIT").write_text("?")
    assert directory.free_name(5, 3) == "0000000005.g3"


def test_what_was_never_committed_makes_room_for_the_next_attempt(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    (saved.committed.folder / "COMMIT").unlink()
    assert Directory(tmp_path).free_name(5, 1) == "0000000005"
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_commit_that_comes_while_its_folder_is_discarded_is_not_lost(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    record = saved.committed.folder / "COMMIT"
    data = record.read_bytes()
    record.unlink()

    class CommittedMeanwhile(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if old == saved.committed.folder:
                record.write_bytes(data)
            super().rename(old, new)

    directory = Directory(tmp_path, CommittedMeanwhile())
    assert directory.discard(saved.committed.folder) is None
    assert directory.committed() == [saved.committed]
    directory.check(saved.committed, thorough=True)


class Refusing(Disk):
    def __init__(self, number: int) -> None:
        self.number = number

    def create(self, path: Path, data: bytes) -> None:
        raise OSError(self.number, os.strerror(self.number), str(path))

    mark = create


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission is denied"),
        (errno.EPERM, "not permitted"),
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_directory_that_cannot_be_written_is_refused_with_a_remedy(
    tmp_path: Path, number: int, remedy: str
) -> None:
    with pytest.raises(CheckpointError, match=f"written to {tmp_path}.*{remedy}"):
        Directory(tmp_path, Refusing(number)).prepare()


def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a file is in the way"):
        Directory(tmp_path / "file").prepare()
    with pytest.raises(CheckpointError, match="a file is in the way"):
        Directory(tmp_path / "file" / "deeper").prepare()


def test_preparing_makes_the_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "down"
    Directory(root).prepare()
    Directory(root).prepare()
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*")) == [
        "ID",
        "blocks",
        "steps",
    ]


# -- who is there ----------------------------------------------------------------------------------


def pretend(path: Path, age_seconds: float, **what: object) -> None:
    """A claim or reader of another process, touched that long ago."""
    me = identify(0)
    live = Live("other", me.host, me.node, me.pid, me.start_time, 7, 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(live), **what}))
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))


def test_each_claim_begins_a_generation_after_all_that_left_something(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert directory.claim("a") == 1
    assert directory.claim("a") == 2
    directory.release("a")
    assert directory.live() is None
    assert list((tmp_path / "live").iterdir()) == []

    save(tmp_path, 5, arrays(w=10), generation=4)
    assert directory.claim("b") == 5
    directory.release("b")
    (tmp_path / "blocks" / f"{block_name(9, 0, 0, 0, 8)}.0a1b2c3d.new").touch()
    assert directory.claim("c") == 9
    live = directory.live()
    assert live is not None
    assert (live.job, live.pid, live.generation) == ("c", os.getpid(), 9)
    assert len(list((tmp_path / "live").iterdir())) == 1


def test_a_live_job_is_named_to_another_one_that_wants_to_write(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    generation = directory.claim("first")
    with pytest.raises(CheckpointError) as caught:
        directory.claim("second")
    for part in (str(tmp_path), "first", str(os.getpid()), socket.gethostname(), "last seen"):
        assert part in str(caught.value)
    directory.refresh("first", generation)  # still has it
    directory.release("second")  # has nothing
    assert directory.live() is not None


def test_the_claim_of_a_process_that_has_ended_does_not_count(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom mpift.checkpoint.directory import Directory\n"
        "print(Directory(pathlib.Path(sys.argv[1])).claim('gone'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]
    assert len(list((tmp_path / "live").iterdir())) == 1
    assert Directory(tmp_path).live() is None
    assert Directory(tmp_path).claim("next") == 2


def test_a_pid_that_another_process_has_now_is_not_the_job(tmp_path: Path) -> None:
    path = tmp_path / "live" / "0000000007.json"
    pretend(path, 0, start_time=identify(0).start_time + 1)
    assert Directory(tmp_path).claim("next") == 8


@pytest.mark.parametrize(("age", "alive"), [(-1.0, True), (1.0, False)])
def test_a_job_of_another_node_lives_as_long_as_it_refreshes_its_claim(
    tmp_path: Path, age: float, alive: bool
) -> None:
    path = tmp_path / "live" / "0000000007.json"
    pretend(path, LEASE_SECONDS + 10 * age, host="far", node="far/1", pid=4)
    directory = Directory(tmp_path)
    if alive:
        with pytest.raises(CheckpointError, match="process 4 on host far"):
            directory.claim("next")
    else:
        assert directory.claim("next") == 8


def test_a_claim_that_cannot_be_read_counts_as_alive_until_its_lease_is_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "live" / "0000000007.json"
    path.parent.mkdir()
    path.write_bytes(b"\0\0")
    with pytest.raises(CheckpointError, match="host unknown"):
        Directory(tmp_path).claim("next")
    old = path.stat().st_mtime - LEASE_SECONDS - 1
    os.utime(path, (old, old))
    assert Directory(tmp_path).claim("next") == 8


def test_a_job_that_lost_its_claim_is_told_when_it_refreshes(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    pretend(tmp_path / "live" / "0000000007.json", LEASE_SECONDS + 9, host="far", node="far/1")
    assert directory.claim("next") == 8
    with pytest.raises(CheckpointError, match=r"job next has it: process .* generation 8"):
        directory.refresh("other", 7)
    directory.release("next")
    with pytest.raises(CheckpointError, match="it is gone"):
        directory.refresh("next", 8)


def test_refreshing_makes_a_claim_young_again(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    path = tmp_path / "live" / f"{directory.claim('mine'):010d}.json"
    os.utime(path, (1e9, 1e9))
    directory.refresh("mine", 1)
    assert path.stat().st_mtime > 1.5e9


def test_whoever_refreshes_speaks_for_the_job_from_then_on(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    pretend(tmp_path / "live" / "0000000007.json", 0, start_time=1)  # its coordinator has died
    assert directory.live() is None
    directory.refresh("other", 7)
    live = directory.live()
    assert live is not None
    assert (live.job, live.pid, live.generation) == ("other", os.getpid(), 7)


def test_storage_that_cannot_be_reached_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    read = Path.read_bytes
    for number in (errno.EACCES, errno.ETIMEDOUT, errno.EIO):
        for name in ("COMMIT", "manifest.json"):

            def refused(path: Path, number: int = number, name: str = name) -> bytes:
                if path.name == name:
                    raise OSError(number, os.strerror(number), str(path))
                return read(path)

            monkeypatch.setattr(Path, "read_bytes", refused)
            if number == errno.EIO:  # a bad sector is
                good, problems = Directory(tmp_path).newest_good()
                assert good is None
                assert problems[0][0] == saved.committed.folder
                assert f"{name} can't be read: Input/output error" in problems[0][1]
            else:
                with pytest.raises(OSError, match=name):
                    Directory(tmp_path).newest_good()


def test_of_jobs_that_claim_at_the_same_time_one_gets_the_directory(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    got: list[tuple[str, int]] = []
    refused: list[str] = []

    def run(job: str) -> None:
        start.wait()
        try:
            got.append((job, Directory(tmp_path).claim(job)))
        except CheckpointError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=run, args=(f"job{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(refused) == 7
    assert all(f"by job {got[0][0]}" in text for text in refused)


class Interrupted(Disk):
    """Something else happens right before the first link."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = [meanwhile]

    def link(self, old: Path, new: Path) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()
        super().link(old, new)


def test_a_job_that_came_and_went_during_a_claim_is_not_overlooked(tmp_path: Path) -> None:
    def other_job() -> None:
        other = Directory(tmp_path)
        assert other.claim("other") == 1
        save(tmp_path, 5, arrays(w=10), generation=1)
        other.release("other")

    assert Directory(tmp_path, Interrupted(other_job)).claim("mine") == 2


def test_a_newer_claim_that_was_made_meanwhile_wins(tmp_path: Path) -> None:
    def other_job() -> None:
        for generation in (1, 2):
            assert Directory(tmp_path).claim("other") == generation

    with pytest.raises(CheckpointError, match="by job other"):
        Directory(tmp_path, Interrupted(other_job)).claim("mine")
    assert len(list((tmp_path / "live").iterdir())) == 1


def test_a_job_waits_for_somebody_who_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path)
    directory.claim(MAINTENANCE)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            directory.release(MAINTENANCE)

    monkeypatch.setattr("mpift.checkpoint.directory.time.sleep", sleep)
    Directory(tmp_path).claim("mine")
    assert len(waits) == 3


# -- readers ---------------------------------------------------------------------------------------


def test_a_reader_is_listed_while_it_reads(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.prepare()
    with directory.reading(), directory.reading():
        assert [reader.pid for reader in directory.readers()] == [os.getpid()] * 2
    assert directory.readers() == []
    assert list((tmp_path / "readers").iterdir()) == []


def test_readers_that_have_ended_do_not_count_and_are_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "readers"
    far = {"host": "far", "node": "far/1"}
    pretend(folder / "gone.json", 0, start_time=1)
    pretend(folder / "old.json", READER_SECONDS + 9, **far)
    pretend(folder / "young.json", READER_SECONDS - 60, **far)
    directory = Directory(tmp_path)
    assert [reader.host for reader in directory.readers()] == ["far"]
    directory.forget_readers()
    assert [path.name for path in folder.iterdir()] == ["young.json"]


def test_a_directory_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    with Directory(tmp_path, Refusing(errno.EROFS)).reading():
        assert Directory(tmp_path).readers() == []
    with Directory(tmp_path / "none").reading():
        assert not (tmp_path / "none").exists()
