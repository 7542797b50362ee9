"""`ductile fit`: what it prints, that its TOML can be laid over the config, and what it refuses."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ductile.cli import main
from ductile.config.checks.exclusions import exclusion_findings
from ductile.config.checks.trainer_layout import (
    asked_layout,
    layout_findings,
    layout_rules,
    layout_warnings,
    slot_memory,
)
from ductile.config.reading.parse import parse
from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.core.layout.choice.layout_rules import choose_layout
from ductile.core.layout.choice.planner import plan_layout
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.model.spec import spec_from_hf
from ductile.sim.fit import FitRequest, find_fits, toml
from ductile.sim.fit_command import memory_bytes
from tests.config.stories import furnish

LARGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": True,
}
"""Qwen3-4B."""
GIB = 2**30
OF_LARGE = ["--model.name", "large", "--trainer.model.seq-len", "32768"]


@pytest.fixture(autouse=True)
def _furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LARGE))


def fit(*words: str) -> int:
    return main(["fit", *words])


def test_it_finds_layouts_and_knobs_from_a_config_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("@", "good.toml", *OF_LARGE, "--gpus", "8", "--gpu-memory", "80GiB") == 0
    said = capsys.readouterr().out
    assert said.startswith("4.02B parameters on 8 GPUs of 80 GiB (H100): steps of ")
    assert "#1 " in said
    assert "#3 " in said
    assert "#4 " not in said
    assert "layouts fit." in said


@pytest.mark.parametrize(("seq_len", "memory"), [("32768", "80"), ("65536", "40GiB"), ("2048", "24 GB")])
def test_what_it_prints_is_a_config_that_fits(
    seq_len: str, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is laid over the config with a folder that has all it needs, but for the sizes."""
    words = ["@", "good.toml", "--model.name", "large", "--trainer.model.seq-len", seq_len, "--show", "100"]
    assert fit(*words, "--gpus", "8", "--gpu-memory", memory, "--json", "fits.json") == 0
    printed = [block.partition("\n")[2] for block in capsys.readouterr().out.split("\n# ")[1:]]
    fits = json.loads((tmp_path / "fits.json").read_text())["fits"]
    assert len(fits) == len(printed)
    for each, block in zip(fits, printed, strict=True):
        assert block.startswith(each["toml"])
        (tmp_path / "fit.toml").write_text(each["toml"])
        config = parse(
            RLConfig, ["@", "good.toml", "@", "fit.toml", "--trainer.model.seq-len", seq_len], across=False
        ).config
        assert config.deployment.num_train_gpus == 8  # pyright: ignore
        assert config.cluster.device_memory_gib == pytest.approx(memory_bytes(memory) / 2**30, rel=1e-5)
        spec, room = spec_from_hf(LARGE), slot_memory(config)
        assert room is not None
        planned = plan_layout(8, asked_layout(config.trainer.model), spec, memory=room)
        assert planned.layout is not None
        assert not planned.short
        assert each["layout"] == {axis: getattr(planned.layout.dims, axis) for axis in each["layout"]}
        assert sum(each["device_bytes"].values()) <= room.room_bytes
        assert sum(each["host_bytes"].values()) <= 200 * 2**30
        assert "fsdp_cpu_offload" not in each["settings"] or "optim_cpu_offload" not in each["settings"]


def test_axes_and_knobs_that_the_config_has_and_the_fit_has_not_are_taken_back(tmp_path: Path) -> None:
    words = ["[trainer.model]", "tp = 4", "optim_cpu_offload = true", "reshard_after_forward = false"]
    words += ["[trainer.model.ac]", 'mode = "selective"', "freq = 2", "[trainer.model.ac_offloading]"]
    (tmp_path / "own.toml").write_text("\n".join(words))
    sizes = ("--gpus", "8", "--gpu-memory", "80GiB")
    for seq_len in ("512", "65536"):
        config = ("@", "good.toml", *OF_LARGE[:-1], seq_len)
        assert fit(*config, *sizes, "--json", "plain.json") == 0
        assert fit(*config[:2], "@", "own.toml", *config[2:], *sizes, "--json", "own.json") == 0
        plain, own = (json.loads((tmp_path / name).read_text())["fits"] for name in ("plain.json", "own.json"))
        assert [each["settings"] for each in own] == [each["settings"] for each in plain]
        for each, same in zip(plain[:4], own[:4], strict=True):
            models: list[TrainerModelConfig] = []
            for over, laid in (([], each), (["@", "own.toml"], same)):
                (tmp_path / "fit.toml").write_text(laid["toml"])
                models.append(
                    parse(RLConfig, ["@", "good.toml", *over, "@", "fit.toml"], across=False).config.trainer.model
                )
            assert models[0] == models[1]


