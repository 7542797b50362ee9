"""What goes on beside the loop of a run: the books of its slots' time, and the controller that moves its slots."""

import time
from functools import partial
from typing import Self

from ductile.cluster.cluster import Cluster
from ductile.concurrency.listeners import Listeners
from ductile.config.checks.asked_policy import policy_arguments, policy_name, policy_of
from ductile.config.checks.asked_servers import asked_servers
from ductile.config.checks.on_disk import read_spec
from ductile.config.schema.inference import shared_block_tokens
from ductile.config.schema.run import RLConfig
from ductile.core.instances.placement import Placement, slots_of
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.scheduling.costs.cost_model import CostModel
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.ledger import Ledger
from ductile.core.scheduling.facts.profile import Setting
from ductile.core.scheduling.policies.rules import Home
from ductile.elastic.activity import SlotActivity
from ductile.elastic.actuator import LiveActuator
from ductile.elastic.controller import ElasticController
from ductile.elastic.measuring import Measuring
from ductile.elastic.profiling import Profiler
from ductile.elastic.recovery import Recovery
from ductile.elastic.situation import situation_of
from ductile.elastic.step_accounting import StepAccounting
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.error_text import capitalised
from ductile.events.decisions import DecisionJournal
from ductile.events.rollouts import RequestRestarted
from ductile.events.scheduling import StateParked
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.trainer.state_parking import StateTravel
from ductile.observe import Recorder
from ductile.orchestrator.commands.compose import Prepared
from ductile.orchestrator.loop.buffer import Buffer


class Scheduling:
    """Given to `run_loop`: called before the loop begins, asked what the slots did when it has ended."""

    def __init__(
        self,
        config: RLConfig,
        prepared: Prepared,
        cluster: Cluster,
        fleet: RunRoles,
        resizer: TrainerResizer,
        recovery: Recovery,
        activity: SlotActivity,
        record: Recorder,
        home: Placement,
    ) -> None:
        """home: roles that the slots began with."""
        self._config, self._prepared, self._record, self._home = config, prepared, record, home
        self._cluster, self._fleet, self._resizer, self._recovery = cluster, fleet, resizer, recovery
        self._activity = activity
        self.on_controller = Listeners[[ElasticController]]()
        """Told of the controller as soon as there is one."""
        self._controller: ElasticController | None = None
        self._profiler: Profiler | None = None
        self._began_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give up what of the controller is under way: where it has no policy, the loop does not do so."""
        if self._profiler in self._record.listeners:
            self._record.listeners.remove(self._profiler)
        if self._controller is not None:
            await self._controller.stop()

    def begin(self, buffer: Buffer, accounting: StepAccounting) -> ElasticController | None:
        """Account for the slots' time from now on. Returns the controller that moves slots with the loop; None without
        `cluster.auto_scheduler`, when it has no policy, and only empties slots that are to be gone."""
        config, fleet = self._config, self._fleet
        on_gpu = any(device.startswith("cuda") for device in self._cluster.devices.values())
        setting = setting_of(config, self._prepared, fleet, self._resizer.rules, self._home, on_gpu=on_gpu)
        measured = CostModel(_cache_bytes_per_token(config, on_gpu=on_gpu), self._resizer.rules.topology)
        began_s = self._began_s = self._activity.begin(self._cluster.slots)
        measuring = Measuring(self._cluster.mailbox, fleet, measured)
        self._activity.explain_by(partial(situation_of, accounting, fleet))
        fleet.generators.on_change.add(buffer.wake)
        fleet.generators.on_restarted.add(
            lambda sentence, lost: self._record.event(RequestRestarted(lost, sentence=sentence))
        )
        self._profile(setting, measured, began_s)
        actuator = LiveActuator(
            setting,
            self._cluster,
            fleet,
            self._resizer,
            self._recovery,
            self._activity,
            accounting,
            measured,
            lambda: time.monotonic() - began_s,
        )
        if config.cluster.auto_scheduler:
            fleet.trainer.parking.on_moved.add(self._on_state_moved)
            journal = DecisionJournal(self._record, policy_arguments(config.cluster))
            policy, otherwise = policy_of(config.cluster), Home()
            controller = ElasticController(policy, actuator, self._record, otherwise, journal=journal)
            for each in (actuator, measuring, buffer, self._recovery):
                each.on_change.add(controller.notify)
        else:
            controller = ElasticController(None, actuator, self._record)
        self._controller = controller
        self.on_controller(controller)
        return controller if config.cluster.auto_scheduler else None

    def _on_state_moved(self, travel: StateTravel) -> None:
        slots, size = capitalised(slots_of(travel.slots)), f"{travel.num_bytes / 2**20:.1f} MiB"
        back = travel.what == "unpark"
        said = f"{slots} have their devices back: {size} of the trainer came from host memory"
        if not back:
            said = f"{slots} lend their devices: {size} of the trainer are in host memory"
        event = StateParked(
            travel.slots,
            back,
            travel.num_bytes,
            travel.device_bytes,
            round(travel.seconds, 4),
            sentence=f"{said}, after {travel.seconds:.2f} s.",
        )
        self._record.event(event)

    def spent(self) -> dict[str, object]:
        """Shares of all slots' time, for the summary."""
        ledger, now_s = self._activity.ledger, time.monotonic()
        all_s, totals = max(ledger.slot_seconds(now_s), 1e-9), ledger.totals(now_s)
        return {
            "idle_share": totals.get("idle", 0.0) / all_s,
            "idle_by_cause": {cause: seconds / all_s for cause, seconds in ledger.idle(now_s).items()},
            "switch_share": totals.get("switch", 0.0) / all_s,
            "num_switches": self._num_switches(),
            "policy_refused": (self._controller.refused or None) if self._controller else None,
            "deciding_share": self._deciding_share(),
            "time_by_activity": {activity: seconds / all_s for activity, seconds in totals.items()},
            "expected_gain_s": self._expected_gain_s(),
            **self._by_node(ledger, now_s, all_s),
        }

    def _by_node(self, ledger: Ledger, now_s: float, all_s: float) -> dict[str, object]:
        """The nodes' shares of all slots' time, by activity; nothing where there is one node."""
        if not (topology := self._resizer.rules.topology).nodes:
            return {}
        nodes = ledger.totals_by_node(topology, now_s)
        shares = {node: {what: seconds / all_s for what, seconds in of.items()} for node, of in nodes.items()}
        return {"time_by_node": shares}

    def _deciding_share(self) -> float:
        """Share of the run's time that the orchestrator spent on decisions; the slots work on meanwhile."""
        elapsed_s = time.monotonic() - self._began_s
        return self._controller.deciding_s / max(elapsed_s, 1e-9) if self._controller else 0.0

    def _profile(self, setting: Setting, measured: CostModel, began_s: float) -> None:
        fleet = self._fleet
        profiler = self._profiler = Profiler(
            self._record,
            self._activity,
            measured,
            prompt_tokens=lambda: fleet.generators.lengths().prompt_mean,
            num_switches=self._num_switches,
            scorer_seconds=lambda: fleet.scorer.scorer_seconds if fleet.scorer else 0.0,
            num_updates=setting.n_minibatches,
            began_s=began_s,
        )
        fleet.generators.on_finished.add(profiler.on_finished)
        self._record.listeners.append(profiler)
        profiler.open(setting)

    def _expected_gain_s(self) -> float | None:
        """Seconds that the policy expected to gain by the decisions that were carried out, summed; None without any."""
        changes = self._controller.changes if self._controller else ()
        gains = [change.decision.prediction.gain_s for change in changes if change.decision.prediction]
        return sum(gains) if gains else None

    def _num_switches(self) -> int:
        return self._controller.num_changes if self._controller else 0


