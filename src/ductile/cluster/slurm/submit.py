"""What a command with a `[slurm]` table does: it writes a script and the config that the script runs into the run's
folder, and hands the script to sbatch.

    runs/x/rl.sbatch            the script
    runs/x/configs/rl.toml      the resolved config, without `[slurm]`: in the job the command runs
    runs/x/slurm/               logs of the job: job_71.log, and a folder for each attempt
"""

import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ductile.cluster.slurm.job import Job, SubmittedConfig, in_words, job_of
from ductile.cluster.slurm.script import MARK, SUFFIX, TEMPLATES, BadTemplate, render
from ductile.config.checks.serving_plan import NodeServers, non_cached_tokens, policy_of, router_of, router_port
from ductile.config.checks.written import RESOLVED
from ductile.config.reading.command_line import pasteable
from ductile.config.reading.dump import write_resolved
from ductile.config.schema.cluster import (
    ClusterConfig,
    MultiNodeServing,
    ServingDeploymentConfig,
    SingleNodeServing,
    SlurmConfig,
)
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.config.schema.http_server import HttpServerConfig
from ductile.config.schema.inference import EngineConfig
from ductile.config.schema.run import InferenceRunConfig, RLConfig, RouterRunConfig, SFTConfig
from ductile.disk import write_whole
from ductile.user_files import NotText, read_text

DONE, NOT_SUBMITTED = 0, 2
SUBMIT_S = 120.0
"""Seconds that sbatch has to take a job."""
READY_S = 1800
"""Seconds that the orchestrator has, in a job, to read its data and to listen for nodes."""
KEY_VARIABLE = "DUCTILE_SERVER_KEY"
"""Environment variable with the key of servers that were not given one."""

DEFAULT_RESTARTS: int = ClusterConfig.model_fields["max_restarts"].default


class NotSubmitted(Exception):
    """A job was not submitted. The text says why, and what to do."""


def submit(command: str, config: SubmittedConfig) -> int:
    """Submit the job, or only say what it would be where `dry_run` is set. Returns the exit status."""
    assert config.slurm is not None
    try:
        job, folder = job_of(command, config), Path(config.output_dir)
        script, resolved = write_job(job, config, config.slurm, folder)
        where = [f"  script      {script}", f"  config      {resolved}", *(f"  {line}" for line in job.table())]
        if config.dry_run:
            said = f"The config is good. This would be submitted: {in_words(job, config.slurm)}."
            where.append(f"  to submit   sbatch {script}, or the same command without --dry-run")
        else:
            number = _sbatch(script)
            said = f"Submitted job {number}. {in_words(job, config.slurm)}."
            where.append(f"  log         {folder / 'slurm' / f'job_{number}.log'}")
            if "servers" not in job.kind:
                where.append(f"  ask it      {pasteable('status', folder)}")
        if "servers" in job.kind:
            which = "the router's" if job.behind_router else "one a node"
            where.append(f"  addresses   {folder / 'slurm' / 'urls'}, {which}, once the job runs")
            if _makes_key(config):
                where.append(f"  their key   {folder / 'slurm' / 'server_key'}")
    except (BadTemplate, NotSubmitted, OSError) as error:
        print(f"ductile {command}: {error}", file=sys.stderr)
        return NOT_SUBMITTED
    print("\n".join([said, *where]))
    return DONE


