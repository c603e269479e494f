"""Objects of classes and functions that only one program knows, between real processes.

The processes know the codec alone, which needs no torch.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchstore_core.clients.values.codec import decode_object, encode_object
from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta

TOOLS = """
import sys
from torchstore_core.clients.values.codec import decode_object, encode_object
from torchstore_core.values import ObjectMeta

def put(value):
    meta, data = encode_object("k", value, allow_pickle=True)
    return meta.codec + " " + data.hex()

def get(line):
    codec, _, data = line.strip().partition(" ")
    return decode_object("k", ObjectMeta(codec), bytes.fromhex(data), allow_pickle=True)
"""

DEFINITIONS = """
import dataclasses, enum, pickle, threading
from typing import NamedTuple

class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2

@dataclasses.dataclass
class Config:
    mode: Mode
    rate: float = 0.5

    class Inner:
        level = 7

    def doubled(self):
        return scaled(self.rate)

class Point(NamedTuple):
    x: int

class Array:
    def __init__(self, data):
        self.data = bytes(data)

    def __reduce_ex__(self, protocol):  # as arrays of numpy do
        return Array, (pickle.PickleBuffer(self.data),)

class Locked:
    lock = threading.Lock()

def scaled(x):
    return FACTOR * x

FACTOR = 2

def adder(n):
    return lambda x: x + n

def local():
    class Local:
        value = 3
    return Local()
"""

WITHOUT = "import sys\nsys.modules['cloudpickle'] = None\n"


def run(*parts: str, arguments: tuple[str, ...] = (), stdin: str = "") -> str:
    """What a fresh interpreter prints."""
    source = "\n".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def encoded(expressions: dict[str, str], *before: str) -> dict[str, str]:
    """What a process has put that has the definitions in ``__main__``."""
    program = "\n".join(f"print({expression})" for expression in expressions.values())
    lines = run(*before, TOOLS, DEFINITIONS, program).splitlines()
    return dict(zip(expressions, lines, strict=True))


def decoded(line: str) -> Any:
    codec, _, data = line.partition(" ")
    return decode_object("k", ObjectMeta(codec), bytes.fromhex(data), allow_pickle=True)


VALUES = {
    "enum": "put(Mode.TRAIN)",
    "dataclass": "put([Config(Mode.EVAL), Config(Mode.TRAIN, 2.5)])",
    "nested class": "put(Config.Inner())",
    "named tuple": "put({'a': Point(3)})",
    "class": "put(Config)",
    "function": "put(scaled)",
    "method": "put(Config(Mode.EVAL).doubled)",
    "lambda": "put(lambda x: FACTOR * x)",
    "closure": "put(adder(4))",
    "local class": "put(local())",
    "both": "put((Mode.TRAIN, adder(5)))",
    "shared": "put((lambda a: [a, a])(Config(Mode.EVAL)))",
    "large": "put((Point(1), b'x' * 3_000_000))",
    "large array": "put((Point(1), Array(b'x' * 3_000_000)))",
    "says main": "put(({1j: range(3)}, '__main__'))",
}


@pytest.fixture(scope="module")
def there() -> dict[str, str]:
    return encoded(VALUES)


def test_a_reader_that_does_not_know_the_program_gets_them_by_value(there: dict[str, str]) -> None:
    assert {line.partition(" ")[0] for line in there.values()} == {"pickle"}
    got = {name: decoded(line) for name, line in there.items()}
    assert (got["enum"].name, type(got["enum"]).__name__) == ("TRAIN", "Mode")
    first, second = got["dataclass"]
    assert (first.mode.name, first.rate, first.doubled()) == ("EVAL", 0.5, 1.0)
    assert (second.mode.name, second.rate, second.doubled()) == ("TRAIN", 2.5, 5.0)
    assert type(first) is type(second)
    assert type(first.mode) is type(got["enum"])
    assert got["nested class"].level == 7
    assert got["named tuple"]["a"].x == 3
    assert got["class"](None, 3).doubled() == 6
    assert got["function"](4) == 8
    assert got["method"]() == 1.0
    assert got["lambda"](5) == 10
    assert got["closure"](1) == 5
    assert got["local class"].value == 3
    assert got["both"][1](1) == 6
    assert got["shared"][0] is got["shared"][1]
    assert (got["large"][0].x, len(got["large"][1])) == (1, 3_000_000)
    assert (got["large array"][0].x, len(got["large array"][1].data)) == (1, 3_000_000)
    assert got["says main"] == ({1j: range(3)}, "__main__")
    assert len(there["large"]) < 2 * 3_100_000  # once


def test_they_are_refused_where_pickle_is(there: dict[str, str]) -> None:
    for line in there.values():
        codec, _, data = line.partition(" ")
        with pytest.raises(UnsafeObjectError):
            decode_object("k", ObjectMeta(codec), bytes.fromhex(data), allow_pickle=False)
    with pytest.raises(UnsafeObjectError):
        encode_object("k", lambda: 1, allow_pickle=False)


def test_what_readers_know_goes_by_name_as_ever() -> None:
    for value in (Path("x"), {1j: threading.Event}, pickle.PicklingError("__main__"), range(3)):
        meta, data = encode_object("k", value, allow_pickle=True)
        assert data == pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        assert meta.codec == "pickle"


def test_cloudpickle_is_imported_only_when_it_is_needed() -> None:
    program = """
    import fractions
    put({"a": (1, {2})}), put(fractions.Fraction(1, 2)), put([fractions.Fraction])
    print("cloudpickle" in sys.modules)
    put(lambda: 1)
    print("cloudpickle" in sys.modules)
    """
    assert run(TOOLS, program).split() == ["False", "True"]


def test_what_uses_something_that_cannot_be_sent_goes_by_name() -> None:
    line = encoded({"locked": "put(Locked())"})["locked"]
    with pytest.raises(UnsupportedValueError, match=r"'k' cannot be rebuilt here.*Locked"):
        decoded(line)


def test_without_cloudpickle_the_errors_say_so(there: dict[str, str]) -> None:
    plain = encoded({"enum": "put(Mode.TRAIN)"}, WITHOUT)["enum"]
    with pytest.raises(UnsupportedValueError, match=r"Mode.*cloudpickle installed where it is put"):
        decoded(plain)
    program = """
    for value in (lambda: 1, adder(1), local(), Locked.lock):
        try:
            put(value)
        except Exception as error:
            print(type(error).__name__, error)
    try:
        get(sys.stdin.readline())
    except Exception as error:
        print(type(error).__name__, error)
    """
    lines = run(WITHOUT, TOOLS, DEFINITIONS, program, stdin=there["closure"]).splitlines()
    assert len(lines) == 5
    assert all(line.startswith("UnsupportedValueError 'k'") for line in lines)
    assert all("local classes and the like need cloudpickle" in line for line in lines[:4])
    assert "it was put by value: install cloudpickle here, too" in lines[4]


PROGRAM = (
    TOOLS
    + DEFINITIONS
    + """
