"""What the documents say, held against what is there."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest
from tests.processes import run_program

import torchstore_core as ts

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/json.md"]
DOCUMENTS += ["docs/running.md", "docs/coming-from.md"]
SOURCES = ["torchstore_core", "torchstore_transports", "torchstore_strategies", "plugins"]
README = (ROOT / "README.md").read_text()

_FENCE = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.M | re.S)


def programs(document: str) -> list[object]:
    """A document's programs, each with what it says they print."""
    text = (ROOT / document).read_text()
    return [
        pytest.param(
            match[1], match[2], id=f"{document}:{text.count(chr(10), 0, match.start()) + 1}"
        )
        for match in _FENCE.finditer(text)
        if "asyncio.run(" in match[1]
    ]


WITH_PROGRAMS = ["README.md", "CONTRIBUTING.md", "docs/running.md", "docs/coming-from.md"]
PROGRAMS = [program for document in WITH_PROGRAMS for program in programs(document)]


@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
async def test_programs_print_what_it_says(code: str, printed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a file: spawned children import it
    program.write_text(code)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    status, out, err = await run_program(
        program, directory=tmp_path, environment=environment, twin=True
    )
    assert status == 0, err
    assert not err
    assert printed
    assert out == printed


def test_no_python_block_is_left_out_but_the_readmes_first_glance() -> None:
    texts = "".join((ROOT / document).read_text() for document in WITH_PROGRAMS)
    assert len(PROGRAMS) == texts.count("```python\n") - 1


def test_the_readme_lists_the_whole_api() -> None:
    rows = re.findall(r"^\| `(\w+)\(", README, re.M)
    functions = [n for n in ts.__all__ if inspect.iscoroutinefunction(getattr(ts, n))]
    assert sorted(rows) == sorted(functions)


def test_the_readme_lists_every_public_class() -> None:
    rows = re.findall(r"^\| `([A-Z]\w*[a-z])` \|", README, re.M)
    classes = [name for name in ts.__all__ if inspect.isclass(getattr(ts, name))]
    # The errors have a table of their own.
    assert sorted(r for r in rows if not r.endswith("Error")) == sorted(
        name for name in classes if not name.endswith("Error")
    )


@pytest.mark.parametrize("call", ["initialize", "put_state_dict", "get_state_dict"])
def test_the_readme_shows_all_arguments(call: str) -> None:
    shown = re.search(rf"^\| `{call}\((.*?)\)` \|", README, re.M)
    assert shown is not None
    names = [argument.partition("=")[0] for argument in shown[1].split(", ") if argument != "*"]
    everywhere = {"store_name", "timeout", "allow_pickle"} if call != "initialize" else set()
    wanted = [n for n in inspect.signature(getattr(ts, call)).parameters if n not in everywhere]
    assert names == wanted


def test_the_readme_lists_every_error_with_its_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+Error)`[^|]*\| `([\w-]+)` \|", README, re.M))
    errors = {
        name: getattr(ts, name).code
        for name in ts.__all__
        if name.endswith("Error") and name != "TorchStoreError"
    }
    assert rows == errors


def test_the_readme_lists_every_environment_variable() -> None:
    rows = set(re.findall(r"^\| `(TORCHSTORE_\w+)` \|", README, re.M))
    used = {
        name
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        if "tests" not in path.parts
        for name in re.findall(r"TORCHSTORE_[A-Z_]+", path.read_text())
    }
    assert rows == used


def test_the_readme_lists_every_command() -> None:
    from torchstore_cli.app import cli

    assert sorted(re.findall(r"^torchstore (\w+) ", README, re.M)) == sorted(cli.commands)


def test_the_readme_lists_every_example() -> None:
    rows = re.findall(r"^\| \[(\w+\.py)\]\(examples/\1\) \|", README, re.M)
    programs = [path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()]
    assert sorted(rows) == sorted(path.name for path in programs)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_are_there(document: str) -> None:
    named = re.findall(r"^make (\w+)", (ROOT / document).read_text(), re.M)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert named
    assert set(named) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        assert ((ROOT / document).parent / path).exists(), f"{document}: {target}"
        if not path:
            assert anchor in headings, f"{document}: {target}"


def test_the_architecture_names_every_room_and_nothing_that_is_gone() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    core = ROOT / "torchstore_core/src/torchstore_core"
    rooms = {path.parent.relative_to(core) for path in core.rglob("__init__.py")} - {Path()}
    assert len(rooms) > 15
    tree = text[text.index("\ntorchstore_core/\n") : text.index("The client's package is")]
    named = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert not [room for room in rooms if f"{room.name}/" not in named]
    files = [path for path in ROOT.glob("**/src/**/*") if path.is_file()]
    for name in set(re.findall(r"`([\w/]+\.(?:py|c))`", text)):
        assert (ROOT / name).exists() or any(str(f).endswith(f"/{name}") for f in files), name


@pytest.mark.parametrize("owner", [ts, ts.Client], ids=["module", "Client"])
def test_every_public_call_says_what_it_raises(owner: object) -> None:
    calls = {
        name: call
        for name, call in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    assert "put" in calls
    silent = [name for name, call in calls.items() if "aises" not in (call.__doc__ or "")]
    assert not silent
