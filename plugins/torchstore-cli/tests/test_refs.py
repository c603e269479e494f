"""``torchstore status --refs``: who holds which versions, for people and in JSON."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

import torchstore_core as ts

from .test_cli import MB, runtime_directory, torchstore

__all__ = ["runtime_directory"]


async def test_refs_in_json_are_what_python_says(store: ts.Client):
    empty = await torchstore("status", "--refs", "--json", TORCHSTORE_ADDRESS=store.address)
    assert empty.json == {"address": store.address, "refs": []}
    await store.put("w", torch.zeros(MB, dtype=torch.uint8))
    held = await store.hold("w")
    ref = await store.put_object([1, 2])
    result = await torchstore("status", "--refs", "--json", TORCHSTORE_ADDRESS=store.address)
    assert result.status == 0
    first, second = result.json["refs"]
    assert (first["key"], first["version"], first["nbytes"]) == ("w", held.version, MB)
    assert (first["kind"], first["current"]) == ("tensor", True)
    assert (second["key"], second["version"], second["kind"]) == ("", ref.version, "object")
    (holder,) = second["holders"]
    assert (holder["pid"], holder["state"], holder["where"]) == (os.getpid(), "held", "")


async def test_refs_for_people(store: ts.Client, monkeypatch: pytest.MonkeyPatch):
    result = await torchstore("status", "--refs", TORCHSTORE_ADDRESS=store.address)
    assert result.lines == ["no references"]
    ref = await store.put_object(torch.zeros(MB, dtype=torch.uint8))
    result = await torchstore("status", "--refs", TORCHSTORE_ADDRESS=store.address)
    assert "LINE" not in result.out
    monkeypatch.setenv("TORCHSTORE_TRACE_REFS", "1")
    await store.put("w", 1)
    held = await store.hold("w")
    await store.put("w", 2)
    in_flight = pickle.dumps(held)
    result = await torchstore("status", "--refs", TORCHSTORE_ADDRESS=store.address)
    rows = [line for line in result.lines if f"pid {os.getpid()}" in line]
    assert f"object {ref.version:x}" in rows[0]
    assert "1.0 MiB" in rows[0] or "1 MiB" in rows[0]
    assert f"{held.version} (only held)" in rows[1]
    assert f"{__file__}:" in rows[1]
    assert "in test_refs_for_people" in rows[1]
    assert " in flight " in rows[2]
    assert result.lines[-1].startswith("2 versions; ")
    assert in_flight
