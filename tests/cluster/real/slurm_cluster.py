"""A real SLURM on this machine, for `make cluster-test`: a controller and two nodes without GPUs, from packages of
Debian, as root. A partition `cluster` of 128 nodes of 8 GPUs exists on paper only, for `sbatch --test-only`.

with SlurmCluster(folder) as slurm:
    slurm.wait(job)
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
INSTALL_S, START_S, JOB_S = 300.0, 60.0, 300.0
MUNGE = Path("/run/munge")
CONF = """\
ClusterName=ductile
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPort=6817
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd_%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=2
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17001 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17002 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=gpu[1-128] CPUs=64 RealMemory=500000 Gres=gpu:8 State=CLOUD
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
PartitionName=cluster Nodes=gpu[1-128] MaxTime=INFINITE State=UP
"""


class SlurmFailed(Exception):
    """SLURM does not do what it is asked. The text says what, and what it has said."""


class SlurmCluster:
    """A controller and its two nodes, from start to stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_munge = False
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = {**os.environ, **self.variables}
        self.took = ""
        """How long it took to be there, in words."""

    def __enter__(self) -> Self:
        if os.geteuid():
            raise SlurmFailed("a SLURM on this machine needs root: its daemons start jobs")
        began_s = time.monotonic()
        if not all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "munged")):
            self._install()
        installed_s = time.monotonic()
        for name in ("state", "log", "run"):
            (self._folder / name).mkdir()
        (self._folder / "slurm.conf").write_text(CONF.format(folder=self._folder))
        if not (MUNGE / "munged.pid").exists():
            self._made_munge = True
            MUNGE.mkdir(exist_ok=True)
            shutil.chown(MUNGE, "munge", "munge")
            self.say("runuser", "-u", "munge", "--", "/usr/sbin/munged")
        self.say("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.say("slurmd", "-N", node)
        self.wait_until_idle()
        self.took = f"installed in {installed_s - began_s:.1f} s, up in {time.monotonic() - installed_s:.1f} s"
        return self

    def __exit__(self, *_: object) -> None:
        self.say("scancel", "--user", "root", "--partition", "main")
        self.say("scontrol", "shutdown")
        pids = [*(self._folder / "run").glob("*.pid")]
        self._until(START_S, "its daemons have ended", lambda: not any(_is_alive(pid) for pid in pids))
        if self._made_munge:
            os.kill(int((MUNGE / "munged.pid").read_text()), 15)

    def say(self, *words: str, within_s: float = START_S) -> str:
        """Run a command of SLURM's; returns what it says. Raises SlurmFailed."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=within_s)
        if done.returncode:
            raise SlurmFailed(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the job's state: "RUNNING", "COMPLETED"."""
        return self.say("squeue", "-h", "--states=all", "-j", job, "-o", "%T")

    def wait_until_idle(self) -> None:
        """Wait until nothing of any job is left on the nodes."""
        self._until(
            JOB_S, "the nodes are idle", lambda: self.say("sinfo", "-h", "-p", "main", "-o", "%t %D") == "idle 2"
        )

    def address(self, node: str) -> str:
        """Return the address of a node, whose name means nothing outside of SLURM."""
        shown = self.say("scontrol", "show", "node", "-o", node)
        return next(word for word in shown.split() if word.startswith("NodeAddr=")).removeprefix("NodeAddr=")

    def exit_code(self, job: str) -> str:
        """Return what the script has ended with: "0:0"."""
        shown = self.say("scontrol", "show", "job", "-o", job)
        return next(word for word in shown.split() if word.startswith("ExitCode=")).removeprefix("ExitCode=")

    def wait_until(self, job: str, states: tuple[str, ...], within_s: float = JOB_S) -> str:
        """Return the first of the states that the job is in. Raises SlurmFailed when it is in none in time."""
        self._until(within_s, f"job {job} is {' or '.join(states)}", lambda: self.state(job) in states)
        return self.state(job)

    def _install(self) -> None:
        for words in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *PACKAGES]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(
                ["apt-get", *words], env=environment, capture_output=True, text=True, timeout=INSTALL_S
            )
            if done.returncode:
                raise SlurmFailed(f"apt-get {' '.join(words)}: {done.stderr.strip()}")

    def _until(self, within_s: float, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until:
                raise SlurmFailed(f"not within {within_s:g} s: {what}. {self._logs()}")
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in (self._folder / "log").iterdir())


def _is_alive(pid_file: Path) -> bool:
    try:
        return Path(f"/proc/{pid_file.read_text().strip()}").exists()
    except OSError:
        return False
