"""Everything that notices silence, stalls and bad health of the ranks, put together.

The heartbeat carries what each rank says of itself; the coordinator of the view judges it: who is
silent (``core/suspicion.py``), who stalls (``core/stalls.py``), whose health has been critical for
too long. What it finds becomes an eviction, or an event for people. Only the service thread calls
in here, but for ``unblock``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from mpift.config import Config
from mpift.core import events
from mpift.core.health import LIMITS, Band, Health, Limit, Metrics
from mpift.core.packet import Packet, Status
from mpift.core.stalls import StallInspector, Standing
from mpift.core.suspicion import Finding
from mpift.transport.evictions import Evictions
from mpift.transport.heartbeat import Heartbeat, Impairment
from mpift.transport.heartbeat import Hooks as HeartbeatHooks
from mpift.transport.messages import Kind, Message
from mpift.transport.node import Node
from mpift.transport.service import Service

_FRAMES_TOLD = 3


@dataclass(slots=True)
class Hooks:
    """What detection needs of the runtime."""

    # report an event: its class and what it holds beyond time and member
    emit: Callable[..., None]
    # (exit code, reason): end this process, the others being told
    end: Callable[[int, str], NoReturn]
    # (reason): end this process in the way that the others notice
    leave: Callable[[str], NoReturn]
    # whether the script waits for other ranks
    waits: Callable[[], bool]
    # (monotonic seconds): what the node's resources are used by
    sample: Callable[[float], Metrics]
    # (step): what the fault schedule does to heartbeats
    impairment: Callable[[int], Impairment]


class Detection:
    """Detection on this rank; ``start`` adds it to the service."""

    def __init__(self, service: Service, config: Config, node: Node, hooks: Hooks) -> None:
        self._service = service
        self._config = config
        self._node = node
        self._hooks = hooks
        world = service.world
        self._health = Health(_limits(config))
        self._told_band = Band.HEALTHY
        self._told_of_device = False
        self._stalls = StallInspector(config.stall_warning_seconds, config.stall_timeout)
        self._stalled = False  # by the coordinator's word
        self._unblocked = 0  # looks at others in rebuilds that last
        self._critical_since: dict[int, float] = {}
        self._epoch = world.view.epoch
        incarnations = {m: _incarnation(i.start_time) for m, i in world.identities.items()}
        self._incarnation = incarnations[world.member]
        self.heartbeat = Heartbeat(
            config,
            incarnations,
            HeartbeatHooks(
                packet=self._packet,
                missed=self._missed,
                heard=self._heard,
                heads=lambda: self.evictions.machine.heads,
                may_coordinate=lambda: self.evictions.may_coordinate,
                impairment=hooks.impairment,
            ),
        )
        self.evictions = Evictions(service, config, self.heartbeat.silence, hooks.end)

    def start(self) -> None:
        """On the service thread: from now on this rank is heard, and hears."""
        self._service.mailbox.register(Kind.STALLED, self._take_stalled)
        self._service.show_life(self._node.slot)
        self._service.attach(self.evictions)  # first: it names the coordinator of a new view
        self._service.attach(self.heartbeat)

    def unblock(self, seconds: float) -> None:
        """On the monitor's thread, in a rebuild that has lasted so long: end those ranks that stand
        still, for it waits for them. Their watchdogs spare whoever is alone on its node."""
        if seconds < self._config.heartbeat_timeout:
            return
        world, fencing = self._service.world, self._service.fencing
        here = world.identities[world.member]
        first = self._is_first_of_node(world.member)
        others = [world.identities[m] for m in world.view.members if m != world.member]
        mine = [other for other in others if first or other.node == here.node]
        # The monitor has more to do: what time does not allow now is looked at in the next call.
        deadline = time.monotonic() + self._config.fence_timeout
        begin = self._unblocked % max(1, len(mine))
        for other in (*mine[begin:], *mine[:begin]):
            if time.monotonic() > deadline:
                break
            self._unblocked += 1
            if fencing.examine(other, kill=False) is Finding.STANDS_STILL:
                fencing.examine(other, kill=True)

    def _is_first_of_node(self, member: int) -> bool:
        identities = self._service.world.identities
        node = identities[member].node
        members = self._service.world.view.members
        return min(m for m in members if identities[m].node == node) == member

    # -- what this rank says of itself -------------------------------------------------------------

    def _packet(self, sequence: int) -> Packet:
        """Called once an interval, so the rest that is due once an interval is done here too."""
        now = time.monotonic()
        service = self._service
        view, step = service.world.view, service.step
        self._node.slot.progress(step, view.epoch)
        metrics = self._hooks.sample(now)
        self._observe_health(now, metrics)
        if view.epoch != self._epoch:
            self._epoch = view.epoch
            self._stalls.forget()
            self._critical_since.clear()
        waits = self._hooks.waits()
        self._stalled = self._stalled and not waits
        packet = Packet(
            member=service.world.member,
            incarnation=self._incarnation,
            epoch=view.epoch,
            sequence=sequence,
            step=step,
            rounds=service.progress,
            timestamp=time.time(),
            status=self._status(waits),
            cpu=metrics.cpu,
            memory=metrics.memory,
            disk=metrics.disk,
            network=metrics.network,
            accelerator=metrics.accelerator,
            health_score=self._health.score,
        )
        if self.evictions.machine.coordinator == service.world.member:
            self._judge(now, packet)
        return packet

    def _status(self, waits: bool) -> Status:
        service = self._service
        status = Status.TRAINING if len(service.lanes) > 1 else Status.STARTING
        if service.joined:
            status = Status.LEAVING
        if waits or service.joined:
            status |= Status.WAITING
        if self._stalled:
            status |= Status.STALLED
        if self._health.band >= Band.CRITICAL:
            status |= Status.CRITICAL
        elif self._health.band >= Band.DEGRADED:
            status |= Status.DEGRADED
        return status

    def _observe_health(self, now: float, metrics: Metrics) -> None:
        self._health = self._health.observe(now, metrics)
        health = self._health
        band = health.band if health.is_serious else Band.HEALTHY  # busy is nothing to tell
        if band is self._told_band:
            return
        self._told_band = band
        # Of the node one rank tells; of devices each of its own.
        own, self._told_of_device = health.is_of_device or self._told_of_device, health.is_of_device
        identities = self._service.world.identities
        here = identities[self._service.world.member]
        if own or self._is_first_of_node(here.member):
            self._hooks.emit(
                events.HealthChanged,
                here.host,
                band.name.lower(),
                health.score,
                health.reason,
            )

    # -- what the coordinator makes of what it hears -----------------------------------------------

    def _judge(self, now: float, own: Packet) -> None:
        view = self._service.world.view
        packets = {m: p for m, p in self.heartbeat.last.items() if p.epoch == view.epoch}
        packets[own.member] = own
        heard = {m: p for m, p in packets.items() if m not in self.evictions.machine.suspects}
        self._judge_stalls(now, heard)
        self._judge_health(now, heard)

    def _judge_stalls(self, now: float, packets: dict[int, Packet]) -> None:
        standings = {
            m: Standing(p.step, bool(p.status & Status.WAITING), p.rounds)
            for m, p in packets.items()
        }
        for stall in self._stalls.observe(now, standings):
            if stall.evict:
                self._condemn(
                    stall.member,
                    f"made no progress at step {stall.step} of this job for {stall.seconds:.0f} s"
                    f" (stall_timeout={self._config.stall_timeout:g} s)",
                )
            elif stall.member == self._service.world.member:
                self._tell_stall(stall.seconds)
            else:
                text = f"{stall.seconds:.1f}"
                self._service.mailbox.send(Kind.STALLED, text, [stall.member])

    def _judge_health(self, now: float, packets: dict[int, Packet]) -> None:
        limit = self._config.evict_critical_after
        for member, packet in packets.items():
            if not packet.status & Status.CRITICAL:
                self._critical_since.pop(member, None)
                continue
            seconds = now - self._critical_since.setdefault(member, now)
            if 0 < limit <= seconds:
                self._condemn(
                    member,
                    f"its health was critical for {seconds:.0f} s (evict_critical_after={limit:g})",
                )

    def _condemn(self, member: int, reason: str) -> None:
        if member in self.evictions.machine.condemned:
            return
        identity = self._service.world.identities[member]
        self._hooks.emit(events.Evicted, identity.launch_rank, reason)
        if member == self._service.world.member:
            self._hooks.leave(reason)
        self.evictions.condemn(member)

    def _missed(self, member: int, for_good: bool) -> None:
        if member not in self.evictions.machine.suspects:
            world = self._service.world
            self._hooks.emit(
                events.Suspected,
                world.identities[member].launch_rank,
                world.identities[member].host,
                round(self.heartbeat.silence(member), 3),
            )
        self.evictions.missed(member, for_good)

    def _heard(self, member: int) -> None:
        if member in self.evictions.machine.suspects:
            identity = self._service.world.identities[member]
            self._hooks.emit(events.HeardAgain, identity.launch_rank, identity.host)
        self.evictions.heard(member)

    # -- a stalled rank ----------------------------------------------------------------------------

    def _take_stalled(self, message: Message) -> None:
        self._tell_stall(float(message.text))

    def _tell_stall(self, seconds: float) -> None:
        """All others wait for this rank, or all for each other: say what its script does."""
        self._stalled = True
        host = self._service.world.identities[self._service.world.member].host
        waits = self._hooks.waits()
        self._hooks.emit(
            events.RankStalled, host, self._service.step, seconds, waits, where_the_script_is()
        )


def where_the_script_is() -> str:
    """The innermost places of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = traceback.extract_stack(frame)[::-1][:_FRAMES_TOLD]
    return ", called from ".join(f"{p.name} ({p.filename}:{p.lineno})" for p in places)


def _incarnation(start_time: int) -> int:
    return start_time & 0xFFFFFFFF


def _limits(config: Config) -> dict[str, Limit]:
    """The health check's table with the configured numbers; weight 0 leaves a metric out."""
    found = {}
    for name, limit in LIMITS.items():
        threshold = getattr(config, f"health_{name}_threshold")
        weight = getattr(config, f"health_{name}_weight")
        if weight > 0:
            found[name] = Limit(threshold, weight, limit.is_capacity)
    return found
