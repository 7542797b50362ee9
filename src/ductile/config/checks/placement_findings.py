"""Findings on the slots of a run: who has which, what shares a GPU, and how the trainer's state lies on its own."""

from collections import Counter
from collections.abc import Iterator

from ductile.config.checks.asked_placement import SlotsConfig, lacks_generators, placement_of, slots_per_node_of
from ductile.config.checks.asked_servers import asked_servers
from ductile.config.checks.scorer_findings import scorer_findings
from ductile.config.checks.trainer_layout import layout_findings
from ductile.config.finding import Finding
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.trainer import CustomLoss
from ductile.core.instances.placement import Placement, PlacementError
from ductile.core.layout.choice.layout_text import compact


def placement_findings(config: RLConfig | SFTConfig | TrainerRunConfig) -> Iterator[Finding]:
    """Find a placement that cannot be, and numbers that say the same thing and do not say the same."""
    yield from _cluster(config.cluster)
    given = config.cluster.component_placement is not None
    needs = (
        "needs_reference" if isinstance(config, RLConfig) and isinstance(config.trainer.loss, CustomLoss) else "kl_coef"
    )
    keys = ("cluster.component_placement",) if given else (f"trainer.loss.{needs}", "deployment")
    try:
        placement = placement_of(config)
    except PlacementError as error:
        if lacks_generators(config):
            return  # told in the words of the deployment
        yield from (Finding(keys, violation) for violation in error.violations)
        return
    if not isinstance(config, RLConfig) and (placement.generate or placement.score):
        what = "gives slots to other roles than actor, and this command only trains. Write "
        yield Finding(keys, f'{what}{{"actor": "{compact(range(len(placement.train)))}"}}')
        return
    deployment = config.deployment
    numbers = {
        "num_train_gpus": len(placement.train),
        "num_infer_gpus": len(placement.generate),
        "num_gpus": len(placement.train),
    }
    for name in sorted(deployment.model_fields_set & numbers.keys()):
        if getattr(deployment, name) != numbers[name]:
            yield Finding(
                (f"deployment.{name}", "cluster.component_placement"),
                f"contradicts cluster.component_placement, which has {numbers[name]}. Leave one of them out",
            )
    yield from _nodes(config, placement, keys)
    yield from _ray(config)
    if isinstance(config, RLConfig):
        parallel, num_slots = config.inference.parallel, len(placement.generate)
        if num_slots and parallel.dp is not None and parallel.dp * parallel.tp != num_slots:
            what = f"must be {num_slots // parallel.tp}: {num_slots} generate slots, {parallel.tp} for one copy."
            about = ("inference.parallel.dp", "inference.parallel.tp", *keys, "deployment.num_infer_gpus")
            yield Finding(about, what + " Or leave it out")
        yield from _shared_memory(config, placement)
        yield from _shared_devices(config, placement)
        yield from scorer_findings(config, placement)
    yield from _trainer_layout(config, len(placement.train))


