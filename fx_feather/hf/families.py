"""The architectures that can be loaded and saved, a row each."""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..errors import ShapeError, fail
from ..models import deepseek_v2, deepseek_v3, gpt2, llama, mixtral, qwen3, qwen3_moe
from . import decoders, deepseek
from . import gpt2 as gpt2_names
from .settings import Json, Settings


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: its model, and its words in Hugging Face's format.

    Args:
        architecture: its class name there.
        module: `template`, `forward` and `loss`.
        kind: the class of its configs.
        config: reads a config.
        json: writes the settings of a config; it is given those that the model was loaded with.
        parts: where each parameter lies, a pytree like the template.
        defaults: what keys mean that a config lacks.
        prefix: of most tensor names, which the files of a model without its head lack.
        ignored: patterns of tensors that hold nothing to learn.
    """

    architecture: str
    module: ModuleType
    kind: type
    config: Callable[[Settings], Any]
    json: Callable[[Any, Json], Json]
    parts: Callable[[Any], Any]
    defaults: Json
    prefix: str = "model."
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)


def _mixtral_parts(cfg: Any) -> Any:
    return decoders.moe_parts(cfg, decoders.MIXTRAL_NAMES)


def _qwen3_moe_parts(cfg: Any) -> Any:
    return decoders.moe_parts(cfg, decoders.QWEN_NAMES)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        llama,
        llama.LlamaConfig,
        decoders.llama_config,
        decoders.llama_json,
        decoders.dense_parts,
        decoders.LLAMA,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qwen3,
        qwen3.Qwen3Config,
        decoders.qwen3_config,
        decoders.qwen3_json,
        decoders.dense_parts,
        decoders.QWEN3,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        gpt2,
        gpt2.GPT2Config,
        gpt2_names.config,
        gpt2_names.json,
        gpt2_names.parts,
        gpt2_names.DEFAULTS,
        prefix="transformer.",
        ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        mixtral,
        mixtral.MixtralConfig,
        decoders.mixtral_config,
        decoders.mixtral_json,
        _mixtral_parts,
        decoders.MIXTRAL,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qwen3_moe,
        qwen3_moe.Qwen3MoEConfig,
        decoders.qwen3_moe_config,
        decoders.qwen3_moe_json,
        _qwen3_moe_parts,
        decoders.QWEN3_MOE,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek_v2,
        deepseek_v2.DeepSeekV2Config,
        deepseek.v2_config,
        deepseek.v2_json,
        deepseek.parts,
        deepseek.V2,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        deepseek_v3,
        deepseek_v3.DeepSeekV3Config,
        deepseek.v3_config,
        deepseek.v3_json,
        deepseek.parts,
        deepseek.V3,
    ),
}


def of_json(json: Mapping[str, Any], where: str) -> Family:
    """The family of a `config.json`, by its `model_type`.

    Raises:
        ShapeError: an architecture that is not here.
    """
    kind = json.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        fail(
            ShapeError,
            call=where,
            got=f"model_type={kind!r}, architectures={json.get('architectures')!r}",
            number=f"{kind!r} is none of the {len(FAMILIES)} architectures",
            rule="a checkpoint is loaded into a model that is written here",
            fix=f"one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[kind]


def of_config(cfg: Any) -> tuple[str, Family]:
    """The `model_type` and family of a config.

    Raises:
        ShapeError: a config of a model that is not here.
    """
    for name, family in FAMILIES.items():
        if type(cfg) is family.kind:
            return name, family
    fail(
        ShapeError,
        call="ff.hf.Model(config)",
        got=f"a config of type {type(cfg).__name__}",
        number=f"{type(cfg).__name__} is none of the {len(FAMILIES)} architectures",
        rule="a model is saved as one of the architectures that are written here",
        fix=f"a config of {', '.join(f.kind.__name__ for f in FAMILIES.values())}",
    )
