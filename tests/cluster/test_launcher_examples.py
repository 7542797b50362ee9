"""The examples for Kubernetes, SkyPilot and dstack: manifests against Kubernetes' own schema and against each other,
and every command in them against ductile's command line, as each of two nodes would run it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ductile.cli import COMMANDS, main
from ductile.cluster.join_command import arguments
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.transport.http_server.listener import DRAIN_S
from ductile.transport.http_server.middleware import PROBES
from ductile.transport.network import interfaces
from tests.config.stories import furnish

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCHEMA = json.loads(Path(__file__).with_name("kubernetes_schema.json").read_text())
PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
MODEL = "/shared/models/Qwen3-14B"
LEAVE_S = 15
"""Seconds between the drain of a node and its end."""
Manifest = dict[str, Any]
MANIFESTS: list[tuple[str, Manifest]] = [
    (file.name, manifest)
    for file in sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
NAMES = {f"{file} {manifest['kind']} {manifest['metadata']['name']}": manifest for file, manifest in MANIFESTS}
SKYPILOT: Manifest = yaml.safe_load((EXAMPLES / "skypilot/rl.yaml").read_text(encoding="utf-8"))
DSTACK: Manifest = yaml.safe_load((EXAMPLES / "dstack/rl.dstack.yml").read_text(encoding="utf-8"))
SKYPILOT_KEYS = {
    "name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run", "config",
}  # fmt: skip
DSTACK_KEYS = {
    "type", "name", "nodes", "python", "image", "shell", "repos", "files", "env", "commands", "volumes", "resources",
    "ports", "spot_policy", "max_duration", "retry", "fleets",
}  # fmt: skip


def wrong(manifest: Manifest) -> list[str]:
    """Return what Kubernetes' schema says of a manifest."""
    schema = {"$ref": f"#/$defs/{SCHEMA['kinds'][manifest['kind']]}", "$defs": SCHEMA["$defs"]}
    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]


def named(name: str) -> Manifest:
    return next(manifest for key, manifest in NAMES.items() if key.endswith(name))


def templates() -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """Yield each manifest that has pods, the pods' spec and their container."""
    for _, manifest in MANIFESTS:
        if "template" in manifest["spec"]:
            pod = manifest["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield manifest, pod, container


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_as_the_schema_of_kubernetes_wants_it(name: str) -> None:
    assert not wrong(NAMES[name])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Job ductile-rl", lambda it: it["spec"].update(completion_mode="Indexed"), "completion_mode"),
        ("Job ductile-rl", lambda it: it["spec"].update(completions="2"), "'2' is not of type 'integer'"),
        ("Job ductile-rl", lambda it: it["spec"]["template"]["spec"].update(terminationGracePeriod=9), "terminationG"),
        ("Job ductile-rl", lambda it: it.update(apiVersion="batch/v1beta1"), "batch/v1"),
        ("Deployment ductile-router", lambda it: it["spec"].pop("selector"), "'selector' is a required property"),
        (
            "StatefulSet ductile-inference",
            lambda it: it["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"].pop("port"),
            "'port' is a required property",
        ),
    ],
)  # fmt: skip
def test_the_schema_finds_what_kubernetes_would_refuse(name: str, change: Any, says: str) -> None:
    manifest = deepcopy(named(name))
    change(manifest)
    assert says in "\n".join(wrong(manifest))


def test_what_manifests_name_is_there() -> None:
    services = {
        manifest["metadata"]["name"]: manifest["spec"] for _, manifest in MANIFESTS if manifest["kind"] == "Service"
    }
    claims = {manifest["metadata"]["name"] for _, manifest in MANIFESTS if manifest["kind"] == "PersistentVolumeClaim"}
    labels = []
    for manifest, pod, container in templates():
        labels.append(manifest["spec"]["template"]["metadata"]["labels"])
        assert manifest["spec"].get("selector", {}).get("matchLabels", labels[-1]) == labels[-1]
        for headless in filter(None, (pod.get("subdomain"), manifest["spec"].get("serviceName"))):
            assert services[headless]["clusterIP"] == "None"
            assert services[headless]["selector"] == labels[-1]
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes.keys()
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            if "configMap" in volume:
                assert f"configmap {volume['configMap']['name']} " in PAGE
        for variable in container["env"]:
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert f"secret generic {secret['name']} --from-file={secret['key']}=" in PAGE
    for spec in services.values():
        assert spec["selector"] in labels
    policy = named("NetworkPolicy ductile-rl")["spec"]
    assert (
        policy["podSelector"]
        == policy["ingress"][0]["from"][0]["podSelector"]
        == {"matchLabels": {"app": "ductile-rl"}}
    )


