"""Ray clusters whose nodes are raylets on this machine, for `make cluster-test`.

`RayNodes` has nodes that a test adds, drains and removes; `RayAutoscaler` has an autoscaler that brings them.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.cluster.processes import processes_with
from tests.cluster.real.same_run import RAY, free_port

START_S = 120.0
WORKER = "worker_node"
"""A custom resource of which each node has one, so that there is one agent a node."""


class RayNodes:
    """A cluster that begins with one node, the head, of one CPU, as all others."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ.update(RAY)  # this process starts the nodes
        self.cluster = Cluster(initialize_head=True, connect=False, head_node_args=self._arguments())
        self.address: str = self.cluster.address

    def _arguments(self) -> dict[str, Any]:
        return {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}

    def add(self) -> Any:
        return self.cluster.add_node(**self._arguments())

    def remove(self, node: Any) -> None:
        """Kill the node's processes, as a machine that is switched off."""
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, within_s: float) -> None:
        words = ["drain-node", "--address", self.address, "--node-id", node.node_id]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        ray(*words, "--deadline-remaining-seconds", f"{within_s:.0f}")


class RayAutoscaler:
    """A head without CPUs, and an autoscaler that starts up to `max_workers` nodes of one CPU where they are asked for,
    by Ray's own provider for tests."""

    def __init__(self, folder: Path, max_workers: int) -> None:
        self._folder, self._max_workers, self.port = folder, max_workers, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._mark = f"DUCTILE_TEST_RAY={uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        config = self._folder / "autoscaler.json"
        config.write_text(json.dumps(self._config()))
        name, _, value = self._mark.partition("=")
        environment = {
            **os.environ,
            **RAY,
            name: value,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        flags = ["--num-cpus=0", "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={self.port}"]
        ray("start", "--head", f"--autoscaling-config={config}", *flags, environment=environment)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what has been started, also by the autoscaler."""
        until = time.monotonic() + START_S
        while left := processes_with(self._mark):
            assert time.monotonic() < until, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    def requested(self) -> list[dict[str, float]]:
        """Return what the cluster is asked to have room for."""
        from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
        from ray._raylet import GcsClient

        text = GcsClient(self.address).internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, None)
        return json.loads(text) if text else []

    def _config(self) -> dict[str, Any]:
        worker = {"resources": {"CPU": 1, WORKER: 1}, "node_config": {}, "min_workers": 0}
        lists = ["initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"]
        lists += ["head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"]
        lists += ["rsync_exclude", "rsync_filter"]
        return {
            "cluster_name": "ductile",
            "max_workers": self._max_workers,
            "provider": {"type": "fake_multinode", "gcs_address": self.address, "launch_multiple": True},
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {**worker, "max_workers": self._max_workers},
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 10,
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            **{name: [] for name in lists},
        }


def ray(*words: str, environment: dict[str, str] | None = None) -> str:
    """Run Ray's command to its end; return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env=environment or {**os.environ, **RAY},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
