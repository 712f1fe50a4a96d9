"""``VirtualCluster``: several nodes on one machine, whose links can be cut and which can be lost.

A node is a set of Linux namespaces: it has a network, a host name, ``/dev/shm`` and temporary
folder of its own, and shares the file system, the clock and the numbering of processes with the
others. Their network is a bridge in a namespace of its own: nothing of it is to be seen on the
machine, so that clusters can live side by side, and no node reaches the world outside.

The first process of the cluster is the root of a pid namespace in which everything runs. It ends
when its input closes, so also when its owner is killed, and the kernel then removes all that is
left: processes, links, mounts. Nothing has to be looked for. Needs root, ``ip``, and util-linux.

Never: a node that behaves like a machine in every respect. Cores and memory are the machine's, and
pids of different nodes are of one kind; what tells nodes apart is the host name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from mpift.testing.ranks import TOKEN_VARIABLE, Outcome, Scenario, run_job, run_ranks

_TOOLS = ("ip", "unshare", "nsenter", "setsid", "mount", "hostname")
_BOOT_SECONDS = 10.0
_KILL_SECONDS = 10.0
_END_SECONDS = 10.0
_NETWORK = "10.77.0"
_NODES_MAX = 200
# What a login finds, whatever the caller's environment: sshd's default.
_LOGIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The first process: builds the switch, starts the nodes, and lives until the end of its input; the
# shell that waits for that reaps orphans meanwhile. Words: folder, script of a node, "node/address"
# for each.
_SWITCH = """
folder=$1 node_script=$2
shift 2
ip link add switch type bridge
ip link set switch up
for node; do
    unshare --net --uts --ipc --mount sh -euc "$node_script" "${node%/*}" "$folder" "${node#*/}" \\
        </dev/null || : >"$folder/failed" &
done
cat >/dev/null
exec rm -rf "$folder"
"""

# What makes a node, and then holds its namespaces. Its pid appears when all is ready.
_NODE = """
hostname "$0"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$1/local"
mount --bind "$1/hosts" /etc/hosts
ip link set lo up
ip link add eth0 type veth peer name "$0" netns 1
ip addr add "$2/24" dev eth0
ip link set eth0 up
nsenter --target 1 --net ip link set "$0" master switch up
echo $$ >"$1/nodes/.$0"
mv "$1/nodes/.$0" "$1/nodes/$0"
exec sleep infinity
"""

# What mpirun uses in place of ssh. As with ssh: nothing of the environment comes along but the mark
# by which tests find processes; there is no way to a node that is down or cut off, nor from one;
# the end of a command behind a cut link is not heard of; and one that a signal ended counts as a
# lost connection. (The name must not be ssh: mpirun would add that program's options.)
_LOGIN = """#!/bin/sh
node=$1
shift
apart() {{ [ -e {folder}/cut/"$node" ] || [ -e {folder}/cut/"$(hostname)" ]; }}
if apart || ! pid=$(cat {folder}/nodes/"$node"); then
    echo "login: no route to host $node" >&2
    exit 255
fi
nsenter --target "$pid" --net --uts --ipc --mount env -i HOME="$HOME" PATH={path} \\
    TMPDIR={folder}/local {token}="${token}" sh -c "$*" &
wait $! 2>/dev/null
code=$?
while apart && kill -0 "$PPID"; do sleep 0.2; done
if [ $code -gt 128 ]; then
    echo "login: connection to $node closed" >&2
    exit 255