def test_probes_ask_routes_that_there_are_and_that_need_no_key() -> None:
    source = {
        "inference": (ROOT / "src/ductile/generator/server/server.py").read_text(encoding="utf-8"),
        "router": (ROOT / "src/ductile/fleet/router/router_app.py").read_text(encoding="utf-8"),
    }
    seen = set()
    for _, _, container in templates():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in (container[key] for key in container if key.endswith("Probe")):
            path, port = probe["httpGet"]["path"], probe["httpGet"]["port"]
            command = container["command"][1]
            assert path in PROBES
            assert re.search(rf'(@_routes\.get|Route)\("{path}"', source[command])
            assert f"--server.port={ports[port]}" in container["command"]
            seen.add((command, path))
    assert seen == {(command, path) for command in source for path in PROBES}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, in the place of a node's; the current folder is ductile's, as the scripts have it."""
    furnish(tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DUCTILE_SERVER_KEY", "a key of the servers")
    return tmp_path


def called(script: str, here: Path, environment: Mapping[str, str]) -> list[list[str]]:
    """Run a script; return the words of each command `ductile` in it."""
    (here / "bin").mkdir(exist_ok=True)
    calls = here / "calls"
    calls.write_text("")
    program = here / "bin/ductile"
    program.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\n' >> {calls}\n")
    program.chmod(0o755)
    (here / "bin/pip").symlink_to("/bin/true") if not (here / "bin/pip").exists() else None
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    words = ["bash", "-euc", script]
    done = subprocess.run(words, env={"PATH": path, **environment}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\0")[:-1] for line in calls.read_text().split("\n\0")[:-1]]


def of_kubernetes(here: Path, rank: int) -> list[list[str]]:
    (container,) = named("Job ductile-rl")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-euc"]
    (script,) = container["args"]
    known = {each["name"] for each in container["env"]}
    own = {"CONFIG": f"{EXAMPLES / 'multinode/rl.toml'}", "MODEL": f"{here / 'model'}", "RUN": f"{here / 'run'}"}
    assert own.keys() < known
    return called(script, here, {**own, "JOB_COMPLETION_INDEX": f"{rank}"})


def of_skypilot(here: Path, rank: int) -> list[list[str]]:
    assert SKYPILOT.keys() <= SKYPILOT_KEYS
    assert SKYPILOT["secrets"] == {"DUCTILE_CLUSTER_KEY": None}, "it is in no file"
    assert SKYPILOT["envs"].keys() == {"MODEL", "RUN"}
    given = {"SKYPILOT_NODE_RANK": f"{rank}", "SKYPILOT_NODE_IPS": f"{own_address()}\n192.0.2.2"}
    return called(SKYPILOT["run"], here, {"MODEL": f"{here / 'model'}", "RUN": f"{here / 'run'}", **given})


def of_dstack(here: Path, rank: int) -> list[list[str]]:
    assert DSTACK.keys() <= DSTACK_KEYS
    assert [each.partition("=")[0] for each in DSTACK["env"]] == ["DUCTILE_CLUSTER_KEY", "MODEL", "RUN"]
    assert "DUCTILE_CLUSTER_KEY" in DSTACK["env"], "its value is in no file"
    given = {"DSTACK_NODE_RANK": f"{rank}", "DSTACK_MASTER_NODE_IP": own_address()}
    script = "\n".join(DSTACK["commands"])
    return called(script, here, {"MODEL": f"{here / 'model'}", "RUN": f"{here / 'run'}", **given})


def own_address() -> str:
    return interfaces()[0][1]


NODES = {"kubernetes": of_kubernetes, "skypilot": of_skypilot, "dstack": of_dstack}


@pytest.mark.parametrize("launcher", NODES)
def test_the_first_node_runs_the_example_and_goes_on_with_what_there_is(launcher: str, here: Path) -> None:
    ((command, *words),) = NODES[launcher](here, 0)
    assert command == "rl"
    config = parse(RLConfig, words).config
    assert (config.cluster.num_nodes, config.cluster.head_is_node, config.cluster.port) == (2, True, 29400)
    assert (config.output_dir, config.slurm) == (str(here / "run"), None)
    assert "--resume" not in words
    assert main([command, *words, "--dry-run"]) == 0
    (here / "run/metrics.jsonl").write_text("{}\n")
    ((_, *again),) = NODES[launcher](here, 0)
    assert again == [*words, "--resume"]
    if launcher == "kubernetes":
        pod = named("Job ductile-rl")["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= config.cluster.drain_deadline_s + LEAVE_S
    else:
        assert config.cluster.interface == own_address()


@pytest.mark.parametrize("launcher", NODES)
def test_the_others_join_it_with_their_numbers(launcher: str, here: Path) -> None:
    ((command, *words),) = NODES[launcher](here, 1)
    asked = arguments(words)
    assert (command, asked.node_rank, asked.wait_s) == ("join", 1, 3600.0)
    job = named("Job ductile-rl")
    name = f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
    assert asked.run == f"{name if launcher == 'kubernetes' else own_address()}:29400"
    assert asked.again == (launcher == "kubernetes"), "elsewhere all nodes are started again"


@pytest.mark.parametrize("name", ["StatefulSet ductile-inference", "Deployment ductile-router"])
def test_servers_and_router_are_as_ductile_has_them(name: str, here: Path) -> None:
    manifest = named(name)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    program, command, *words = [word.replace(MODEL, f"{here / 'model'}") for word in container["command"]]
    assert (program, command in COMMANDS) == ("ductile", True)
    assert main(["check", command, *words]) == 0
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= DRAIN_S + LEAVE_S
    if command == "router":
        servers = named("StatefulSet ductile-inference")
        urls = [
            f"http://{servers['metadata']['name']}-{number}.{servers['spec']['serviceName']}:8000"
            for number in range(servers["spec"]["replicas"])
        ]
        assert [word for word in words if word.startswith("http")] == urls


def test_no_example_has_a_secret_and_each_says_that_it_has_not_been_run() -> None:
    for file in (
        *(EXAMPLES / "kubernetes").iterdir(),
        EXAMPLES / "skypilot/rl.yaml",
        EXAMPLES / "dstack/rl.dstack.yml",
    ):
        text = file.read_text(encoding="utf-8")
        assert "has not been run" in text
        assert not re.search(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", re.sub(r"\S*/\S*", "", text)), file
