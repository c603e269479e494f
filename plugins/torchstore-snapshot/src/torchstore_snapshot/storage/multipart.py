"""Uploads to S3 in parts, several of which are under way at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any

from torchstore_snapshot.storage.asking import ask, asking
from torchstore_snapshot.storage.naming import naming

__all__ = ["PART", "MultipartWriter"]

#: Bytes of a part. Larger files have larger parts: S3 permits 10,000 of them.
PART = 16 << 20
_PARTS_MAX = 10_000
_IN_FLIGHT = 4


class MultipartWriter:
    """A new object, invisible until :meth:`close` has completed it. It holds at most five parts in
    memory. An object of one part is stored by a single request.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        path: ``bucket/key``.
        nbytes: the size of the object.
        url: for errors.
    """

    random_access = False

    def __init__(self, fs: Any, path: str, nbytes: int, url: str) -> None:
        self._fs = fs
        self._url = url
        self._nbytes = nbytes
        self._part = max(PART, -(-nbytes // _PARTS_MAX))
        self._position = 0
        self._buffer = bytearray()
        self._upload = ""
        self._sent = 0
        self._done: list[dict[str, Any]] = []
        self._running: deque[tuple[int, Future[Any]]] = deque()
        bucket, key, _ = fs.split_path(path)
        self._where = {"Bucket": bucket, "Key": key}
        if nbytes > self._part:
            with naming(url):
                self._upload = self._ask("create_multipart_upload")["UploadId"]

    def write(self, offset: int, data: Any) -> None:
        if offset != self._position:
            raise ValueError(f"written at {offset}, though {self._position} bytes are written")
        rest = memoryview(data)
        self._position += rest.nbytes
        while rest.nbytes:
            room = self._part - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == self._part and self._upload:
                self._send()

    def close(self, *, durable: bool) -> None:
        del durable  # what a store has acknowledged is durable
        if self._position != self._nbytes:
            raise ValueError(f"{self._position} bytes were written instead of {self._nbytes}")
        with naming(self._url):
            if not self._upload:
                self._ask("put_object", len(self._buffer), Body=bytes(self._buffer))
                self._buffer = bytearray()
                return
            if self._buffer:
                self._send()
            while self._running:
                self._collect()
            self._ask(
                "complete_multipart_upload",
                UploadId=self._upload,
                MultipartUpload={"Parts": self._done},
            )
            self._upload = ""

    def abort(self) -> None:
        upload, self._upload = self._upload, ""
        if not upload:
            return
        for _, future in self._running:
            future.cancel()
        for _, future in self._running:
            with contextlib.suppress(Exception, CancelledError):
                future.result()
        self._running.clear()
        with contextlib.suppress(Exception):  # what is left is invisible, and gc collects it
            self._ask("abort_multipart_upload", UploadId=upload)

    def _ask(self, call: str, nbytes: int = 0, **kwargs: Any) -> Any:
        args = self._fs, self._url, "call_s3", call
        return ask(*args, **self._where, nbytes=nbytes, **kwargs)

    def _send(self) -> None:
        """Begin to upload what the buffer holds."""
        if len(self._running) >= _IN_FLIGHT:
            self._collect()
        self._sent += 1
        body, self._buffer = self._buffer, bytearray()
        call = asking(
            self._fs,
            self._url,
            "call_s3",
            "upload_part",
            **self._where,
            UploadId=self._upload,
            PartNumber=self._sent,
            Body=bytes(body),
            nbytes=_IN_FLIGHT * len(body),
        )
        future = asyncio.run_coroutine_threadsafe(call, self._fs.loop)
        self._running.append((self._sent, future))

    def _collect(self) -> None:
        """Wait for the part that was begun first."""
        number, future = self._running.popleft()
        with naming(self._url):
            self._done.append({"PartNumber": number, "ETag": future.result()["ETag"]})
