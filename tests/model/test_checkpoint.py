"""Folders written here are read by `transformers` and by us, whole or not at all."""

import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ductile.config.checks.weight_headers import ModelFolderError
from ductile.model.checkpoint import load_model, read_spec, read_tensors, save_model, stored_dtype
from ductile.model.transformer import Transformer
from ductile.records import ChatFormat
from tests.model.test_parity import documents, packed_logits
from tests.tiny import BOS, IM_END, PAD, make_hf_model, make_model_folder, make_tokenizer_files


def tensors_of(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 10_000], ids=["one_file", "sharded"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_transformers_loads_what_we_save(family: str, tied: bool, shard_bytes: int, tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source", family, tie_word_embeddings=tied)
    ours = load_model(source, random_init=True, seed=3)
    save_model(tmp_path / "saved", ours.spec, tensors_of(ours), source, max_shard_bytes=shard_bytes)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    again = load_model(tmp_path / "saved")
    batch = documents()
    for document, logits, reloaded in zip(batch, packed_logits(ours, batch), packed_logits(again, batch), strict=True):
        torch.testing.assert_close(theirs(document[None]).logits[0], logits, atol=1e-4, rtol=0)
        assert torch.equal(reloaded, logits)
    assert ("lm_head.weight" in stored(tmp_path / "saved")) == (not tied)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard_bytes == 10_000)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved")("a b").input_ids
        == AutoTokenizer.from_pretrained(source)("a b").input_ids
    )


