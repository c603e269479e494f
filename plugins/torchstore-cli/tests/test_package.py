"""What the README of torchstore-cli shows works, and the package is what it says."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchstore_cli.app import cli

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BIN = Path(sys.executable).parent


@pytest.mark.soak
async def test_the_commands_of_its_readme_work() -> None:
    serve, others = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as directory:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHSTORE_")}
        environment |= {"XDG_RUNTIME_DIR": directory, "PATH": f"{BIN}:{os.environ['PATH']}"}
        mine = f"{directory}/store"  # not in the way of another test's
        serve, others = (text.replace("/tmp/torchstore-readme", mine) for text in (serve, others))
        command = [BIN / "torchstore", *shlex.split(serve)[1:]]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            try:
                assert server.stdout is not None
                assert "is up: 256 MiB" in server.stdout.readline()
                done = await asyncio.to_thread(
                    subprocess.run,
                    ["bash", "-e", "-c", others],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=200,
                )
                assert (done.returncode, done.stderr) == (0, "")
                for shown in ("✓ a store works here", "1 key, 12 B", "deleted 1 key: policy/w"):
                    assert f"{shown}\n" in done.stdout
                server.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.wait, 10) == 0
            finally:
                server.kill()


def test_its_readme_names_every_command_and_module() -> None:
    use, _, inside = README.partition("## Inside")
    rows = re.findall(r"^\| `(\w+)[^`]*` \|", use, re.M)
    assert sorted(rows) == sorted(cli.commands)
    source = PACKAGE / "src/torchstore_cli"
    named = set(re.findall(r"`(\w+(?:\.py|/))`", inside))
    there = {p.name for p in source.glob("[!_]*.py")} | {
        f"{p.name}/" for p in source.glob("[!_]*") if p.is_dir()
    }
    assert named - {"benchmarks/"} == there


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_its_links_lead_somewhere(target: str) -> None:
    assert (PACKAGE / target).exists()
