"""Model folders that cannot be used, and the sentence that each one gets."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ductile.config.checks.on_disk import model_findings
from ductile.config.checks.weight_headers import ModelFolderError
from ductile.model.checkpoint import load_model
from tests.tiny import make_hf_model

Break = Callable[[Path], object]


def remove(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Break:
    def apply(folder: Path) -> None:
        (folder / name).write_text(text)

    return apply


def config(**changes: Any) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return apply


def cut(name: str, num_bytes: int) -> Break:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return apply


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without(name: str) -> Break:
    return tensors(lambda found: {key: value for key, value in found.items() if key != name})


EMBEDDINGS = "model.embed_tokens.weight"
Q, V = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"

BROKEN: dict[str, tuple[Break, str]] = {
    "no_config": (remove("config.json"), "{folder} has no config.json, so it is not a Hugging Face model folder"),
    "bad_json": (write("config.json", '{"hidden_size": 32,'), "{folder}/config.json is not JSON: "),
    "not_an_object": (write("config.json", "[1]"), "{folder}/config.json must hold a JSON object, not list"),
    "architecture": (
        config(architectures=["MambaForCausalLM"]),
        "{folder}/config.json: architectures is 'MambaForCausalLM'; ductile has LlamaForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM",
    ),
    "missing_key": (config(intermediate_size=None), "{folder}/config.json: intermediate_size is missing"),
    "heads": (
        config(num_key_value_heads=3),
        "{folder}/config.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "rope_type": (
        config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        "{folder}/config.json: rope_parameters.rope_type is 'yarn'; ductile has 'default', 'linear' and 'llama3'",
    ),
    "vocabulary": (
        config(vocab_size=90),
        "{folder}/model.safetensors: model.embed_tokens.weight has shape [102, 32], but config.json calls for [90, 32]",
    ),
    "other_heads": (
        config(num_key_value_heads=4),
        "{folder}/model.safetensors: model.layers.0.self_attn.k_proj.weight has shape [16, 32], but config.json calls "
        "for [32, 32]",
    ),
    "no_weights": (
        remove("model.safetensors"),
        "{folder} has neither model.safetensors nor model.safetensors.index.json; ductile reads weights from",
    ),
    "pickle_only": (pickled, "It has pytorch_model.bin: convert that."),
    "missing_tensor": (without(Q), f"{{folder}}/model.safetensors does not have {Q}, which config.json calls for"),
    "missing_head": (
        config(tie_word_embeddings=False),
        "{folder}/model.safetensors does not have lm_head.weight, which config.json calls for; if it is tied, set "
        "tie_word_embeddings to true",
    ),
    "more_layers": (
        config(num_hidden_layers=3, layer_types=None),
        "{folder}/model.safetensors does not have model.layers.2.input_layernorm.weight, which config.json calls for",
    ),
    "surplus_bias": (
        tensors(lambda found: found | {V.replace("weight", "bias"): torch.zeros(16)}),
        "{folder}/model.safetensors has model.layers.0.self_attn.v_proj.bias, which config.json does not call for",
    ),
    "surplus_norm": (
        tensors(lambda found: found | {V.replace("v_proj", "v_norm"): torch.ones(8), "model.extra": torch.ones(3)}),
        "{folder}/model.safetensors has model.extra and 1 more, such as model.layers.0.self_attn.v_norm.weight, which "
        "config.json does not call for",
    ),
    "fewer_layers": (
        config(num_hidden_layers=1, layer_types=None),
        "{folder}/model.safetensors has model.layers.1.input_layernorm.weight and 10 more, such as "
        "model.layers.1.self_attn.v_proj.weight, which config.json does not call for (num_hidden_layers is 1)",
    ),
    "norm_of_another_length": (
        tensors(lambda found: found | {"model.norm.weight": torch.ones(31)}),
        "{folder}/model.safetensors: model.norm.weight has shape [31], but config.json calls for [32]",
    ),
    "biases_asked_for": (
        config(attention_bias=True),
        "{folder}/model.safetensors does not have model.layers.0.self_attn.q_proj.bias, which config.json calls for "
        "(attention_bias says which)",
    ),
    "no_norms_of_heads": (
        config(architectures=["LlamaForCausalLM"], model_type="llama"),
        "{folder}/model.safetensors has model.layers.0.self_attn.k_norm.weight and 3 more",
    ),
    "another_head": (
        tensors(lambda found: found | {"lm_head.weight": found[EMBEDDINGS] + (torch.arange(102) > 99)[:, None]}),
        "{folder}/model.safetensors has an output head that config.json does not let the model have: 64 of the 3,264 "
        "numbers of lm_head.weight are not those of model.embed_tokens.weight, and tie_word_embeddings is true. Write "
        "false there, to use the head, or save the folder without lm_head.weight",
    ),
    "a_finer_head": (
        tensors(lambda found: found | {EMBEDDINGS: found[EMBEDDINGS].bfloat16(), "lm_head.weight": found[EMBEDDINGS]}),
        "numbers of lm_head.weight are not those of model.embed_tokens.weight, and tie_word_embeddings is true",
    ),
    "head_of_another_shape": (
        tensors(lambda found: found | {"lm_head.weight": torch.zeros(3)}),
        "{folder}/model.safetensors: lm_head.weight has shape [3], but config.json calls for [102, 32]",
    ),
    "rotations_of_another_head": (
        tensors(lambda found: found | {V.replace("v_proj.weight", "rotary_emb.inv_freq"): torch.zeros(8)}),
        "rotary_emb.inv_freq has shape [8], but config.json calls for [4]",
    ),
    "adapter": (
        write("adapter_config.json", "{}"),
        "{folder}/adapter_config.json says that the model has an adapter (LoRA), which ductile does not read. Merge",
    ),
    "wrong_shape": (
        tensors(lambda found: found | {V: torch.zeros(16, 31)}),
        f"{{folder}}/model.safetensors: {V} has shape [16, 31], but config.json calls for [16, 32]",
    ),
    "quantised": (
        tensors(lambda found: found | {V: torch.zeros(16, 32, dtype=torch.int8)}),
        f"{{folder}}/model.safetensors: {V} is I8; ductile reads float32, bfloat16 and float16, so save",
    ),
    "truncated": (cut("model.safetensors", 5000), "{folder}/model.safetensors is not a whole safetensors file ("),
    "empty": (cut("model.safetensors", 0), "{folder}/model.safetensors is not a whole safetensors file ("),
    "html_instead": (
        write("model.safetensors", "<html>404 Not Found</html>"),
        "{folder}/model.safetensors is not a whole safetensors file (",
    ),
}


def second_shard(folder: Path) -> str:
    return sorted(path.name for path in folder.glob("model-*.safetensors"))[1]


def remove_shard(folder: Path) -> None:
    (folder / second_shard(folder)).unlink()


def cut_shard(folder: Path) -> None:
    cut(second_shard(folder), 3000)(folder)


def copy_into_second_shard(folder: Path) -> None:
    file = folder / second_shard(folder)
    save_file(load_file(file) | {EMBEDDINGS: torch.zeros(102, 32)}, file)


def index(change: Callable[[dict[str, str]], object]) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"weight_map": change(content["weight_map"])}))

    return apply


BROKEN_SHARDED: dict[str, tuple[Break, str]] = {
    "missing_shard": (remove_shard, "{folder}/{shard} is missing, but model.safetensors.index.json names it"),
    "truncated_shard": (cut_shard, "{folder}/{shard} is not a whole safetensors file ("),
    "bad_index": (write("model.safetensors.index.json", "{"), "{folder}/model.safetensors.index.json is not JSON: "),
    "no_map": (
        index(lambda _: None),
        "{folder}/model.safetensors.index.json has no weight_map from names to files; download it again",
    ),
    "not_listed": (
        index(lambda files: {name: file for name, file in files.items() if name != Q}),
        f"has {Q}, and model.safetensors.index.json says that it is nowhere; download the folder again",
    ),
    "elsewhere": (
        index(lambda files: files | {Q: "../model.safetensors"}),
        "names ../model.safetensors, which is not a file of its folder; download it again",
    ),
    "listed_in_the_wrong_file": (
        index(lambda files: files | {Q: files["model.embed_tokens.weight"]}),
        f"safetensors has {Q}, and model.safetensors.index.json says that it is in model-00001-of-",
    ),
    "listed_and_nowhere": (
        index(lambda files: files | {"model.extra": files["model.embed_tokens.weight"]}),
        "does not have model.extra, though model.safetensors.index.json says so; download it again",
    ),
    "in_two_shards": (
        copy_into_second_shard,
        f"/{{shard}} has {EMBEDDINGS}, and model.safetensors.index.json says that",
    ),
    "shards_of_another_save": (
        lambda folder: shutil.copy(folder / second_shard(folder), folder / "model-00001-of-00007.safetensors"),
        "{folder}/model.safetensors.index.json names no tensor of model-00001-of-00007.safetensors, which is there too",
    ),
    "whole_and_in_shards": (
        lambda folder: shutil.copy(folder / second_shard(folder), folder / "model.safetensors"),
        "{folder}/model.safetensors.index.json names no tensor of model.safetensors, which is there too: which of them",
    ),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_folder(break_it: Break, message: str, tmp_path: Path) -> None:
    make_hf_model("qwen3").save_pretrained(tmp_path)
    assert_refused(tmp_path, break_it, message)


@pytest.mark.parametrize(("break_it", "message"), BROKEN_SHARDED.values(), ids=BROKEN_SHARDED)
def test_broken_shards(break_it: Break, message: str, tmp_path: Path) -> None:
    make_hf_model("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    assert_refused(tmp_path, break_it, message.replace("{shard}", second_shard(tmp_path)))


def assert_refused(folder: Path, break_it: Break, message: str) -> None:
    load_model(folder)
    break_it(folder)
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder)
    assert message.format(folder=folder) in str(caught.value)
    found = [finding.what for finding in model_findings("model.name", str(folder))]
    assert [what for what in found if "tokenizer.json" not in what], "a check would let the folder pass"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_no_number(number: float, dtype: torch.dtype, tmp_path: Path) -> None:
    make_hf_model("qwen3").to(dtype).save_pretrained(tmp_path)
    load_model(tmp_path)
    broken = load_file(tmp_path / "model.safetensors")
    broken[Q][5, 7] = number
    save_file(broken, tmp_path / "model.safetensors")
    what = f"{Q} has 1 of 1,024 numbers that are NaN or infinite, the first at [5, 7]; download it again"
    with pytest.raises(ModelFolderError, match=re.escape(what)):
        load_model(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=f"there is no model folder {tmp_path}/nothing"):
        load_model(tmp_path / "nothing")


@pytest.mark.parametrize("num_layers", [0, 3])
def test_layers_that_are_not_there(num_layers: int, tmp_path: Path) -> None:
    make_hf_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=f"has 2 layers; num_layers must be 1 to that, not {num_layers}"):
        load_model(tmp_path, num_layers=num_layers)
