"""The composition root: builds the parts, hands hooks down, owns start and stop.

One runtime a process, since one thread owns MPI. ``start`` and ``shutdown`` are called by
``mpift.init``, ``Communicator`` and the framework faces; ``current`` gives it to them.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpift import introduction, memory
from mpift.checkpoint import group as groups
from mpift.checkpoint.job import JobGroup
from mpift.config import Config, unknown_variables
from mpift.core import chaos, events
from mpift.core.membership import View, by_node
from mpift.devices.accelerators import accelerator_probe
from mpift.devices.faults import words_of
from mpift.devices.probes import HostProbe
from mpift.errors import ConfigError, ExitCode, MpiftError, NotInitializedError
from mpift.observe import lines
from mpift.observe.reporter import Reporter
from mpift.parameter_server.hub import Hub
from mpift.recovery.transfer import Transfer
from mpift.reduction.arenas import Arenas
from mpift.reduction.calls import Calls, result_of
from mpift.reduction.examinations import Examinations
from mpift.reduction.lanes import GradientLanes
from mpift.reduction.operations import Operation
from mpift.transport import exits, startup
from mpift.transport.agreements import Agreements
from mpift.transport.detection import Detection
from mpift.transport.detection import Hooks as DetectionHooks
from mpift.transport.injection import Injector
from mpift.transport.monitor import Monitor
from mpift.transport.node import Node
from mpift.transport.part import Part, Post
from mpift.transport.service import Hooks, Service
from mpift.transport.solo import make_world
from mpift.transport.world import Rebuilt

_FIRST_LANES = 3  # operations, one optimizer's gradients, and examinations
_WORDS_CHARS = 200  # of a lost rank's last words, in the report of the new view

_Part = TypeVar("_Part", bound=Part)

_current: Runtime | None = None
_lock = threading.Lock()


class Runtime:
    """Everything that a process needs to take part in a job."""

    def __init__(self, comm: Any, config: Config) -> None:
        self.config = self.given = config
        self.comm = comm
        self._launch_rank = startup.launch_rank()  # what events and fault schedules go by
        self.host = socket.gethostname()
        self._reporter = Reporter(self._launch_rank)
        self.emit = self._reporter.emit
        self._injector = Injector(
            chaos.parse(config.chaos, startup.launch_size()),
            self._launch_rank,
            lambda fault, step: self.emit(events.FaultInjected, str(fault), step),
            peers=lambda: [self.identities[m].pid for m in self.neighbours if m != self.member],
            warn=lines.warn,
        )
        self.strike = self._injector.strike
        self._service = Service(
            lambda: make_world(comm, config, _FIRST_LANES),
            config,
            Hooks(self._view_changed, self._give_up, self.strike),
        )
        self._node: Node | None = None
        self._token = secrets.token_hex()  # the job's, once the ranks have met
        self._probe: HostProbe | None = None
        self.exits = exits.Exits(self._last_words, words_of)
        self._monitor = Monitor(self._service, config, self._give_up, self._abort_job)
        if startup.under_launcher():  # otherwise there is nobody to notice
            self.exits.install()
            self._monitor.start()
        self.emit(events.RankStarting)
        self._service.start()
        self.post: Post = self._service.post  # what a part needs to talk to other ranks
        world = self._service.world
        self.member = world.member
        self.identities = world.identities
        self.view: View = world.view  # as the script sees it: it changes only inside our calls
        # Among the node's processes at launch, which devices go by: this one's place, their number.
        self.launch_seat = (self.neighbours.index(self.member), len(self.neighbours))
        # Rounds that the script asked for, those applied, and those of them it was late for.
        self.steps_called = self.steps_applied = self.rounds_missed = 0
        self.round_view: View = world.view  # the view that reduced the last gradient round
        self.exchange = introduction.exchange_through(self.operate)
        self.gradients = GradientLanes(
            self._service, Arenas(self), self.operate, self.on_service, self.require_service
        )
        self._calls = Calls(self._service, self.member, self.gradients.make_room)
        self.waiting = self._calls.waiting
        self.agreements = self.attach(Agreements(self.post, lambda: self.config))
        self.transfer = self.attach(Transfer(self.post))
        self.examinations = Examinations(self._service, self.member, self.on_service, self.waiting)
        atexit.register(_at_exit)
        with self._monitor.introduction():
            self._detect()
        groups.provide(lambda: self.savers)
        self.emit(events.RankStarted, self.host, os.getpid(), self.view.size)
        for warning in (*world.warnings, *unknown_variables()) if self.rank == 0 else ():
            lines.warn(warning)

    def _detect(self) -> None:
        """Agree on the settings, then watch over the others and be watched over."""
        self.config = self.given.for_nodes(len(self.nodes))
        if self.view.size == 1:
            return
        token = self._token = introduction.agree_on_settings(self.config, self.exchange)
        here, alone = self.identities[self.member], len(self.nodes) == 1
        self._node = Node(self.config, token, here, self.neighbours, alone, lines.warn)
        addresses = introduction.watchdog_addresses(here.node, self._node.address, self.exchange)
        self._service.fencing.arm(token, self._node.liveness, addresses)
        self._node.all_have_met()
        probe = self._probe = HostProbe(
            Path(self.config.checkpoint_directory),
            self.config.link_bytes_per_second or None,
            accelerator_probe(self.launch_seat[0]),
        )
        hooks = DetectionHooks(
            emit=self.emit,
            end=lambda code, reason: self._give_up(code, reason, seen=False),
            leave=lambda reason: self._give_up(ExitCode.SCRIPT_FAILED, f"evicted: it {reason}"),
            waits=lambda: self._service.waited,
            sample=probe.sample,
            impairment=self._injector.impairment,
        )
        detection = Detection(self._service, self.config, self._node, hooks)
        self.on_service(detection.start)
        self._monitor.care = self._node.care
        self._monitor.unblock = detection.unblock

    # -- who and where -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.view.rank_of(self.member)

    @property
    def leaving(self) -> bool:
        """Whether this rank is past its script."""
        return self._service.joined

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Members of the present view on this rank's node, in rank order."""
        return self._by_node[self.identities[self.member].node]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Distinct nodes of the present view, in order of their first rank."""
        return tuple(self._by_node)

    @property
    def _by_node(self) -> dict[str, tuple[int, ...]]:
        return by_node(self.view.members, lambda member: self.identities[member].node)

    @property
    def node_name(self) -> str:
        """Of the job on this node: what its files in shared memory go by."""
        return memory.job_name(self._token, self.identities[self.member].node)

    # -- operations --------------------------------------------------------------------------------

    def operate(self, operation: Operation) -> np.ndarray:
        """Carry out one operation with all ranks; returns its result, an array of its own."""
        self.require_service()
        operation.check()
        self.exits.forget()
        self._calls.carry_out(operation)
        self.see(operation.reduced_in)
        return result_of(operation)

    def view_of(self, epoch: int) -> View:
        """The view that had this number."""
        return self._service.views[epoch]

    def see(self, epoch: int) -> None:
        """Let the script see the view of ``epoch``, unless it has seen a newer one."""
        if epoch > self.view.epoch:
            self.view = self._service.views[epoch]

    def see_round(self, epoch: int) -> None:
        """The same, for a gradient round that the view of ``epoch`` reduced."""
        self.round_view = self._service.views[epoch]
        self.see(epoch)

    # -- gradients ---------------------------------------------------------------------------------

    def step_finished(self, step: int, together: bool = True) -> None:
        """A step of this rank's optimizer is over; ``together`` with the other ranks, or alone,
        when the script sees no new view by it."""
        self.exits.forget()
        view = self.view if together else self._service.world.view
        if view.coordinator == self.member:
            self._reporter.step_finished(step, view.epoch, view.size)

    def report_values(self, values: dict[str, Any]) -> None:
        """Values of the script for the launcher's status line and summary; rank 0's count."""
        self._reporter.values(values, wanted=self.rank == 0)

    # -- parts of other rooms ----------------------------------------------------------------------

    def attach(self, part: _Part) -> _Part:
        """Let the service's loop keep ``part`` going too; returns it."""
        self.on_service(lambda: self._service.attach(part))
        return part

    @functools.cached_property
    def hub(self) -> Hub:
        """What serves parameter servers; all ranks have one before any of them makes the first."""
        return self.attach(Hub(self.post))

    def block_in_mpi(self, function: Callable[[Any], object], what: str) -> None:
        """Call ``function`` with a communicator on the thread that owns MPI. All ranks do, and wait
        for each other, so whoever hangs in it is ended after ``rebuild_timeout``."""
        self.on_service(lambda: self._service.block(function, what))

    @functools.cached_property
    def savers(self) -> JobGroup:
        """The ranks as those that save checkpoints together; all make theirs at the same place."""
        names = (memory.job_name(self._token, ""), self.node_name)
        return self.attach(JobGroup(self, names, self.exchange))

    def leave_evicted(self, reason: str) -> NoReturn:
        """This rank is no use to the others, and ends; ``reason`` is said of it."""
        self._service.farewells.say(f"it {reason}")
        self._give_up(ExitCode.SCRIPT_FAILED, f"evicted: it {reason}")

    # -- faults ------------------------------------------------------------------------------------

    def _view_changed(self, rebuilt: Rebuilt, farewells: dict[int, str]) -> None:
        view = rebuilt.view
        if view.coordinator == self.member:
            members = tuple(self.identities[m].launch_rank for m in view.members)
            lost = tuple(self.identities[m].launch_rank for m in rebuilt.lost)
            words = tuple(farewells.get(m) or self._verdict(m) for m in rebuilt.lost)
            reasons = tuple(each[:_WORDS_CHARS] for each in words)
            self.emit(events.ViewChanged, view.epoch, members, lost, rebuilt.seconds, reasons)

    def _verdict(self, member: int) -> str:
        """Why a watchdog killed this member, as far as one did and its word is known here."""
        told = self._node.verdict(member) if self._node is not None else ""
        return told or self._service.fencing.details.get(member, "")

    def _last_words(self, code: int, reason: str, trace: str) -> bool:
        self.emit(events.RankFailed, self.host, code, reason, trace)
        if not self._service.running or threading.current_thread() is self._service.thread:
            return False
        return self._service.farewells.say(reason)

    def _give_up(self, code: int, reason: str, seen: bool = True) -> NoReturn:
        """This rank can't go on; others may, if they see something else."""
        if code == ExitCode.QUORUM_LOST and self._node is not None:
            self._node.slot.stood_down()
        self.emit(events.RankStopped, int(code), reason)
        exits.leave(code, unseen=not seen)

    def _abort_job(self, code: int, reason: str) -> NoReturn:
        """End the whole job, also ranks that see nothing of the reason."""
        self.emit(events.JobStopped, int(code), reason)
        if self._service.running and self._service.blocked is None:
            self._service.call(lambda: self._service.world.abort(code))
            time.sleep(1.0)  # the abort ends this process
        exits.leave(code)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave: zeros for the others' rounds until all are through, then the end of MPI.

        Returns when every rank has left, or after ``leave_timeout`` beyond its own end.
        """
        atexit.unregister(_at_exit)
        groups.provide(None)
        self._reporter.send_values(wanted=self.rank == 0)
        self.examinations.joined = True
        self._service.join_all()
        self.gradients.see_through()
        self._service.thread.join()
        self._monitor.stop()
        if self._node is not None:
            self._node.leave()
        if self._probe is not None:
            self._probe.close()
        done = (self.steps_called, self.steps_applied, self.rounds_missed)
        self.emit(events.RankLeft, self.host, *done)
        if self._service.world.finalize_would_hang:
            atexit.register(self._leave_without_finalize)
        else:
            self.exits.remove()

    def at_exit(self) -> None:
        """The interpreter's end: a failure leaves at once, everything else leaves politely."""
        self.exits.check_at_exit()
        self.shutdown()
        if self._service.world.finalize_would_hang:
            self._leave_without_finalize()

    def _leave_without_finalize(self) -> None:
        atexit.unregister(self._leave_without_finalize)
        if os.getpid() == self.identities[self.member].pid:
            exits.leave_after_exit_handlers(self.exits.code)

    # -- helpers -----------------------------------------------------------------------------------

    def require_service(self) -> None:
        """Raises ``NotInitializedError`` if nobody serves this process's calls."""
        if not self._service.running:
            raise NotInitializedError(
                "mpift is shut down, or this is a forked child of the process that started it"
            )

    def on_service(self, function: Callable[[], Any]) -> None:
        """Run ``function`` on the service thread, the only one that may call MPI, and wait; an
        error of ours is raised here."""
        self.require_service()
        done = threading.Event()
        errors: list[MpiftError] = []

        def run() -> None:
            try:
                function()
            except MpiftError as error:
                errors.append(error)
            finally:
                done.set()  # also at a fault, which the loop sees to

        self._service.call(run)
        done.wait()
        if errors:
            raise errors[0]