@torch.inference_mode()
def test_we_load_shards_that_transformers_wrote(tmp_path: Path) -> None:
    theirs = make_hf_model("qwen3", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    (document,) = batch = documents((20,))
    (logits,) = packed_logits(load_model(tmp_path / "sharded"), batch)
    torch.testing.assert_close(logits, theirs(document[None]).logits[0], atol=1e-4, rtol=0)


def test_bfloat16_comes_back_bit_for_bit(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source", "llama")
    model = load_model(source, dtype=torch.bfloat16)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    original = {name: tensor.bfloat16() for name, tensor in stored(source).items()}
    saved = stored(tmp_path / "saved")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    again = load_model(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_dtype_is_converted_on_the_way_out(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in stored(tmp_path / "saved").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"


@torch.inference_mode()
def test_fewer_layers_make_a_consistent_folder(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source", num_hidden_layers=3)
    model = load_model(source, num_layers=2)
    assert model.spec.num_layers == 2
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    assert read_spec(tmp_path / "saved") == model.spec
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    (document,) = batch = documents((20,))
    torch.testing.assert_close(theirs(document[None]).logits[0], packed_logits(model, batch)[0], atol=1e-4, rtol=0)


def test_config_of_transformers_4_keeps_its_spelling(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    (source / "config.json").write_text(json.dumps(config))
    model = load_model(source)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == config


@pytest.mark.parametrize(
    ("said", "trained", "expected"),
    [
        ({"eos_token_id": PAD, "top_k": 20}, (PAD, IM_END), {"eos_token_id": [PAD, IM_END], "top_k": 20}),
        ({"eos_token_id": [PAD, IM_END]}, (IM_END, PAD), {"eos_token_id": [PAD, IM_END]}),
        (None, (IM_END,), None),  # config.json says so
        # Beside such a file nobody looks for the others in config.json any more.
        (None, (IM_END, PAD), {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": [IM_END, PAD]}),
    ],
)
def test_what_ends_a_turn_is_written_where_others_look_for_it(
    tmp_path: Path, said: dict[str, Any] | None, trained: tuple[int, ...], expected: dict[str, Any] | None
) -> None:
    source = make_model_folder(tmp_path / "source")
    settings = source / "generation_config.json"
    settings.unlink() if said is None else settings.write_text(json.dumps(said))
    model = load_model(source)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source, chat_format=ChatFormat(eos_token_ids=trained))
    written = tmp_path / "saved/generation_config.json"
    assert (json.loads(written.read_text()) if written.exists() else None) == expected


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    first, same, other = (load_model(folder, random_init=True, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert float(first.embed.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.norm.weight, torch.ones(32))


@pytest.mark.parametrize("of_head", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_embeddings", [torch.float32, torch.bfloat16, torch.float16])
def test_old_copies_of_tied_embeddings_and_constants_are_passed_over(
    of_embeddings: torch.dtype, of_head: torch.dtype, tmp_path: Path
) -> None:
    """A copy may have been rounded: it says nothing that the embeddings do not say."""
    from safetensors.torch import save_file

    folder = make_model_folder(tmp_path / "m", "llama")
    tensors = stored(folder)
    embeddings = tensors["model.embed_tokens.weight"].to(of_embeddings)
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    copy = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.to(of_head, copy=True)}
    save_file(tensors | copy | constant, folder / "model.safetensors")
    assert torch.equal(load_model(folder).embed.weight, embeddings.float())


def test_a_head_of_its_own_is_used_and_said_in_what_is_saved(tmp_path: Path) -> None:
    """Where config.json says nothing of tied embeddings, the library's models have a head."""
    source = make_model_folder(tmp_path / "source", "llama", tie_word_embeddings=False)
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (source / "config.json").write_text(json.dumps(config))
    model = load_model(source)
    assert torch.equal(model.lm_head.weight, stored(source)["lm_head.weight"])
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(stored(tmp_path / "saved")["lm_head.weight"], model.lm_head.weight)


def test_a_folder_s_dtype_is_that_of_its_weights_whatever_its_config_says(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    assert stored_dtype(source) == torch.float32
    model = load_model(source)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    written = json.loads((tmp_path / "saved/config.json").read_text())
    assert (written["dtype"], written["torch_dtype"]) == ("float32", "float32")


class Gathered(Mapping[str, Tensor]):
    """Makes each tensor when it is asked for, and notes how many are alive at once."""

    def __init__(self, tensors: dict[str, Tensor], fail_at: str = "") -> None:
        self.tensors, self.fail_at = tensors, fail_at
        self.asked: list[str] = []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_alive = 0

    def __getitem__(self, name: str) -> Tensor:
        if name == self.fail_at:
            raise RuntimeError("the gather failed")
        tensor = self.tensors[name].detach().clone()
        self.asked.append(name)
        self.alive.add(tensor)
        self.most_alive = max(self.most_alive, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_asks_for_each_tensor_once_in_order_and_lets_go(dtype: torch.dtype, tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    gathered = Gathered(tensors_of(model))
    save_model(tmp_path / "saved", model.spec, gathered, source, dtype=dtype)
    assert gathered.asked == list(tensors_of(model))
    assert gathered.most_alive <= 2


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    before = stored(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="the gather failed"):
        save_model(tmp_path / "saved", model.spec, Gathered(tensors_of(model), fail_at="norm.weight"), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]
    assert stored(tmp_path / "saved").keys() == before.keys()
    assert load_model(tmp_path / "saved").spec == model.spec


def test_a_save_replaces_the_old_folder_and_what_a_killed_one_left(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    for leftover in ("saved", ".saved.partial", ".saved.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "junk").touch()
    save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]
    assert not (tmp_path / "saved/junk").exists()


def test_saving_over_the_source_keeps_its_tokenizer(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    model = load_model(folder, random_init=True)
    save_model(folder, model.spec, tensors_of(model), folder)
    assert torch.equal(load_model(folder).embed.weight, model.embed.weight)
    expected = make_tokenizer_files(tmp_path / "t")
    assert (folder / "tokenizer.json").read_bytes() == (expected / "tokenizer.json").read_bytes()


def test_a_tensor_of_the_wrong_shape_is_not_written(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    wrong = tensors_of(model) | {"norm.weight": torch.zeros(31)}
    with pytest.raises(ValueError, match=r"norm.weight has shape \[31\], not \[32\]"):
        save_model(tmp_path / "saved", model.spec, wrong, source)
    assert not (tmp_path / "saved").exists()


def test_what_a_dtype_cannot_hold_is_not_written(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    large = tensors_of(model) | {"norm.weight": torch.full((32,), 1e5)}
    with pytest.raises(
        ModelFolderError, match=r"norm.weight has numbers up to 1e\+05, and as float16 some are NaN or inf"
    ):
        save_model(tmp_path / "saved", model.spec, large, source, dtype=torch.float16)
    assert not (tmp_path / "saved").exists()
    save_model(tmp_path / "saved", model.spec, large, source, dtype=torch.bfloat16)


def test_tensors_can_be_read_one_by_one(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", "qwen2")
    model = load_model(folder)
    read = dict(read_tensors(folder, model.spec))
    assert list(read) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({}, None),
        ({"dtype": "float8_e4m3fn"}, None),
        ({"dtype": None}, None),
    ],
)
def test_the_dtype_of_a_folder_s_weights(config: dict[str, Any], expected: torch.dtype | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(tmp_path) == expected


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_model_folder_is_there_all_the_time(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be swapped, a writer that was killed in between has its old folder back at the next save."""
    source = make_model_folder(tmp_path / "source")
    model, saved = load_model(source), tmp_path / "saved"
    save_model(saved, model.spec, tensors_of(model), source)
    rename = Path.rename
    missing: list[str] = []

    def watched(path: Path, target: Path) -> Path:
        result = rename(path, target)
        if not saved.exists():
            missing.append(path.name)
            raise KeyboardInterrupt  # as good as a kill: nothing else is done
        return result

    monkeypatch.setattr(Path, "rename", watched)
    if can_exchange:
        save_model(saved, model.spec, tensors_of(model), source)
        assert missing == []
        return
    monkeypatch.setattr("ductile.model.checkpoint.exchange", lambda one, other: False)
    with pytest.raises(KeyboardInterrupt):
        save_model(saved, model.spec, tensors_of(model), source)
    assert missing == ["saved"]
    with pytest.raises(RuntimeError, match="the gather failed"):
        save_model(saved, model.spec, Gathered(tensors_of(model), fail_at="norm.weight"), source)
    assert load_model(saved).spec == model.spec


def test_a_linked_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model, saved = load_model(source), tmp_path / "saved"
    saved.symlink_to(source)
    save_model(saved, model.spec, tensors_of(model), source)
    assert not saved.is_symlink()
    assert load_model(saved).spec == load_model(source).spec
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]


def test_a_link_out_of_the_source_is_not_copied(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    model = load_model(source)
    (tmp_path / "secret").write_text("my password")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFolderError, match=r"LICENSE is a link to .*secret, which is not copied into a model"):
        save_model(tmp_path / "saved", model.spec, tensors_of(model), source)
    assert not (tmp_path / "saved").exists()


def test_links_of_a_hugging_face_cache_and_of_shared_tokenizers_are_copied(tmp_path: Path) -> None:
    plain = make_model_folder(tmp_path / "plain")
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(plain.iterdir())):
        if file.name == "tokenizer.json":
            (snapshot / file.name).symlink_to(file)
        else:
            (snapshot / file.name).symlink_to(file.rename(blobs / str(number)))
    model = load_model(snapshot)
    save_model(tmp_path / "saved", model.spec, tensors_of(model), snapshot)
    assert not (tmp_path / "saved/tokenizer.json").is_symlink()
    assert load_model(tmp_path / "saved").spec == model.spec
