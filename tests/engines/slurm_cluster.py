"""A SLURM of two nodes on this machine, with a folder, keys, ports and a configuration of its own.

    python -m tests.engines.slurm_cluster srun -N2 -n4 python examples/train_gpt.py --tp 2

munged, slurmctld and one slurmd a node, as child processes in the foreground; whatever they have
started is found by SLURM_CONF in its environment, and ended with them. A node is called by an
address of loopback, 127.0.0.1 and 127.0.0.2, since the ranks look the first one's name up. Jobs
are counted from a number drawn at random: the port of a job's ranks is made from it, and another
cluster on this machine would have the same ones.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commgrid.testing import free_port
from tests.engines.said import killed_after

ROOT = Path(__file__).parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
NODES = "127.0.0.[1-2]"
CPUS = 4  # of a node, for SLURM's counting

_CONF = """\
ClusterName=commgrid
SlurmctldHost={host}
SlurmctldAddr=127.0.0.1
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=120
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
GresTypes=gpu
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus} Gres=gpu:{cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A SLURM that is up.

    Args:
        folder: its own; logs are `*.log` in it.
        variables: the environment in which srun and its siblings find it.
    """

    folder: Path
    variables: Mapping[str, str]

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def running(
        self, *command: str, **variables: str
    ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """srun or the like in the repository's root, its output piped, killed after the block."""
        return killed_after(
            subprocess.Popen(
                command,
                env={**self.variables, **variables},
                cwd=ROOT,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )

    def run(self, *command: str, timeout: float = 120, **variables: str) -> str:
        """What a command prints.

        Raises:
            AssertionError: it failed, or did not end in time; with what it said.
        """
        with self.running(*command, **variables) as running:
            try:
                out, err = running.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                running.kill()
                out, err = running.communicate()
                raise AssertionError(
                    f"{command} has not ended in {timeout} s\n{out}{err}{self.logs()}"
                ) from None
        assert running.returncode == 0, f"{command}: {running.returncode}\n{out}{err}{self.logs()}"
        return out

    def tasks(self) -> dict[int, int]:
        """The process of each rank that srun has started: `{rank: pid}`."""
        found = {}
        for pid, environ in self._processes():
            rank = environ.get("SLURM_PROCID")
            # slurmstepd has the variables of its step too, but not of a task; a batch script's
            # shell counts as task 0 of its job, outside of any step.
            if rank is not None and "SLURM_STEP_NUM_TASKS" in environ:
                found[int(rank)] = pid
        return found

    def processes(self) -> list[int]:
        """Everything alive that belongs to it."""
        return [pid for pid, _ in self._processes()]

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # ended meanwhile, or is somebody else's
                    pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    environ = dict(pair.partition("=")[::2] for pair in pairs)
                    if environ.get("SLURM_CONF") == str(self.conf):
                        yield int(entry.name), environ

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def why_not() -> str | None:
    """Why there can be no cluster here; None: there can."""
    # Debian has daemons where an ordinary user's PATH does not look.
    missing = [name for name in (*DAEMONS, *COMMANDS) if _find(name) is None]
    if missing:
        return f"SLURM is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a SLURM of one's own is started by root here"
    return None


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def cluster(seconds: float = 20) -> Iterator[Cluster]:
    """Two nodes that are up; afterwards nothing of them is left.

    Args:
        seconds: to come up within.

    Raises:
        AssertionError: they did not; with their logs.
    """
    daemons: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        made = Cluster(Path(name), _environment(Path(name)))
        try:
            _configure(made)
            _start(made, daemons, time.monotonic() + seconds)
            yield made
        finally:
            _end(made, daemons)


def _environment(folder: Path) -> dict[str, str]:
    """For daemons, commands and what these start; without an outer job's variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    return {
        **kept,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}:/usr/sbin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _configure(made: Cluster) -> None:
    folder = made.folder
    folder.chmod(0o755)  # munged wants its socket's folder open to all who come
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    first = free_port()
    made.conf.write_text(
        _CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            nodes=NODES,
            cpus=CPUS,
            controller_port=free_port(),
            ports=f"{first},{free_port()}",
            first_job=1 + secrets.randbelow(9_000),
        )
    )
    for number in range(CPUS):  # devices that are only counted, so that a job may ask for them
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(
        f"NodeName={NODES} Name=gpu File={folder}/gpu[0-{CPUS - 1}]\n"
    )


def _start(made: Cluster, daemons: list[subprocess.Popen[bytes]], until: float) -> None:
    folder = made.folder
    munge = folder / "munge.socket"
    commands = {
        "munged": (
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
            f"--socket={munge}", f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
        ),
        "slurmctld": ("slurmctld", "-D", "-f", str(made.conf)),
        **{f"slurmd-{n}": ("slurmd", "-D", "-N", f"127.0.0.{n}") for n in (1, 2)},
    }  # fmt: skip
    for name, (program, *arguments) in commands.items():
        path = _find(program)
        assert path is not None, program
        with (folder / f"{name}.out.log").open("wb") as log:
            daemons.append(
                subprocess.Popen(
                    [path, *arguments],
                    env=dict(made.variables),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        while name == "munged" and not munge.exists():
            _still(made, daemons, until, "munged has no socket")
    while True:
        with made.running("sinfo", "--noheader", "--format=%D %t") as sinfo:
            said = sinfo.communicate(timeout=60)[0]
        if said.split() == ["2", "idle"]:
            return
        _still(made, daemons, until, f"sinfo says {said!r}")


def _still(made: Cluster, daemons: list[subprocess.Popen[bytes]], until: float, what: str) -> None:
    ended = [each.args for each in daemons if each.poll() is not None]
    assert not ended, f"{ended} have ended at once\n{made.logs()}"
    assert time.monotonic() < until, f"{what}\n{made.logs()}"
    time.sleep(0.1)  # between two looks


def _end(made: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Ends the daemons, and kills what is left after that."""
    for each in reversed(daemons):
        each.terminate()
    until = time.monotonic() + 10
    for each in reversed(daemons):
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(until - time.monotonic(), 0.1))
    until = time.monotonic() + 20
    while left := made.processes():
        assert time.monotonic() < until, f"{left} cannot be killed"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # between two looks
    for each in daemons:
        each.wait(20)


def main() -> None:
    """Runs a command in a cluster of its own."""
    reason = why_not()
    if reason is not None:
        sys.exit(reason)
    if not sys.argv[1:]:
        sys.exit(f"give a command to run in it, such as: sinfo\n{__doc__}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without `_end`
    with cluster() as made:
        sys.exit(subprocess.run(sys.argv[1:], env=dict(made.variables)).returncode)


if __name__ == "__main__":
    main()