def _nodes(config: SlotsConfig, placement: Placement, keys: tuple[str, ...]) -> Iterator[Finding]:
    """Find nodes with too little room for the placement, and those that would have nothing to do."""
    cluster, num_slots = config.cluster, placement.num_slots
    num_nodes, each = cluster.num_nodes, cluster.slots_per_device
    per_node = slots_per_node_of(config, placement)
    on_cpus = cluster.device == "cpu"
    size = per_node.on_cpus if on_cpus and num_nodes > 1 else per_node.on_gpus
    if num_slots > size * num_nodes:
        slots = "the slots" if each == 1 and num_nodes == 1 else f"for the {num_slots} slots"
        also = f" of the {num_nodes} nodes" if num_nodes > 1 else ""
        yield Finding(
            ("deployment.gpus_per_node", *keys),
            f"must be at least {-(-num_slots // (each * num_nodes))}, {slots} that the placement uses{also}",
        )
    elif num_nodes > 1 and -(-num_slots // size) < num_nodes:
        what = (
            f"is {num_nodes}, and node {num_nodes - 1} would have no slot: the placement uses {num_slots}, and a node "
            f"has {size} (deployment.gpus_per_node). Write more slots, or fewer nodes"
        )
        yield Finding(("cluster.num_nodes", "deployment.gpus_per_node", *keys), what)
    if cluster.max_nodes is not None and cluster.max_nodes < num_nodes:
        yield Finding(("cluster.max_nodes", "cluster.num_nodes"), f"must be at least cluster.num_nodes ({num_nodes})")


def _ray(config: SlotsConfig) -> Iterator[Finding]:
    if config.ray is None:
        return
    num_nodes, address = config.cluster.num_nodes, config.ray.address
    is_of_a_job = not isinstance(config, TrainerRunConfig) and config.slurm is not None
    if address is None and num_nodes > 1 and not is_of_a_job:
        what = (
            f"must be given: without it a Ray cluster is started on this machine, which is one node, and "
            f'cluster.num_nodes is {num_nodes}. Write "auto" on a machine of the cluster'
        )
        yield Finding(("ray.address", "cluster.num_nodes"), what)
    if address is not None and "://" in address:
        what = 'is for clients outside of the cluster. Run the command on a machine of it, and write "auto"'
        yield Finding(("ray.address",), what)


def _shared_memory(config: RLConfig, placement: Placement) -> Iterator[Finding]:
    """Generators on one GPU take no more than there is."""
    each, share = config.cluster.slots_per_device, config.inference.gpu_memory_utilization
    generating = placement.slots if config.cluster.auto_scheduler else placement.generate
    most_on_one = max(Counter(slot // each for slot in generating).values(), default=0)
    if share is not None and share * most_on_one > 1:
        what = f"must be at most {int(1000 / most_on_one) / 1000}: {most_on_one} generators share a GPU"
        yield Finding(("inference.gpu_memory_utilization", "cluster.slots_per_device"), what)


def _shared_devices(config: RLConfig, placement: Placement) -> Iterator[Finding]:
    """Roles share slots only where there is memory for both, and devices are lent only where no server gets weights."""
    cluster = config.cluster
    if cluster.share_devices is False and placement.shares:
        what = (
            "says that a device has no memory for two roles, and the placement has actor and rollout share slots: "
            "write true, or give the roles slots of their own"
        )
        yield Finding(("cluster.share_devices", "cluster.component_placement"), what)
    if cluster.enable_offload and (asked_servers(config).urls or config.inference.registry is not None):
        what = (
            "parks the trainer's state while slots generate in its place, and servers get weights from the trainer at "
            "any time: leave it out, or have slots alone generate"
        )
        yield Finding(("cluster.enable_offload", "orchestrator.client.base_url", "inference.registry"), what)


def _trainer_layout(config: RLConfig | SFTConfig | TrainerRunConfig, num_slots: int) -> Iterator[Finding]:
    """How the trainer's state lies on its slots, and how it can come to lie on others."""
    trainer, root = (config.trainer, "trainer.") if isinstance(config, RLConfig) else (config, "")
    yield from layout_findings(config, num_slots)
    if trainer.resize.memory == "streaming" and trainer.resize.carrier == "peer_memory":
        what = (
            'cannot stream: a slot would not know when its memory has been read and may be freed. Write "p2p" or "auto"'
        )
        yield Finding((f"{root}resize.carrier", f"{root}resize.memory"), what)
    if trainer.resize.memory == "streaming" and trainer.resize.verify == "all":
        what = (
            f"compares what a slot copied for itself with what it had, which {root}resize.memory = "
            f'"streaming" has freed by then. Write "moved", or {root}resize.memory = "shadow"'
        )
        yield Finding((f"{root}resize.verify", f"{root}resize.memory"), what)


def _cluster(config: ClusterConfig) -> Iterator[Finding]:
    if config.cpu_slot_fraction is not None and config.device == "cuda":
        yield Finding(("cluster.cpu_slot_fraction", "cluster.device"), 'caps CPU slots, and device is "cuda"')
    if config.slots_per_device > 1 and config.device == "cpu":
        what = 'puts several slots on each GPU, and device is "cpu", where there may be any number. Leave it out'
        yield Finding(("cluster.slots_per_device", "cluster.device"), what)


def deadline_warnings(config: ClusterConfig) -> Iterator[str]:
    hangs_s = max(config.command_timeout_s, config.progress_timeout_s or 0.0)
    if config.group_timeout_s is not None and config.group_timeout_s <= hangs_s:
        yield (
            f"cluster.group_timeout_s = {config.group_timeout_s:g}: a generator that hangs is replaced after "
            f"{hangs_s:g} s (cluster.command_timeout_s, cluster.progress_timeout_s), and the run may end before. Write "
            "more than that"
        )