def offloads(config: RLConfig) -> bool:
    """Return whether train slots may lend their devices. Servers get each version from the trainer's ranks at any time,
    and so a run with servers does not lend."""
    has_servers = bool(asked_servers(config).urls) or config.inference.registry is not None
    return config.cluster.enable_offload is not False and not has_servers


def limits_of(config: RLConfig) -> Limits:
    """The limits that follow from the config alone."""
    return Limits(max_num_seqs=config.inference.max_num_seqs, slots_per_scorer=config.scorer.tp)


def setting_of(
    config: RLConfig, prepared: Prepared, fleet: RunRoles, rules: LayoutRules, home: Placement, *, on_gpu: bool
) -> Setting:
    orchestrator = config.orchestrator
    return Setting(
        home=home,
        limits=limits_of(config).at(
            home, on_gpu=on_gpu, share_devices=config.cluster.share_devices, offloads=offloads(config)
        ),
        policy=policy_name(config.cluster),
        num_steps=prepared.schedule.max_steps,
        groups_per_step=prepared.schedule.groups_per_step,
        group_size=orchestrator.rollouts_per_example,
        max_tokens=orchestrator.sampling.max_tokens,
        seq_len=prepared.schedule.seq_len,
        n_minibatches=prepared.schedule.n_minibatches,
        max_async_level=orchestrator.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        on_stale=orchestrator.on_stale,
        block_size=shared_block_tokens(config.inference),
        use_pre_process_policy=config.cluster.use_pre_process_policy,
        use_wait_before_last_iter_policy=config.cluster.use_wait_before_last_iter_policy,
        on_gpu=on_gpu,
        share_devices=config.cluster.share_devices,
        offloads=offloads(config),
        instances=fleet.instances,
        layout=fleet.trainer.layout,
        rules=rules,
    )


def _cache_bytes_per_token(config: RLConfig, *, on_gpu: bool) -> float:
    spec = read_spec(config.inference.model.name)
    if spec is None:
        return 0.0
    dtype = config.inference.model.dtype
    is_half = dtype == "bfloat16" or (dtype == "auto" and on_gpu)
    return float(2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (2 if is_half else 4))
