"""What a checkpoint's layers keep is what ``bt_width.read_model`` plans for its config."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config, data_file

from bt_runner.models.checkpoint.families import LOADED_FAMILIES, config_of
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import AttentionLayer, LayerConfig, MambaLayer, SelectTopK
from bt_width import read_model
from bt_width.models.caches import IndexCache, LatentCache, Layer, StateCache

OWN: dict[str, Callable[[], Config]] = {
    "deepseek_v3": model_configs.deepseek_v3,
    "deepseek_v32": model_configs.deepseek_v32,
    "glm_moe_dsa": model_configs.glm_5_2,
    "mamba2": model_configs.mamba2,
}


def loaded(config: Config) -> list[Layer]:
    """What the layers keep that the loader would build."""
    return [_kept(layer) for layer in config_of(Fields.of(config, "config.json")).layers]


def _kept(layer: LayerConfig) -> Layer:
    match layer:
        case MambaLayer():
            return (
                StateCache(
                    state_shape=(layer.num_heads, layer.head_dim, layer.state_size),
                    conv_parts=(
                        (layer.num_heads, layer.head_dim),
                        (layer.num_groups, 2 * layer.state_size),
                    ),
                    conv_taps=layer.conv_kernel - 1,
                ),
            )
        case AttentionLayer(mla=mla, selection=selection):
            latent = LatentCache(lora_rank=mla.kv_lora_rank, rope_dim=mla.rope.dim)
            if isinstance(selection, SelectTopK):
                return (latent, IndexCache(head_dim=selection.head_dim))
            return (latent,)


def planned(config: Config) -> list[Layer]:
    """What the layers keep that the planner counts."""
    return list(read_model(config).layers)


def test_every_family_that_loads_is_compared() -> None:
    assert OWN.keys() == set(LOADED_FAMILIES)


@pytest.mark.parametrize("family", OWN)
def test_loader_and_planner_agree(family: str) -> None:
    config = OWN[family]()

    assert planned(config) == loaded(config)


@pytest.mark.parametrize("seed", range(20))
def test_they_agree_on_other_sizes_and_patterns(seed: int) -> None:
    draw = random.Random(seed)
    config: Config = {
        **model_configs.glm_5(),
        "num_hidden_layers": draw.randrange(1, 12),
        "kv_lora_rank": draw.choice([16, 24, 512]),
        "qk_rope_head_dim": draw.choice([8, 64]),
        "index_head_dim": draw.choice([64, 128]),
    }
    if draw.random() < 0.5:
        config["index_topk_freq"] = draw.randrange(1, 5)
        config["index_skip_topk_offset"] = draw.randrange(1, 5)

    assert planned(config) == loaded(config)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai--DeepSeek-R1",
        "deepseek-ai--DeepSeek-V3",
        "deepseek-ai--DeepSeek-V3.2",
        "zai-org--GLM-5",
        "zai-org--GLM-5.1",
        "zai-org--GLM-5.2",
        "zai-org--GLM-5.3",
    ],
)
def test_they_agree_on_published_configs(name: str) -> None:
    config = json.loads(data_file("configs", f"{name}.json").read_text(encoding="utf-8"))

    assert planned(config) == loaded(config)
