"""Requests to the storage behind a URL: repeated while that may help, and given up in time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for
from typing import Any
from urllib.parse import unquote, urlsplit

from torchstore_core.contracts.when_full import shown_place
from torchstore_core.errors import ConfigurationError
from torchstore_core.server.spilling.objects.answers import NO_BUCKET, REFUSED, error_code

# Where folders are only beginnings of names. To "make" one may create a bucket, which nobody wants.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs", "memory"}
_S3 = {"s3", "s3a"}
# Seconds for a request with all attempts to repeat it, and bytes per second that are sent besides.
_PATIENCE_S = 15.0
_SLOWEST = 1 << 20
# As many bytes as a listing of several hundred thousand names may have.
_LISTING = 128 << 20
# A request that has failed is sent again after so many seconds, as often as there are numbers.
_PAUSES_S = (0.2, 1.0)
# Attempts of the libraries themselves would not leave time for that.
_S3_CONFIG = {"connect_timeout": 3, "read_timeout": 10, "retries": {"total_max_attempts": 1}}
# What object stores answer that the next attempt is answered with, too.
_FINAL = NO_BUCKET | REFUSED | {"InvalidRange", "404", "416"}
_FOLDER = re.compile(r"torchstore-spill-[^\s\"']*")
# So many objects are deleted by one request, where a request may delete several; and how many
# requests of that kind are under way at a time.
_DELETED_AT_ONCE, _AT_ONCE = 1000, 16


class OutOfRangeError(OSError):
    """The object is shorter than what was asked for."""


def protocol_of(url: str) -> str:
    """By which protocol what a URL names is reached.

    >>> protocol_of("s3://bucket/a"), protocol_of("simplecache::gs://bucket/a")
    ('s3', 'gs')
    """
    return url.partition("://")[0].rpartition("::")[2]


class Bucket:
    """The storage behind a URL. Its methods may be called in any thread, and block.

    Args:
        url: of the place where everything is that this stores.

    Attributes:
        shown: the URL without what only its user may know.
        protocol: by which it is reached.

    Raises:
        ConfigurationError: no package for such URLs is installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # takes long; directories need none of it

        self.shown = shown_place(url)
        self.protocol = protocol_of(url)
        self._secrets = _secrets(url)
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.protocol in _S3 and "::" not in url:
            conf = fsspec.config.conf.get(self.protocol) or {}
            if "config_kwargs" not in conf:
                options["config_kwargs"] = _S3_CONFIG
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"cannot spill to {self.shown!r}: {self._text(error)}",
                details={"spill": self.shown},
            ) from error
        if self.protocol in _S3 and "::" not in url:
            self._fs.retries = 1
        self._root = root.rstrip("/")
        if self._secrets:
            for handler in logging.getLogger().handlers:
                handler.addFilter(self._without_secrets)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of those file systems that may be used by one thread
        self._under_way: set[Future[Any]] = set()
        # Those of them that store something. Whoever stops does not wait for them, but they are not
        # cancelled: storage may carry one out after it was told to delete that object.
        self._puts: set[Future[Any]] = set()
        self._halt: Future[None] = Future()  # done while they are not waited for

    def folder(self, name: str) -> None:
        """Make a folder, if there are any."""
        if self.protocol not in _WITHOUT_FOLDERS:
            self._ask("makedirs", self._path(name), exist_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove a folder that is empty."""
        if self.protocol not in _WITHOUT_FOLDERS:
            self._ask("rmdir", self._path(name))

    def put(self, name: str, data: bytes) -> Future[Any]:
        """Begin to store an object."""
        request = self._begin("pipe_file", self._path(name), data, nbytes=len(data))
        with self._lock:
            self._puts.add(request)
        request.add_done_callback(self._stored)
        return request

    def get(self, name: str, start: int, nbytes: int) -> Future[bytes]:
        """Begin to read a part of an object."""
        return self._begin(
            "cat_file", self._path(name), start=start, end=start + nbytes, nbytes=nbytes
        )

    def wait(self, request: Future[Any]) -> Any:
        """Wait for a request that was begun, and return its result.

        Raises:
            FileNotFoundError: there is no such object.
            OutOfRangeError: it is shorter.
            OSError: the storage cannot be reached, or refuses it; its text says why.
        """
        try:
            wait_for([request, self._halt], return_when=FIRST_COMPLETED)
            if not request.done():
                raise CancelledError
            return request.result()
        except (Exception, CancelledError) as error:
            if self._stopped.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)) from error
            raise self._named(error) from error

    def names(self, folder: str = "") -> list[str]:
        """The names of what is in a folder, without the folder's own. Raises OSError."""
        path = self._path(folder)
        try:
            found = self._ask("ls", path, detail=False, nbytes=_LISTING)
        except FileNotFoundError:
            return []
        names = [str(name).rstrip("/").rpartition("/")[2] for name in found]
        return [name for name in names if name and name != path.rpartition("/")[2]]

    def delete_one(self, name: str) -> None:
        """Delete an object. Raises OSError, also if that is not permitted."""
        self._ask("rm_file", self._path(name))

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete objects, also if some do not exist. Raises OSError; some may be deleted then.
        Object stores do not always say which ones they have not deleted.
        """
        paths = [self._path(f"{folder}/{name}") for name in names]
        if self._is_async("bulk_delete"):  # several by one request
            batches = [
                paths[at : at + _DELETED_AT_ONCE] for at in range(0, len(paths), _DELETED_AT_ONCE)
            ]
            self._all(functools.partial(self._begin, "bulk_delete"), batches)
        else:
            self._all(functools.partial(self._begin, "rm_file"), paths, but=FileNotFoundError)

    def _all(
        self,
        begin: Callable[[Any], Future[Any]],
        wanted: Iterable[Any],
        but: type[OSError] | tuple[()] = (),
    ) -> None:
        """Make these requests, a few at a time. If some fail, raise why the first one has, ``but``
        for errors of this kind; then no more are begun.
        """
        failed: OSError | None = None
        under_way: deque[Future[Any]] = deque()
        left = iter(wanted)
        while True:
            for one in itertools.islice(left, 0 if failed else _AT_ONCE - len(under_way)):
                under_way.append(begin(one))
            if not under_way:
                break
            try:
                self.wait(under_way.popleft())
            except but:
                continue
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def stop(self) -> None:
        """Have all requests fail at once, those that are under way and those to come."""
        self._stopped.set()
        with self._lock:
            cancelled = self._under_way - self._puts
            if not self._halt.done():
                self._halt.set_result(None)
        for request in cancelled:
            request.cancel()

    def go_on(self) -> None:
        """Send requests again."""
        with self._lock:
            if self._halt.done():
                self._halt = Future()
        self._stopped.clear()

    def settle(self) -> None:
        """Wait for what was being stored when this was stopped; until it is stopped again."""
        while True:
            with self._lock:
                puts = list(self._puts)
            if not puts or self._halt.done():
                return
            wait_for([*puts, self._halt], return_when=FIRST_COMPLETED)

    # ---- requests -------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _is_async(self, method: str) -> bool:
        fs = self._fs
        return bool(getattr(fs, "async_impl", False)) and inspect.iscoroutinefunction(
            getattr(fs, f"_{method}", None)
        )

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.wait(self._begin(method, *args, **kwargs))

    def _begin(self, method: str, *args: Any, nbytes: int = 0, **kwargs: Any) -> Future[Any]:
        """Call a method of the file system; at once if it can only be called so."""
        limit = _PATIENCE_S + nbytes / _SLOWEST
        if not self._is_async(method):
            return self._now(getattr(self._fs, method), args, kwargs, limit)
        call = getattr(self._fs, f"_{method}")
        with self._lock:
            if self._stopped.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            repeated = self._repeated(call, args, kwargs, limit)
            request = asyncio.run_coroutine_threadsafe(repeated, self._fs.loop)
            self._under_way.add(request)
        request.add_done_callback(self._ended)
        return request

    def _ended(self, request: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(request)

    def _stored(self, request: Future[Any]) -> None:
        with self._lock:
            self._puts.discard(request)

    async def _repeated(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], limit: float
    ) -> Any:
        why = ""
        try:
            async with asyncio.timeout(limit) as patience:
                for pause in _PAUSES_S:
                    try:
                        return await call(*args, **kwargs)
                    except Exception as error:
                        if not _may_pass(error):
                            raise
                        why = f", after {self._text(error)}"
                    await asyncio.sleep(pause)
                return await call(*args, **kwargs)
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise OSError(
                errno.ETIMEDOUT,
                f"a request was not answered within {limit:.0f} s, or too slowly{why}",
            ) from error

    def _now(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], limit: float
    ) -> Future[Any]:
        """Call it here, where it takes as long as it takes: one call at a time."""
        done: Future[Any] = Future()
        until = time.monotonic() + limit
        pauses = iter(_PAUSES_S)
        while True:
            if self._stopped.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            try:
                with self._turn:
                    result = call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause > until or not _may_pass(error):
                    done.set_exception(error)
                    return done
                self._stopped.wait(pause)
            else:
                done.set_result(result)
                return done

    # ---- errors ---------------------------------------------------------------------------

    def _named(self, error: BaseException) -> OSError:
        """An error whose ``strerror`` says to people what the storage has said."""
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        code = error_code(error)
        text = self._text(error)
        if code in ("InvalidRange", "416"):
            return OutOfRangeError(errno.EIO, text)
        return OSError(getattr(error, "errno", None) or errno.EIO, text)

    def _text(self, error: BaseException) -> str:
        own = error.strerror if isinstance(error, OSError) else None
        is_plain = own is not None and type(error) in (OSError, TimeoutError)
        text = own if is_plain else f"{type(error).__name__}: {own or error}".removesuffix(": ")
        text = _FOLDER.sub("...", self._hidden(text or ""))  # it is the same for all objects
        return " ".join(text.split())

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _without_secrets(self, record: logging.LogRecord) -> bool:
        """What the libraries log is for all who may read the log."""
        text = record.getMessage()
        if (hidden := self._hidden(text)) != text:
            record.msg, record.args = hidden, ()
        return True


def _may_pass(error: BaseException) -> bool:
    """Whether it may go better the next time."""
    final = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, TypeError)
    if isinstance(error, (*final, NotADirectoryError, ValueError, NotImplementedError)):
        return False
    missing = sys.modules.get("botocore.exceptions")
    if missing is not None and isinstance(error, missing.NoCredentialsError):
        return False
    return error_code(error) not in _FINAL


def _secrets(url: str) -> list[str]:
    """What a URL, or what fsspec is told of its protocols, has that only its user may know."""
    import fsspec

    found: set[str] = set()
    for part in url.split("::"):
        with contextlib.suppress(ValueError):
            password = urlsplit(part).password
            found |= {password, unquote(password)} if password else set()
        conf = fsspec.config.conf.get(part.partition("://")[0]) or {}
        for name in ("password", "secret", "token", "account_key", "sas_token", "key"):
            value = conf.get(name)
            found |= {value} if isinstance(value, str) else set()
    return [secret for secret in sorted(found, key=len, reverse=True) if len(secret) > 2]