def start(comm: Any = None, config: Config | None = None) -> Runtime:
    """The process's runtime, started if there is none.

    ``comm`` is an mpi4py communicator, or None for all processes of the launch. Raises
    ``ConfigError`` if a runtime with other settings or another communicator is running already, and
    ``TypeError`` for a ``comm`` of another kind.
    """
    global _current
    with _lock:
        if comm is not None and not hasattr(comm, "Get_rank"):
            raise TypeError(f"comm must be an mpi4py communicator or None, not {comm!r}")
        if _current is None:
            _current = Runtime(comm, config or Config.load())
        elif config is not None and config not in (_current.given, _current.config):
            raise ConfigError("mpift is running with other settings; call shutdown() first")
        elif comm is not None and comm != _current.comm:
            raise ConfigError("mpift is running on another communicator; call shutdown() first")
        return _current


def current() -> Runtime:
    """The running runtime; ``NotInitializedError`` if there is none."""
    if _current is None:
        raise NotInitializedError("mpift is not initialized; call init() first")
    return _current


def is_running() -> bool:
    """Whether ``init`` was called, and ``shutdown`` wasn't since."""
    return _current is not None


def shutdown() -> None:
    """End the runtime, if there is one; see ``Runtime.shutdown``. Checkpoints that are being saved
    are waited for first; ``CheckpointError`` if the last one has failed."""
    global _current
    groups.close_managers()
    with _lock:
        runtime, _current = _current, None
    if runtime is not None:
        runtime.shutdown()


def _at_exit() -> None:
    global _current
    runtime, _current = _current, None
    if runtime is not None and os.getpid() == runtime.identities[runtime.member].pid:
        runtime.at_exit()
