"""The error tree: what catches what, stable codes, pickling."""

from __future__ import annotations

import asyncio
import pathlib
import pickle

import pytest
import torch

import torchstore_core as ts
from torchstore_core import errors

#: Codes cross the wire and are read by programs: they never change.
CODES = {
    "TorchStoreError": "error",
    "KeyNotFoundError": "key-not-found",
    "PartialPutError": "partial-put",
    "EvictedError": "evicted",
    "VersionGoneError": "version-gone",
    "ObjectLostError": "object-lost",
    "StoreFullError": "store-full",
    "DrainError": "drain",
    "OutOfMemoryError": "out-of-memory",
    "StoreTimeoutError": "timeout",
    "StoreClosedError": "store-closed",
    "LayoutMismatchError": "layout-mismatch",
    "TransportError": "transport",
    "TransportUnavailableError": "transport-unavailable",
    "TransportNotReadyError": "transport-not-ready",
    "PluginError": "plugin",
    "ProtocolError": "protocol",
    "UnsafeObjectError": "unsafe-object",
    "UnsupportedValueError": "unsupported-value",
    "ConfigurationError": "configuration",
}
ALSO = {
    "KeyNotFoundError": KeyError,
    "PartialPutError": KeyError,
    "EvictedError": KeyError,
    "OutOfMemoryError": MemoryError,
    "StoreTimeoutError": TimeoutError,
    "LayoutMismatchError": ValueError,
    "UnsupportedValueError": TypeError,
    "ConfigurationError": ValueError,
    "TransportUnavailableError": errors.TransportError,
    "TransportNotReadyError": errors.TransportUnavailableError,
}


@pytest.mark.parametrize("name", CODES)
def test_each_error(name):
    cls = getattr(ts, name)
    assert cls is getattr(errors, name)
    assert cls.code == CODES[name]
    assert issubclass(cls, errors.TorchStoreError)
    details = {"missing": ["k"], "n": 1}
    made = cls("something happened: 'k'", key="k", details=details)
    assert isinstance(made, ALSO.get(name, Exception))
    assert str(made) == made.message == "something happened: 'k'"
    with pytest.raises(ts.TorchStoreError):
        raise made
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(made, protocol))
        assert type(again) is cls
        assert (str(again), again.key, again.details) == (str(made), "k", details)
        assert again.code == CODES[name]
    bare = cls("m")
    assert (bare.key, bare.details) == (None, {})
    rebuilt = errors.from_wire(cls.code, "m", "k", details)
    assert type(rebuilt) is cls
    assert (rebuilt.key, rebuilt.details) == ("k", details)


def test_the_list_is_whole_and_codes_are_unique():
    tree = {errors.TorchStoreError}
    while more := {cls for base in tree for cls in base.__subclasses__()} - tree:
        tree |= more
    assert {cls.__name__ for cls in tree if cls.__module__ == errors.__name__} == set(CODES)
    assert len(set(CODES.values())) == len(CODES)
    assert set(CODES) <= set(ts.__all__)


def test_only_the_relations_that_are_meant():
    for name in CODES:
        for builtin in (KeyError, TimeoutError, ValueError, TypeError):
            expected = ALSO.get(name) is builtin
            assert issubclass(getattr(ts, name), builtin) == expected, (name, builtin)


def test_a_code_of_a_newer_server_is_the_base_class():
    made = errors.from_wire("not-invented-yet", "m", None, {})
    assert type(made) is ts.TorchStoreError


async def test_errors_of_the_server_pickle_with_what_they_know(shared):
    with pytest.raises(KeyError) as caught:
        await ts.get_batch(["a", "b"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ts.KeyNotFoundError
    assert again.details == {"missing": ["a", "b"]}
    assert str(again) == str(caught.value)
    # str() of a KeyError is the repr of its argument: a person wants to read the message.
    assert not str(again).startswith(("'", '"'))


async def test_a_key_that_is_not_whole_is_a_missing_one_too(shared):
    part = ts.TensorSlice((0,), (2,), (4,))
    await ts.put("shard", torch.ones(2), part)
    for expected in (ts.PartialPutError, ts.KeyNotFoundError, KeyError):
        with pytest.raises(expected, match="not whole yet"):
            await ts.get("shard")
    with pytest.raises(ts.PartialPutError):
        await ts.get_batch(["gone", "shard"])


async def test_builtin_except_clauses_work(shared):
    with pytest.raises(KeyError, match="no such key"):
        await ts.get("gone")
    with pytest.raises(TimeoutError):
        await ts.wait("gone", timeout=0.05)
    with pytest.raises(ValueError, match="timeout"):
        await ts.get("gone", timeout=-1)
    with pytest.raises(TypeError):
        await ts.get(5)


async def test_an_error_object_is_a_value_like_others(shared):
    with pytest.raises(ts.KeyNotFoundError) as caught:
        await ts.get("gone")
    await ts.put("error", caught.value)
    error = await ts.get("error")
    assert type(error) is ts.KeyNotFoundError
    assert error.key == "gone"


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (
            lambda c, k: c.put(k, asyncio.Future()),
            "; await it, and put what that gives",
        ),
        (lambda c, k: c.put(k, (i for i in range(3))), "; put a list of what it yields"),
        (lambda c, k: c.get([k]), "; for several keys there are get_batch,"),
        (lambda c, k: c.put_state_dict(k, {"w": 1}), "is the first argument of put_state_dict"),
        (lambda c, k: c.put_state_dict(torch.nn.Linear(1, 1), k), "; give its state_dict()"),
        (lambda c, k: c.get_state_dict(k, torch.nn.Linear(1, 1)), "; give its state_dict()"),
        (lambda c, k: c.put_state_dict(iter([("w", 1)]), k), r"; give dict\(\) of it"),
        (lambda c, k: c.put(pathlib.Path(k), 1), r"not PosixPath; str\(\) makes one of a path"),
    ],
)
async def test_likely_mistakes_are_told_what_to_do_instead(shared, k, call, advice):
    await shared.put_state_dict({"w": 1}, k)
    with pytest.raises(ts.UnsupportedValueError, match=advice):
        await call(shared, k)
