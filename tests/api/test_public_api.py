"""The public API is what it was: a change of it is a decision, seen in public_api.txt."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from tests.api.listing import listing

import torchstore_core as ts

RECORDED = Path(__file__).with_name("public_api.txt")

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_the_public_api_is_as_recorded():
    recorded = RECORDED.read_text().splitlines()
    now = listing()
    gone = [line for line in recorded if line not in now]
    new = [line for line in now if line not in recorded]
    assert (gone, new) == ([], []), "python -m tests.api.listing > tests/api/public_api.txt"
    assert len(recorded) > 400


def test_the_blocking_api_need_not_be_imported_by_itself(monkeypatch) -> None:
    monkeypatch.delattr(ts, "blocking", raising=False)
    assert ts.blocking is importlib.import_module("torchstore_core.blocking")


def test_internal_modules_list_only_what_they_hand_on() -> None:
    """As CONTRIBUTING says; an underscore says what is a module's own."""
    for package in ("torchstore_core", "torchstore_monarch"):
        (root,) = importlib.import_module(package).__path__
        for path in Path(root).rglob("*.py"):
            room = path.relative_to(root).parts[0]
            if package == "torchstore_core" and room not in ("clients", "server", "wire"):
                continue  # the rooms whose names users and plug-ins are promised
            body = ast.parse(path.read_text()).body
            own = {node.name for node in body if isinstance(node, _DEFINITIONS)}
            for node in body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    assert not own.issuperset(ast.literal_eval(node.value)), path
