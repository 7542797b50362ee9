"""What a run writes down of itself is read back as it was, through JSON."""

import json
from dataclasses import replace

from ductile.core.instances.instances import instance_on
from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, layout_for
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, RankShape
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.ledger import Span
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.steps import StepProfiled
from ductile.observe import Recorder, read_jsonl
from tests.core.layout.test_layout_rules import RULES


def test_a_setting_comes_back_from_json():
    setting = Setting(Placement((0,), (1, 2), (3,), "as said"), Limits(max_num_seqs=8), "model", 10, 4, 8, 256, 512)
    setting = replace(setting, instances=(instance_on("generate", (1, 2)), instance_on("score", (3,))))
    setting = replace(setting, rules=RULES, layout=layout_for(range(8), RULES))
    assert Setting.from_fields(json.loads(json.dumps(setting.as_fields()))) == setting


def test_a_setting_from_before_there_were_layout_rules_keeps_its_axes():
    setting = Setting(Placement((0,), (1, 2), (3,), "as said"), Limits(max_num_seqs=8), "model", 10, 4, 8, 256, 512)
    setting = replace(setting, layout=ParallelLayout.of(range(4), dp_replicate=2))
    fields = json.loads(json.dumps(setting.as_fields()))
    del fields["rules"]
    rules = Setting.from_fields({**fields, "version": 2}).rules
    assert rules == LayoutRules(asked=AskedLayout(dp_replicate=2))


def test_a_setting_from_before_instances_had_ids_has_one_on_each_slot():
    setting = Setting(Placement((0,), (1, 2), (3,), "as said"), Limits(max_num_seqs=8), "model", 10, 4, 8, 256, 512)
    fields = json.loads(json.dumps(setting.as_fields()))
    del (
        fields["version"],
        fields["instances"],
        fields["limits"]["slots_per_generator"],
        fields["limits"]["slots_per_scorer"],
    )
    there = Setting.from_fields(fields).instances
    assert [(each.id, each.slots) for each in there] == [
        ("generator-1", (1,)),
        ("generator-2", (2,)),
        ("scorer-3", (3,)),
    ]


def test_a_step_comes_back_from_the_events_of_a_run(tmp_path):
    profile = StepProfile(
        step=3,
        start_s=1.5,
        end_s=2.25,
        spans=(Span(0, 1.5, 2.0, "train"), Span(1, 1.5, 2.25, "idle", "tail")),
        lengths=(4, 7),
        prompt_tokens=9.5,
        speeds=Speeds(
            DecodeSpeed(0.01, 0.001), 1e4, TrainSpeed(1e3, 0.02, 0.01, ((RankShape(tp=2), 1.8),))
        ),  # nobody scores: infinitely fast
        costs=SwitchCosts(resize_s=0.25),
        num_switches=2,
    )
    record = Recorder(tmp_path)
    record.event(StepProfiled(profile, sentence="Step 3 took 0.75 s."))
    record.close()
    (row,) = read_jsonl(tmp_path / "events.jsonl")
    assert StepProfile.from_fields(row) == profile
