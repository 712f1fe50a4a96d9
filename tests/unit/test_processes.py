"""Whether a process is really gone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import psutil

from mpift.transport import processes


def test_a_living_process_is_not_gone_and_a_killed_one_is_even_before_it_is_reaped() -> None:
    here = processes.identify(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = psutil.Process(child.pid).create_time()
    identity = dataclasses.replace(here, member=1, pid=child.pid, start_time=start)
    assert processes.is_gone(identity, here) is False
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert processes.is_gone(identity, here) is True
    child.wait()
    assert processes.confirmed_gone([identity], here) == {1}


def test_another_process_with_the_same_pid_is_not_the_one() -> None:
    here = processes.identify(0)
    earlier = dataclasses.replace(here, start_time=here.start_time - 10)
    assert processes.is_gone(earlier, here) is True


def test_nothing_is_known_of_processes_on_other_nodes() -> None:
    here = processes.identify(0)
    elsewhere = dataclasses.replace(here, node="other/kernel", pid=1)
    assert processes.is_gone(elsewhere, here) is None
    assert processes.confirmed_gone([elsewhere], here) == frozenset()