def write_job(job: Job, config: SubmittedConfig, slurm: SlurmConfig, folder: Path) -> tuple[Path, Path]:
    """Write script and config; returns their paths. Raises BadTemplate, NotSubmitted or OSError."""
    script, resolved = folder / f"{job.command}.sbatch", folder / "configs" / f"{job.command}.toml"
    _require_own(script, MARK)
    _require_own(resolved, RESOLVED)
    template = Path(slurm.template_path) if slurm.template_path else TEMPLATES / f"{job.kind}{SUFFIX}"
    text = render(template.absolute(), values(job, config, slurm, folder))
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    if _makes_key(config) and not (key := folder / "slurm" / "server_key").exists():
        write_whole(key, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
    own = in_job(job, config, folder)
    if job.behind_router and isinstance(own, InferenceRunConfig):
        write_resolved(router_in_job(own, config), resolved.parent, "router", "router.toml")
        for group in job.behind_router:
            write_resolved(server_in_job(own, group), resolved.parent, job.command, _config_of(group).name)
    else:
        write_resolved(own, resolved.parent, job.command, resolved.name)
    write_whole(script, text)
    return script, resolved


def in_job(job: Job, config: SubmittedConfig, folder: Path) -> SubmittedConfig:
    """Return the config that the job runs: it submits nothing, and every node joins. Servers listen on all addresses of
    their node, with a key, unless the user has said otherwise."""
    changes: dict[str, object] = {"slurm": None, "output_dir": str(folder.absolute())}
    if isinstance(config, InferenceRunConfig):
        server = {} if "host" in config.server.model_fields_set else {"host": "0.0.0.0"}
        server |= {"api_key_var": KEY_VARIABLE} if _makes_key(config) else {}
        changes["deployment"] = _on_each_node(config.deployment)
        changes["server"] = config.server.model_copy(update=server)
    elif config.ray is not None:
        changes["ray"] = config.ray.model_copy(update={"address": "auto"})  # the one that the script starts
    elif job.kind == "multi_node":
        changes["cluster"] = config.cluster.model_copy(update={"head_is_node": False})
    return config.model_copy(update=changes)


def server_in_job(own: InferenceRunConfig, group: NodeServers) -> InferenceRunConfig:
    """Return the config of each server of a group, which is told its port."""
    overrides = EngineConfig.model_validate(group.overrides)
    changes: dict[str, object] = {name: getattr(overrides, name) for name in group.overrides}
    changes["parallel"] = own.parallel.model_copy(update={"dp": None})
    changes["server"] = own.server.model_copy(update={"port": group.port})
    changes["cluster"] = own.cluster.model_copy(update={"max_restarts": DEFAULT_RESTARTS})  # the script does that
    return own.model_copy(update={**changes, "deployment": SingleNodeServing()})


def router_in_job(own: InferenceRunConfig, config: SubmittedConfig) -> RouterRunConfig:
    """Return the config of the router, which is told the servers' addresses. own: the servers' config in the job."""
    assert isinstance(config, InferenceRunConfig)
    asked = router_of(config)
    assert asked is not None
    server: dict[str, Any] = {name: getattr(own.server, name) for name in HttpServerConfig.model_fields}
    server["port"] = router_port(config, asked)
    health = {name: getattr(own, name) for name in HealthCheckConfig.model_fields}
    return RouterRunConfig(
        policy=policy_of(asked),
        non_cached_tokens=non_cached_tokens(asked),
        server=HttpServerConfig(**server),
        output_dir=own.output_dir,
        log=own.log,
        **health,
    )


def _config_of(group: NodeServers) -> Path:
    """Return the name of the config of a group's servers; that of those that finish requests is the command's own."""
    return Path("prefill.toml" if group.role == "prefill" else "inference.toml")


def values(job: Job, config: SubmittedConfig, slurm: SlurmConfig, folder: Path) -> dict[str, object]:
    """Return the variables of a template, as docs/slurm.md lists them."""
    limits = {
        "partition": slurm.partition,
        "account": slurm.account,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
        "time": slurm.time,
    }
    return {
        "command": job.command,
        "job_name": slurm.job_name,
        "limits": {name: value for name, value in limits.items() if value is not None},
        "num_nodes": job.num_nodes,
        "gpus_per_node": job.gpus_per_node,
        "cpus_per_task": job.cpus_per_task,
        "first_rank": job.first_rank,
        "run": str(folder.absolute()),
        "config": str((folder / "configs" / f"{job.command}.toml").absolute()),
        "project_dir": str(Path(slurm.project_dir).absolute()),
        "python": sys.executable,
        "pre_run_command": slurm.pre_run_command,
        "first_flags": first_flags(config),
        "ready_s": READY_S,
        "grace_s": slurm.cleanup_grace_period,
        "notice_s": slurm.notice_s,
        "requeue": slurm.requeue,
        "interface": config.cluster.interface or "",
        "port": _port(config),
        "groups": [
            {
                "role": group.role,
                "num_nodes": group.num_nodes,
                "first_node": sum(each.num_nodes for each in job.behind_router[:place]),
                "each": group.each,
                "port": group.port,
                "config": str((folder / "configs" / _config_of(group)).absolute()),
                "environment": [f"{name}={value}" for name, value in group.environment.items()],
            }
            for place, group in enumerate(job.behind_router)
        ],
        "max_restarts": config.cluster.max_restarts,
        "key_variable": KEY_VARIABLE if _makes_key(config) else "",
    }


def first_flags(config: SubmittedConfig) -> Sequence[str]:
    """Return what was asked once, and is not in the resolved config. Later attempts go on with what there is."""
    if not isinstance(config, RLConfig | SFTConfig):
        return []
    if config.ckpt.resume_step is not None:
        return ["--resume"] if config.ckpt.resume_step == -1 else ["--ckpt.resume-step", str(config.ckpt.resume_step)]
    return ["--clean"] if config.clean else []


def _on_each_node(deployment: ServingDeploymentConfig) -> ServingDeploymentConfig:
    """Return the deployment that each node of a job has."""
    if not isinstance(deployment, MultiNodeServing):
        return deployment
    given = {
        name: getattr(deployment, name) for name in deployment.model_fields_set & SingleNodeServing.model_fields.keys()
    }
    return SingleNodeServing.model_validate({**given, "type": "single_node"})


def _port(config: SubmittedConfig) -> int:
    """Return the port at which clients reach a node; 0 where nothing is served."""
    if not isinstance(config, InferenceRunConfig):
        return 0
    router = router_of(config)
    return config.server.port if router is None else router_port(config, router)


def _makes_key(config: SubmittedConfig) -> bool:
    return isinstance(config, InferenceRunConfig) and config.server.api_key_var is None


def _require_own(file: Path, begins: str) -> None:
    """Raises NotSubmitted where a file that is to be replaced is the user's own."""
    try:
        is_own = not file.exists() or any(line.startswith(begins) for line in read_text(file).splitlines()[:2])
    except NotText:
        is_own = False
    if not is_own:
        raise NotSubmitted(
            f"{file} would be replaced, and was not written by ductile: move it, or give another output_dir"
        )


def _sbatch(script: Path) -> str:
    """Returns the number of the job. Raises NotSubmitted."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise NotSubmitted(
            f"there is no sbatch here: submit from a login node of the cluster. The script is written: {script}. "
            "Without [slurm] (--no-slurm) the command runs on this machine"
        )
    try:
        words = [sbatch, "--parsable", str(script)]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=SUBMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NotSubmitted(f"sbatch did not take {script} within {SUBMIT_S:g} s") from error
    if done.returncode:
        raise NotSubmitted(f"sbatch refuses {script}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
