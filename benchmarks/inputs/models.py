"""Shapes of the weights of well-known models, by name, without weights and without network.

The values of a config come from the table below, or from a file or cache of this machine. Of such a
config transformers makes the model on the meta device, and its parameters have the shapes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
    }


#: Repository on the Hugging Face Hub to what decides about shapes in its config.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen/Qwen3-30B-A3B": {
        **_qwen3(2048, 6144, 48, 32, False),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
    },
    "meta-llama/Llama-3.2-1B": _llama3(2048, 8192, 16, 32, True),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 8192, 28, 24, True),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14336, 32, 32, False),
    "openai-community/gpt2": {"model_type": "gpt2"},
    "google-bert/bert-base-uncased": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "sentence-transformers/all-MiniLM-L6-v2": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "architectures": ["BertModel"],
    },
}


class UnknownModelError(Exception):
    """There is no config of that name on this machine, or no transformers to read it."""


def shapes(name: str) -> tuple[dict[str, tuple[int, ...]], str]:
    """Name to shape of a model's parameters (tied ones once), and where its config is from.

    Args:
        name: of :data:`CONFIGS`; a folder or cached repository with a ``config.json``; or a model
            type of transformers, which stands for its default config.

    Raises:
        UnknownModelError
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = None if name in CONFIGS else _folder(name)
    try:
        import transformers
    except ImportError as error:
        raise UnknownModelError(f"--model needs transformers ({error})") from error
    if folder is not None:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        origin = "a config.json of this machine"
    elif name in CONFIGS:
        config = transformers.AutoConfig.for_model(**CONFIGS[name])
        origin = "config values from models.py"
    else:
        try:
            config = transformers.AutoConfig.for_model(name)
        except ValueError as error:
            raise _unknown(name) from error
        origin = "the defaults of transformers"
    with torch.device("meta"):
        model = _model(transformers, config)
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if value.is_floating_point():
            found.setdefault(id(value), (key, tuple(value.shape)))
    return dict(found.values()), origin


def _folder(name: str) -> str | None:
    """The folder of this machine that has the config; None for what may be a model type."""
    if Path(name, "config.json").exists():
        return name
    if "/" not in name:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except ImportError:
        cached = None
    if not isinstance(cached, str):
        raise _unknown(name)
    return str(Path(cached).parent)


def _unknown(name: str) -> UnknownModelError:
    return UnknownModelError(
        f"there is no config of {name!r} on this machine, and no network is used; "
        f"known without one: {', '.join(CONFIGS)}"
    )


def _model(transformers: Any, config: Any) -> torch.nn.Module:
    """The model that the config names; a causal language model if it names none."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            made: torch.nn.Module = getattr(transformers, name)(config)
            return made
    try:
        made = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # there is none of that kind
        made = transformers.AutoModel.from_config(config)
    return made
