"""Another process truncates a data file just between the moment that its bytes are known to be
there and that when they are used: an error that says so, and never the end of the process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.processes import run_script

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.format.hashes import BLOCK

# As often as a file is used, a snapshot is read, and its file truncated in that moment.
_BODY = """
import json, os, pathlib, resource
from torchstore_core.values import TensorSlice
from torchstore_snapshot import Snapshot, StateDict, SnapshotCorruptError
from torchstore_snapshot.restoring.files import Files

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # where this fails, the process is ended
(file,) = pathlib.Path({path!r}).glob("*.safetensors")
whole, used, when = file.read_bytes(), 0, 0
window = Files.window

def truncating(self, index, *arguments):
    nonlocal used
    found = window(self, index, *arguments)
    used += found is not None
    if found is not None and used == when:
        os.truncate(file, 0)
    return found

def read():
    into = StateDict(large=torch.zeros({rows}, 1024), small=torch.zeros(300))
    {act}

Files.window = truncating
read()
uses, errors = used, []
for when in range(1, uses + 1):
    file.write_bytes(whole)
    used = 0
    try:
        read()
    except SnapshotCorruptError as error:
        errors.append([error.details["file"] == file.name, error.message])
print(json.dumps([uses, errors]))
"""
_ROWS = 5 * BLOCK // 4096


@pytest.mark.parametrize(
    ("act", "uses"),
    [
        ("Snapshot({path!r}).restore({{'m': into}})", 3),
        ("Snapshot({path!r}).restore({{'m': into}}, verify='streaming')", 1),
        ("Snapshot({path!r}).restore({{'m': into}}, verify=False)", 1),
        (
            "Snapshot({path!r}).read_object('m/large', tensor_slice=TensorSlice("
            "(0, 512), ({rows}, 512), ({rows}, 1024)))",
            1,
        ),
        ("[(_ for _ in ()).throw(e) for e in Snapshot({path!r}).verify().values()]", 2),
    ],
    ids=["verified", "streaming", "unverified", "columns", "verify"],
)
async def test_a_file_that_is_truncated_while_it_is_read(
    tmp_path: Path, act: str, uses: int
) -> None:
    path = str(tmp_path / "s")
    state = StateDict(large=torch.ones(_ROWS, 1024), small=torch.ones(300))
    Snapshot.take(path, {"m": state}, fsync=False)
    body = _BODY.format(path=path, rows=_ROWS, act=act.format(path=path, rows=_ROWS))
    used, errors = json.loads(await run_script(body))
    assert used >= uses
    assert len(errors) == used
    assert all(right and "became shorter" in said for right, said in errors)
