"""Tensors are loaded as the configuration calls for, or refused by name before any is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.checkpoints import (
    DEEPSEEK,
    MAMBA2,
    write_config,
    write_shards,
    write_tensors,
)
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint import load_weights, read_config

NAME = "model.layers.1.self_attn.indexer.wk.weight"


def _load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(directory, read_config(directory), dtype=dtype)


@pytest.mark.parametrize("fields", [DEEPSEEK, MAMBA2], ids=["deepseek", "mamba2"])
@pytest.mark.parametrize("num_shards", [0, 1, 3], ids=["single", "one-shard", "three-shards"])
def test_tensors_come_back(tmp_path: Path, fields: dict[str, Any], num_shards: int) -> None:
    """One file or several with an index: the same tensors, in the model's order."""
    written = write_tensors(tmp_path, fields)
    if num_shards:
        (tmp_path / "model.safetensors").unlink()
        write_shards(tmp_path, written, num_shards)

    loaded = _load(tmp_path)

    assert list(loaded) == list(written)
    assert all(torch.equal(loaded[name], written[name]) for name in written)


def test_dtype_is_the_models_but_for_what_decides(tmp_path: Path) -> None:
    """The router and the index heads' weights stay float32 in a bfloat16 model."""
    write_tensors(tmp_path, DEEPSEEK)

    loaded = _load(tmp_path, torch.bfloat16)

    wide = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert wide == {
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.1.self_attn.indexer.weights_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Layers above the model's own are no mistake where the configuration counts them."""
    written = write_tensors(tmp_path, DEEPSEEK)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    save_file(written | extra, tmp_path / "model.safetensors")
    write_config(tmp_path, DEEPSEEK, num_nextn_predict_layers=1)

    assert set(_load(tmp_path)) == set(written)


def test_extra_layer_that_is_not_counted_is_refused(tmp_path: Path) -> None:
    """Layer 20 does not pass for a part of layer 2."""
    written = write_tensors(tmp_path, DEEPSEEK)
    extra = {"model.layers.20.eh_proj.weight": torch.ones(2, 2)}
    save_file(written | extra, tmp_path / "model.safetensors")
    write_config(tmp_path, DEEPSEEK, num_nextn_predict_layers=1)

    with pytest.raises(BadInputError, match=r"holds model\.layers\.20\.eh_proj\.weight"):
        _load(tmp_path)


def test_layers_that_predict_further_tokens_need_not_be_counted(tmp_path: Path) -> None:
    """They are known by the projection that only they have."""
    written = write_tensors(tmp_path, DEEPSEEK)
    extra = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm")}
    save_file(written | extra, tmp_path / "model.safetensors")

    assert set(_load(tmp_path)) == set(written)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.indexer.wk.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias",
    ],
)
def test_tensors_that_no_layer_uses_are_left_out(tmp_path: Path, name: str) -> None:
    """Stored frequencies, and the indexer of a layer that shares a choice."""
    fields = DEEPSEEK | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}
    written = write_tensors(tmp_path, fields)
    save_file(written | {name: torch.ones(2)}, tmp_path / "model.safetensors")

    assert name not in written
    assert set(_load(tmp_path)) == set(written)


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    """An equal one is left out; another one is loaded, in the embedding's shape and finite."""
    written = write_tensors(tmp_path, DEEPSEEK | {"tie_word_embeddings": True})
    file, name = tmp_path / "model.safetensors", "lm_head.weight"
    head = written["model.embed_tokens.weight"].clone()
    save_file(written | {name: head}, file)
    assert set(_load(tmp_path)) == set(written)

    save_file(written | {name: head + 1}, file)
    assert torch.equal(_load(tmp_path)[name], head + 1)

    save_file(written | {name: head[1:].clone()}, file)
    with pytest.raises(BadInputError, match=r"lm_head\.weight has shape"):
        _load(tmp_path)
    save_file(written | {name: head * torch.nan}, file)
    with pytest.raises(BadInputError, match=r"lm_head\.weight in .* holds NaN"):
        _load(tmp_path)


def test_an_older_name_of_mamba2s_embedding_is_known(tmp_path: Path) -> None:
    """The first checkpoints were stored so."""
    written = write_tensors(tmp_path, MAMBA2)
    renamed = {name.replace("embeddings.", "embedding."): t for name, t in written.items()}
    save_file(renamed, tmp_path / "model.safetensors")

    loaded = _load(tmp_path)

    assert list(loaded) == list(written)
    assert torch.equal(loaded["backbone.embeddings.weight"], written["backbone.embeddings.weight"])


