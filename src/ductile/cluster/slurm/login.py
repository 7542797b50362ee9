"""Asking the run of a job from a login node: a run listens on loopback alone, and SLURM knows who may enter a job."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ductile.user_files import NotText, read_text

JOB_FILE = Path("slurm/latest/job")
"""File in a run's folder with the job's number and the node that runs its orchestrator: "71 node3"."""
_JOB = re.compile(r"(\d+) ([\w.-]+)\s*")


def run_in_job(folder: Path, words: Sequence[str]) -> int | None:
    """Run a `ductile` command beside the orchestrator of the job that the run in `folder` is in, by `srun`.

    Returns its exit status; None where the run is in no job, or there is no srun here.
    """
    srun = shutil.which("srun")
    try:
        found = _JOB.fullmatch(read_text(folder / JOB_FILE))
    except (OSError, NotText):
        found = None
    if srun is None or found is None:
        return None
    where = [f"--jobid={found[1]}", f"--nodelist={found[2]}", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
    return subprocess.run([srun, *where, sys.executable, "-P", "-m", "ductile", *words], check=False).returncode