def laid_over(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return both tables as one, as `@ base.toml @ overlay.toml` has them."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        merged[key] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    gpus=st.sampled_from([1, 2, 3, 4]),
    batch=st.integers(1, 6),
    memory_gib=st.floats(20, 60),
    seq_len=st.sampled_from([512, 4096, 16_384]),
)
def test_no_overlay_has_too_little_memory_for_check(gpus: int, batch: int, memory_gib: float, seq_len: int) -> None:
    base = {
        "model": {"name": "large", "seq_len": seq_len},
        "cluster": {"device": "cuda"},
        "deployment": {"type": "single_node"},
        "data": {"fake": {"batch_size": batch}},
        "loss": {"type": "sft"},
    }
    request = FitRequest(TrainerRunConfig.model_validate(base), gpus, int(memory_gib * GIB), "H100", 200 * GIB)
    for fit in find_fits(request, request.host_memory):
        config = TrainerRunConfig.model_validate(laid_over(base, tomllib.loads(toml(fit, request))))
        assert not list(layout_findings(config, gpus)), fit
        assert not [said for said in layout_warnings(config, gpus) if "too little memory" in said], fit


@pytest.mark.parametrize(
    ("own", "taken_back", "left"),
    [
        ("[cluster]\nslots_per_device = 2", "slots_per_device = 1\n", {}),
        (
            '[trainer.resize]\nlayouts = ["tp=8", "dp_shard=4"]',
            '[trainer.resize]\nlayouts = ["dp_shard=4"]\n',
            {},
        ),
        ('[trainer.model]\npp_schedule = "zero_bubble"\n[trainer.model.compile]', "", {"pp": 1}),
        ('[trainer.model]\npp_schedule = "zero_bubble"\nfp8 = true', "", {"pp": 1}),
    ],
)
def test_nothing_else_of_the_config_contradicts_a_fit(
    own: str, taken_back: str, left: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text(own)
    config = ["@", "good.toml", "@", "own.toml"]
    words = ["--model.name", "large", "--cluster.device", "cuda"]
    assert fit(*config, *words, "--gpus", "8", "--gpu-memory", "80GiB", "--json", "fits.json") == 0
    fits = json.loads((tmp_path / "fits.json").read_text())["fits"]
    assert any(taken_back in each["toml"] for each in fits)
    for each in fits[:6]:
        (tmp_path / "fit.toml").write_text(each["toml"])
        read = parse(RLConfig, [*config, "@", "fit.toml", *words], across=False).config
        assert choose_layout(8, layout_rules(read)).layout.dims == ParallelDims(**each["layout"])
        assert not [*layout_findings(read, 8), *exclusion_findings(read)]
        assert {axis: each["layout"][axis] for axis in left} == left


def test_where_only_host_memory_is_too_small_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("@", "good.toml", *OF_LARGE, "--gpus", "1", "--gpu-memory", "40GiB", "--host-memory", "20GiB")
    assert fit(*words) == 1
    said = capsys.readouterr().out
    assert "Nothing fits. With one slot and " in said
    assert "a GPU's own memory suffices, but it takes " in said
    assert "and has 20 GiB: write a larger --host-memory" in said


def test_one_that_it_prints_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("@", "good.toml", "--gpus", "2", "--gpu-memory", "8GiB", "--json", "fits.json") == 0
    (tmp_path / "fit.toml").write_text(json.loads((tmp_path / "fits.json").read_text())["fits"][0]["toml"])
    capsys.readouterr()
    assert main(["check", "@", "good.toml", "@", "fit.toml"]) == 0
    assert "the config is good" in capsys.readouterr().out


def test_of_supervised_fine_tuning_keys_have_no_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "@", "good_sft.toml", "--model.name", "large", "--model.seq-len", "65536"]
    (tmp_path / "good_sft.toml").write_text('max_steps = 4\n[data]\npath = "data.jsonl"\n')
    assert fit(*words, "--gpus", "8", "--gpu-memory", "40GiB", "--json", "fits.json") == 0
    table = tomllib.loads(json.loads((tmp_path / "fits.json").read_text())["fits"][0]["toml"])
    assert table["deployment"]["num_gpus"] == 8
    assert "ac" in table["model"]
    (tmp_path / "fit.toml").write_text(json.loads((tmp_path / "fits.json").read_text())["fits"][0]["toml"])
    assert parse(SFTConfig, ["@", "good_sft.toml", "@", "fit.toml"], across=False).config.model.ac is not None