fi
exit $code
"""


class VirtualCluster:
    """``nodes`` nodes, from ``with`` to its end: ``node1``, ``node2`` and so on.

    Raises ``RuntimeError`` if it can't be made; see ``availability``.
    """

    def __init__(self, nodes: int = 3) -> None:
        if not 1 <= nodes <= _NODES_MAX:
            raise ValueError(f"a virtual cluster has 1 to {_NODES_MAX} nodes, not {nodes}")
        self.addresses = {f"node{n}": f"{_NETWORK}.{n}" for n in range(1, nodes + 1)}
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names; ``mpirun`` runs on the first."""
        return tuple(self.addresses)

    @property
    def login(self) -> Path:
        """What stands in for ssh inside: ``LOGIN NODE COMMAND``, mpirun's ``plm_ssh_agent``."""
        return self._folder / "login"

    # -- its life ------------------------------------------------------------------------------

    def __enter__(self) -> VirtualCluster:
        self._folder = Path(tempfile.mkdtemp(prefix="mpift-cluster-"))
        for name in ("local", "nodes", "cut"):
            (self._folder / name).mkdir()
        names = {"localhost": "127.0.0.1", **self.addresses}
        (self._folder / "hosts").write_text("".join(f"{a} {n}\n" for n, a in names.items()))
        self.login.write_text(
            _LOGIN.format(folder=self._folder, path=_LOGIN_PATH, token=TOKEN_VARIABLE)
        )
        self.login.chmod(0o755)
        try:
            self._boot()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _boot(self) -> None:
        with (self._folder / "log").open("wb") as log:
            keeper = subprocess.Popen(
                [
                    *"unshare --net --mount --pid --fork --kill-child --mount-proc".split(),
                    *("sh", "-euc", _SWITCH, "sh", str(self._folder), _NODE),
                    *(f"{node}/{address}" for node, address in self.addresses.items()),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # a Ctrl-C is for the owner, who then ends the cluster
            )
        self._keeper = keeper
        deadline = time.monotonic() + _BOOT_SECONDS
        ready = [self._folder / "nodes" / node for node in self.nodes]
        while not all(path.exists() for path in ready):
            failed = keeper.poll() is not None or (self._folder / "failed").exists()
            if failed or time.monotonic() > deadline:
                log_text = (self._folder / "log").read_text(errors="replace").strip()
                raise RuntimeError(
                    f"a virtual cluster of {len(ready)} nodes did not come up: "
                    + (log_text or f"it took more than {_BOOT_SECONDS:g} s")
                )
            time.sleep(0.01)
        self._first = psutil.Process(keeper.pid).children()[0]
        pids = _pids_below(self._first)
        self._inner = {path.name: int(path.read_text()) for path in ready}
        self._holders = {node: pids[inner] for node, inner in self._inner.items()}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            keeper.stdin.close()
            try:
                keeper.wait(_END_SECONDS)  # once the kernel has ended all that was in it
            except subprocess.TimeoutExpired:
                # All have ended, but the machine's first process doesn't reap what it inherits.
                keeper.kill()
                keeper.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- what happens to nodes -----------------------------------------------------------------

    def cut(self, node: str) -> None:
        """Pull the node's network cable: from then on no packet reaches it or leaves it."""
        (self._folder / "cut" / self._checked(node)).touch()
        self._set_link(node, "down")

    def heal(self, node: str) -> None:
        """Undo ``cut`` and ``kill_node``: the link is up, and logins are answered again."""
        self._set_link(self._checked(node), "up")
        (self._folder / "cut" / node).unlink(missing_ok=True)
        (self._folder / "nodes" / node).write_text(str(self._inner[node]))

    def kill_node(self, node: str) -> None:
        """End all that runs on the node, with SIGKILL, and lose its memory.

        The kernel still closes its connections, so others hear of it at once; ``cut`` it before
        that to have it vanish without a word, as at a power loss.
        """
        (self._folder / "nodes" / self._checked(node)).unlink(missing_ok=True)
        deadline = time.monotonic() + _KILL_SECONDS
        while left := self.processes(node):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{node} still runs {[p.pid for p in left]}")
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.005)
        for folder in (self.shared_memory(node), self._inside(node, self._folder / "local")):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _set_link(self, node: str, state: str) -> None:
        words = ["nsenter", "--target", str(self._first.pid), "--net"]
        subprocess.run([*words, "ip", "link", "set", node, state], check=True)

    def _checked(self, node: str) -> str:
        if node not in self.addresses:
            raise ValueError(f"there is no node {node!r}, the nodes are {', '.join(self.nodes)}")
        return node

    # -- what there is on nodes ----------------------------------------------------------------

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """All that runs on a node, or on all of them, without what holds the node itself; with pids
        as this process sees them, which differ from those inside."""
        nodes = self.nodes if node is None else (self._checked(node),)
        spaces = {_network_of(self._holders[name]) for name in nodes}
        own = set(self._holders.values())
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid not in own and _network_of(pid) in spaces:
                    found.append(psutil.Process(pid))
        return found

    def shared_memory(self, node: str) -> Path:
        """Where this process finds the node's ``/dev/shm``."""
        return self._inside(self._checked(node), Path("/dev/shm"))  # noqa: S108 - not ours

    def _inside(self, node: str, path: Path) -> Path:
        return Path(f"/proc/{self._holders[node]}/root{path}")

    # -- running something ---------------------------------------------------------------------

    def enter(self, node: str) -> list[str]:
        """Words to put before a command that shall run on the node, in this folder and with the
        environment that it is started with."""
        return [
            *("nsenter", "--target", str(self._first.pid), "--pid", "--mount"),
            *("nsenter", "--target", str(self._inner[self._checked(node)])),
            *("--net", "--uts", "--ipc", "--mount"),
            # A session of its own: process groups of the outside have no number inside.
            *("setsid", "env", "-C", str(Path.cwd()), f"TMPDIR={self._folder / 'local'}"),
        ]

    def run_ranks(
        self,
        scenario: Scenario | Sequence[Scenario],
        *arguments: Any,
        slots_a_node: int = 2,
        mpi_arguments: Sequence[str] = (),
        **options: Any,
    ) -> Outcome:
        """``testing.ranks.run_ranks`` with ``slots_a_node`` ranks on each node, in node order.

        ``options`` are those of ``run_ranks``, ``during`` included, which can cut and kill.
        """
        return run_ranks(
            slots_a_node * len(self.nodes),
            scenario,
            *arguments,
            mpi_arguments=(*self._agent, "--host", self._hosts(slots_a_node), *mpi_arguments),
            prefix=self.enter(self.nodes[0]),
            **options,
        )

    def launch(
        self,
        *words: str,
        slots_a_node: int = 2,
        mpi_arguments: Sequence[str] = (),
        **options: Any,
    ) -> Outcome:
        """``mpift run`` on all nodes, with ``words`` (options, and then a command) added.

        ``options`` are those of ``testing.ranks.run_job``; the outcome has no results.
        """
        command = [
            *self.enter(self.nodes[0]),
            *(sys.executable, "-m", "mpift", "run", "--hosts", self._hosts(slots_a_node)),
            *("--mpi-args", " ".join((*self._agent, *mpi_arguments)), *words),
        ]
        return run_job(command, ranks=slots_a_node * len(self.nodes), **options)

    def _hosts(self, slots_a_node: int) -> str:
        return ",".join(f"{node}:{slots_a_node}" for node in self.nodes)

    @property
    def _agent(self) -> tuple[str, ...]:
        return ("--prtemca", "plm_ssh_agent", str(self.login))


def _pids_below(process: psutil.Process) -> dict[int, int]:
    """Pids as seen from here, by the pids in the namespace that ``process`` is the first of."""
    found = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(OSError):  # ended since
            status = Path(f"/proc/{child.pid}/status").read_text()
            _, _, inner = status.partition("\nNSpid:")
            found[int(inner.split("\n")[0].split()[-1])] = child.pid
    return found


def _network_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


@functools.cache
def availability() -> str | None:
    """Why there can be no virtual cluster here; None if there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2, util-linux, hostname)"
    try:
        with VirtualCluster(1):
            return None
    except (OSError, RuntimeError) as error:
        return str(error)