if __name__ == "__main__":
    class Guarded:
        value = 11

def child(connection):
    config, mode, function, cls, guarded = map(get, connection.recv())
    assert type(config) is Config and config.mode is Mode.TRAIN and mode is Mode.EVAL
    assert function is scaled and cls is Config.Inner
    assert guarded.value == 11
    connection.send([put(Config(Mode.EVAL)), put(Mode.TRAIN), put(Point), put(adder(3))])

if __name__ == "__main__":
    import multiprocessing
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    ours.send([put(x) for x in (Config(Mode.TRAIN), Mode.EVAL, scaled, Config.Inner, Guarded())])
    back = ours.recv()
    config, mode, point, add = map(get, back)
    assert type(config) is Config and config.mode is Mode.EVAL and mode is Mode.TRAIN
    assert point is Point and add(1) == 4
    process.join()
    assert process.exitcode == 0
    print("\\n".join(back))
"""
)


@pytest.mark.parametrize("how", ["spawn", "fork", "fork of no file"])
def test_processes_of_one_program_have_their_own_classes(tmp_path: Path, how: str) -> None:
    """Also if the main module is called ``__mp_main__``; and others get that by value, too."""
    if how == "fork of no file":
        lines = run(PROGRAM, arguments=("fork",)).splitlines()
    else:
        (tmp_path / "program.py").write_text(PROGRAM)

        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), how],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
    config, mode, point, add = map(decoded, lines)
    assert (config.mode.name, config.doubled(), mode.name) == ("EVAL", 1.0, "TRAIN")
    assert (point(5).x, add(2)) == (5, 5)


class _Calls:
    """Calls something when it is pickled."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        self._call()
        return str, ()


def test_threads_of_a_spawned_process_may_put_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cloudpickle's register of what goes by value is one for all threads."""
    main = ModuleType("__mp_main__")
    exec("class Config:\n    value = 7", main.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    begun, beside, ended = threading.Event(), threading.Event(), threading.Event()

    def encoded(*calls: Callable[[], object]) -> tuple[ObjectMeta, bytes]:
        # The lambda first: pickle gives up there, and cloudpickle makes the calls.
        value = [lambda: 1, *map(_Calls, calls), main.__dict__["Config"]]
        return encode_object("k", value, allow_pickle=True)

    with ThreadPoolExecutor(2) as threads:
        # The second may begin only when the first has ended; if it does not wait, the first does.
        first = threads.submit(encoded, begun.set, lambda: beside.wait(0.2))
        first.add_done_callback(lambda _: ended.set())
        begun.wait(60)
        second = threads.submit(encoded, beside.set, lambda: ended.wait(60))
        made = [first.result(), second.result()]
    monkeypatch.delitem(sys.modules, "__mp_main__")
    for meta, data in made:
        assert decode_object("k", meta, data, allow_pickle=True)[-1].value == 7