@pytest.mark.parametrize("name", ["../outside/x.safetensors", "/tmp/x.safetensors", "a/../../x"])
def test_an_index_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A name outside the folder is refused, and nothing is opened."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors(folder, MAMBA2)
    index = json.dumps({"weight_map": {"backbone.norm_f.weight": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("a file was opened"))

    with pytest.raises(BadInputError, match="not a file of its folder") as refused:
        _load(folder)

    assert name in str(refused.value)


def test_an_index_of_countless_files_is_refused(tmp_path: Path) -> None:
    """Before the first of them is looked for."""
    write_tensors(tmp_path, MAMBA2)
    weight_map = {f"tensor-{each}": f"{each}.safetensors" for each in range(100_001)}
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(BadInputError, match=r"index\.json names 100,001 files$"):
        _load(tmp_path)


def test_a_name_of_any_length_is_not_echoed(tmp_path: Path) -> None:
    """The file's own tensors are named by what they begin with."""
    written = write_tensors(tmp_path, MAMBA2)
    save_file(written | {"x" * 10**6: torch.ones(1)}, tmp_path / "model.safetensors")

    with pytest.raises(BadInputError, match=r"holds x+, which its configuration does not") as said:
        _load(tmp_path)

    assert len(str(said.value)) < 600


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_numbers_are_refused(tmp_path: Path, value: float) -> None:
    """A model with NaN would write something, and end as if all were well."""
    written = write_tensors(tmp_path, MAMBA2)
    written["backbone.layers.1.mixer.D"][1] = value
    save_file(written, tmp_path / "model.safetensors")

    with pytest.raises(BadInputError, match=r"layers\.1\.mixer\.D in .* holds NaN or infinity"):
        _load(tmp_path)


def test_another_format_is_named(tmp_path: Path) -> None:
    """With what to do about it."""
    write_config(tmp_path, MAMBA2)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")

    with pytest.raises(BadInputError, match=r"holds pytorch_model\.bin .* save_pretrained"):
        _load(tmp_path)


def _without(weights: dict[str, Tensor]) -> None:
    del weights[NAME]


def _without_two(weights: dict[str, Tensor]) -> None:
    del weights[NAME], weights["lm_head.weight"]


def _with_one_more(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.mlp.extra.weight"] = torch.zeros(1)


def _transposed(weights: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    weights[name] = weights[name].T.contiguous()


def _quantized(weights: dict[str, Tensor]) -> None:
    weights[NAME] = weights[NAME].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, rf"lacks {NAME}$"),
        (_without_two, rf"lacks {NAME} and 1 more"),
        (_with_one_more, r"holds model\.layers\.0\.mlp\.extra\.weight, which its config"),
        (_transposed, r"kv_b_proj\.weight has shape \[8, 16\] .* calls for \[16, 8\]"),
        (_quantized, rf"{NAME} is stored as F8_E4M3"),
    ],
)
def test_wrong_tensors_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    """The headers alone decide: no tensor is read, so nothing is allocated."""
    weights = write_tensors(tmp_path, DEEPSEEK)
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    reads: list[str] = []
    _count_reads(monkeypatch, reads)

    with pytest.raises(BadInputError, match=message):
        _load(tmp_path)

    assert reads == []


def test_reads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count that the test above relies on is not always zero."""
    written = write_tensors(tmp_path, DEEPSEEK)
    reads: list[str] = []
    _count_reads(monkeypatch, reads)

    _load(tmp_path)

    assert reads == list(written)


def _count_reads(monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    class Counting:
        def __init__(self, *args: Any, **named: Any) -> None:
            self._file: Any = safe_open(*args, **named)

        def __enter__(self) -> Any:
            self._open = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> Any:
            return self._open.keys()

        def get_slice(self, name: str) -> Any:
            return self._open.get_slice(name)

        def get_tensor(self, name: str) -> Any:
            reads.append(name)
            return self._open.get_tensor(name)

    monkeypatch.setattr("safetensors.safe_open", Counting)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A directory without tensors, or with a shard less than its index says."""
    weights = write_tensors(tmp_path, MAMBA2)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"cannot read .*model\.safetensors"):
        _load(tmp_path)

    write_shards(tmp_path, weights, 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"cannot read .*model-00002-of-00002"):
        _load(tmp_path)


def test_broken_file_is_named(tmp_path: Path) -> None:
    """A file cut short is not read."""
    write_tensors(tmp_path, MAMBA2)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(BadInputError, match=r"cannot read .*model\.safetensors"):
        _load(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """It is unknown which of two is meant."""
    weights = write_tensors(tmp_path, MAMBA2)
    write_shards(tmp_path, weights, 2)
    save_file(weights, tmp_path / "model-00002-of-00002.safetensors")

    with pytest.raises(BadInputError, match="lies in two files"):
        _load(tmp_path)


def test_index_without_a_map_is_refused(tmp_path: Path) -> None:
    """An index that names no files is named."""
    write_tensors(tmp_path, MAMBA2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": []}), encoding="utf-8")

    with pytest.raises(BadInputError, match="has no weight_map"):
        _load(tmp_path)


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without safetensors the error says what to install."""
    write_tensors(tmp_path, MAMBA2)
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(BadInputError, match=r"pip install 'bt-runner\[hf\]'"):
        _load(tmp_path)
