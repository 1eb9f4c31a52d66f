"""torchrun agents, one a node, on loopback or each in a network namespace of its own.

An agent is torchrun as it is started from a shell. Forked ones would start sooner, but could hang:
a worker is forked beside threads of the agent, which may hold a lock of the C library.

Everything that a job starts is found and killed by a mark in its environment: torchrun puts its
workers into sessions of their own, where killing the agent's process group does not reach them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commgrid.testing import free_port

MARK = "COMMGRID_TEST_JOB"
WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """Where an agent runs.

    Args:
        address: its own, at which others reach it.
        enter: the command that goes there, before the agent's.
        variables: for the agent and its workers.
    """

    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def move_here(self) -> None:
        """Brings the calling process into the host's network namespace, as `enter` does."""
        if self.enter:
            name = self.enter[-1]
            with open(f"/run/netns/{name}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {name}")


LOOPBACK = (Host(), Host())


@dataclass
class Job:
    """Agents of one job, what they printed, and their end.

    Args:
        hosts: one for each node; the first one's agent holds the rendezvous.
        folder: where the workers count their starts and leave what came of them.
        timeout: seconds until all is killed.
    """

    hosts: Sequence[Host]
    folder: Path
    timeout: float
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, flags: Sequence[str], worker: Sequence[str], **variables: str) -> None:
        """Starts an agent on each host.

        Args:
            flags: torchrun's, beside those of a c10d rendezvous; `--master-addr` makes it a static
                one, on the same port.
            worker: arguments of worker.py.
            **variables: for the workers.
        """
        port = str(free_port())
        static = "--master-addr" in flags
        for node, host in enumerate(self.hosts):
            rendezvous = [
                "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{self.hosts[0].address}:{port}",
                "--rdzv-conf",
                f"is_host={int(node == 0)},last_call_timeout=1,keep_alive_interval=1,"
                "read_timeout=10",
                "--rdzv-id", "job", "--local-addr", host.address,
            ]  # fmt: skip
            arguments = [*(["--master-port", port] if static else rendezvous), *flags]
            own = {
                **os.environ, **dict(host.variables), **variables, MARK: str(self.folder),
                "NODE": str(node), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
            }  # fmt: skip
            command = [
                *host.enter, sys.executable, "-m", "torch.distributed.run", *arguments,
                str(WORKER), *worker,
            ]  # fmt: skip
            with self.log(node).open("wb") as log:
                self.agents.append(
                    subprocess.Popen(
                        command, env=own, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                    )
                )

    def wait(self, nodes: Sequence[int]) -> list[int]:
        """Until the agents of these nodes have ended; their exit codes.

        Raises:
            AssertionError: one did not in time; with what all of them printed.
        """
        until = time.monotonic() + self.timeout
        for node in nodes:
            try:
                self.agents[node].wait(max(until - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                self._print_stacks()
                raise AssertionError(
                    f"node {node} has not ended in {self.timeout} s\n{self.said()}"
                ) from None
        return [self.agents[node].returncode for node in nodes]

    def _print_stacks(self) -> None:
        """Ends every process with a stack of each of its threads, in the log of its node."""
        for pid in reversed(self.processes()):  # workers first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        until = time.monotonic() + 10
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)  # while they write

    def log(self, node: int) -> Path:
        return self.folder / f"log-{node}"

    def said(self) -> str:
        """What the agents and workers printed last, without gloo's lines of connections."""

        def last(path: Path) -> str:
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            return "".join(line for line in lines if "debug_logger.cc" not in line)[-6000:]

        return "\n".join(
            f"--- node {node}\n{last(self.log(node))}" for node in range(len(self.agents))
        )

    def end(self) -> None:
        """Kills whatever is left of the job, by process id, and waits until it is gone."""
        until = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < until, f"{left} cannot be killed"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in self.agents:
                agent.poll()  # a zombie would be counted as a process that is left
            time.sleep(0.02)  # between two looks
        for agent in self.agents:
            agent.wait(10)

    def processes(self) -> list[int]:
        """Every live process of the job."""
        return processes_of(str(self.folder))


def processes_of(folder: str, node: str = "") -> list[int]:
    """Every live process of a job, or of one of its nodes, by its environment; oldest first."""
    wanted = {f"{MARK}={folder}".encode(), *([f"NODE={node}".encode()] if node else [])}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile, or is somebody else's
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return sorted(found)


@contextlib.contextmanager
def job(hosts: Sequence[Host], timeout: float) -> Iterator[Job]:
    """A job of which nothing is left afterwards; what it said is printed where a test fails."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        made = Job(hosts, Path(folder), timeout)
        try:
            yield made
        except BaseException:
            print(made.said(), file=sys.stderr)
            raise
        finally:
            made.end()


# -- network namespaces -----------------------------------------------------------------


@contextlib.contextmanager
def namespace(name: str) -> Iterator[str]:
    """A host of this name, with nothing but loopback.

    Raises:
        OSError: this machine does not let us; says why.
    """
    run_ip("netns", "add", name)
    try:
        run_ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run_ip("netns", "delete", name)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable: network namespaces, and a veth pair between them.

    Raises:
        OSError: this machine does not let us; says why.
    """
    ends = [f"veth{os.getpid()}{end}"[-15:] for end in "ab"]
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace(f"grid{os.getpid()}{end}")) for end in "ab"]
        # Made inside, so that it goes with the namespace and never stands beside the machine's own.
        run_ip("-n", names[0], "link", "add", ends[0], "type", "veth",
               "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        hosts = []
        for name, end, address in zip(names, ends, ("10.77.0.1", "10.77.0.2"), strict=True):
            run_ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            run_ip("-n", name, "link", "set", end, "up")
            enter = ("ip", "netns", "exec", name)
            hosts.append(Host(address, enter, (("GLOO_SOCKET_IFNAME", end),)))
        yield hosts[0], hosts[1]


def run_ip(*arguments: str) -> None:
    """Runs the ip command; raises OSError with what it says."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise OSError("there is no ip command (iproute2)") from None
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