def test_gpus_of_several_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a slow network, shards of a copy are inside nodes; copies or stages are across them."""
    words = ["sft", "@", "good_sft.toml", "--model.name", "large", "--model.seq-len", "2048", "--gpus", "16"]
    (tmp_path / "good_sft.toml").write_text('max_steps = 4\n[data]\npath = "data.jsonl"\n')
    words += ["--gpu-memory", "80GiB", "--json", "fits.json", "--deployment.gpus-per-node", "8"]
    assert fit(*words, "--cluster.network-gb-per-s", "1") == 0
    assert "(H100, 8 a node)" in capsys.readouterr().out
    best = json.loads((tmp_path / "fits.json").read_text())["fits"][0]
    assert 8 % (best["layout"]["dp_shard"] * best["layout"]["cp"] * best["layout"]["tp"]) == 0
    (tmp_path / "fit.toml").write_text(best["toml"])
    deployment = parse(SFTConfig, ["@", "good_sft.toml", "@", "fit.toml"], across=False).config.deployment
    assert (deployment.type, deployment.num_nodes, deployment.gpus_per_node) == ("multi_node", 2, 8)  # pyright: ignore


def test_measured_speeds_and_other_devices_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def best_s(*words: str) -> float:
        assert fit("@", "good.toml", *OF_LARGE, "--gpus", "8", "--gpu-memory", "80", "--json", "f.json", *words) == 0
        return json.loads((tmp_path / "f.json").read_text())["fits"][0]["step_s"]

    assert best_s("--gpu", "NVIDIA A100-SXM4-80GB") > 2 * best_s()
    assert best_s("--tokens-per-s", "2000") == pytest.approx(2 * best_s("--tokens-per-s", "4000"), rel=0.1)
    assert "4000 tokens/s a slot" in capsys.readouterr().out


def test_where_nothing_fits_it_says_what_is_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("@", "good.toml", *OF_LARGE, "--gpus", "1", "--gpu-memory", "8GiB") == 1
    said = capsys.readouterr().out
    assert "Nothing fits. A slot would need at least 186 GiB (parameters 15, " in said
    assert 'trainer.model.ac.mode = "full"' in said
    assert said.endswith("which is still too much: take more slots.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["@", "good.toml", "--gpus", "8", "--gpu-memory", "8 stone"], "'8 stone' is no memory; write 80GiB"),
        (["@", "good.toml", "--gpus", "0", "--gpu-memory", "8"], "'0' is no number from 1 to 4096"),
        (["@", "good.toml", "--gpus", "8"], "the following arguments are required: --gpu-memory"),
        (["@", "good.toml", "--gpus", "8", "--gpu-memory", "8", "--tokens-per-s", "-1"], "is no number above 0"),
    ],
)
def test_slips_are_told_with_what_to_write(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(*words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["@", "good.toml", "--model.name", "nowhere"], "--model.name = nowhere does not exist"),
        (["@", "empty.toml"], "the config names no model: write --model.name"),
        (["@", "good.toml", "--gpu", "abacus"], "--gpu abacus: its peak is not known; write H100"),
        (["@", "good.toml", "--trainer.resize.layouts", "tp 8"], "--trainer.resize.layouts: 'tp 8': "),
        (["@", "good.toml", "--trainer.model.seqlen", "4"], "--trainer.model.seqlen"),
        (["@", "good.toml", "--json", "no/f.json"], "there is no folder no"),
    ],
)
def test_what_cannot_be_reckoned_with_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.toml").write_text("max_steps = 1\n")
    assert fit(*words, "--gpus", "8", "--gpu-memory", "80GiB") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80", 80 * 2**30), ("80GiB", 80 * 2**30), ("80 gib", 80 * 2**30), ("1.5TiB", 3 * 2**39), ("80GB", 80 * 10**9)],
)
def test_memory_is_read_in_every_spelling(text: str, num_bytes: int) -> None:
    assert memory_bytes(text) == num_bytes
