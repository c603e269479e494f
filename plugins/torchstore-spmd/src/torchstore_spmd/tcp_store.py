"""Access to the TCPStore at which the ranks of a job meet, without blocking the event loop.

The calls of a TCPStore block, for ever if the other side hangs, whatever their time-out. So each
runs in a daemon thread, and the wait for it is bounded.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.errors import StoreClosedError, StoreTimeoutError, in_seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["in_thread", "launcher_hosts", "prefixed", "reach"]

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
T = TypeVar("T")

# The TCPStores that this process hosts. They are never closed, because others may already be
# connecting to the port, for example for `init_process_group`.
_hosted: dict[tuple[int, int], Store] = {}
_lock = threading.Lock()


async def reach(env: SPMDEnv, deadline: float, timeout: float) -> Store:
    """Return the store at ``env``'s address, which rank 0 hosts unless the launcher does.

    Args:
        deadline: by ``time.monotonic``.
        timeout: seconds from the very beginning to the deadline, for messages.

    Raises:
        StoreTimeoutError: nobody answers there in time.
        StoreClosedError: the store cannot be hosted, or what answers is no rendezvous store.
    """
    hosts = env.rank == 0 and not launcher_hosts(env)
    where = f"{env.master_addr}:{env.master_port}"
    if not hosts:
        await _until_somebody_listens(env, deadline, timeout)
    found: Store = await in_thread(
        lambda: _tcp_store(env, hosts, deadline - time.monotonic()),
        deadline,
        timeout,
        f"the rendezvous store at {where} did not answer within {in_seconds(timeout)}; is it one?",
        f"no rendezvous store at {where}",
    )
    return found


def prefixed(prefix: str, store: Store) -> Store:
    """Return a view of the store that puts ``prefix`` before every key."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


async def in_thread(
    call: Callable[[], T], deadline: float, timeout: float, late: str, broken: str
) -> T:
    """Return the result of a blocking call, which runs in a daemon thread and may hang there.

    Args:
        deadline: by ``time.monotonic``.
        timeout: seconds from the very beginning to the deadline, for the error's details.
        late: the message if the deadline has passed.
        broken: the message if the call raised an error of torch.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as caught:  # noqa: BLE001 - torch raises bare RuntimeErrors; handed over
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            return  # the loop has closed: nobody waits any more

    threading.Thread(target=run, name="torchstore-rendezvous", daemon=True).start()
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await done
    except TimeoutError as error:
        raise StoreTimeoutError(late, details={"timeout": timeout}) from error
    except (RuntimeError, ValueError, msgspec.DecodeError) as error:
        raise StoreClosedError(f"{broken}: {str(error).splitlines()[0]}") from error


def launcher_hosts(env: SPMDEnv) -> bool:
    """Return whether torchrun's agent hosts the store at ``env``'s address."""
    environ = os.environ
    return (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environ.get("MASTER_ADDR") == env.master_addr
        and environ.get("MASTER_PORT") == str(env.master_port)
    )


async def _until_somebody_listens(env: SPMDEnv, deadline: float, timeout: float) -> None:
    """Wait for a listener, because torch would write every failed attempt to standard error."""
    poll = _FIRST_POLL_S
    failure: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                _, writer = await asyncio.open_connection(env.master_addr, env.master_port)
        except TimeoutError:
            break
        except OSError as error:
            failure = error
        else:
            writer.close()
            return
        await asyncio.sleep(min(poll, max(0.0, deadline - time.monotonic())))
        poll = min(2 * poll, _LONGEST_POLL_S)
    raise StoreTimeoutError(
        f"nobody listens at MASTER_ADDR:MASTER_PORT {env.master_addr}:{env.master_port} within "
        f"{in_seconds(timeout)}: rank 0 has not called initialize_spmd, or the address is wrong"
        + (f" ({failure})" if failure is not None else ""),
        details={"missing_ranks": [0], "timeout": timeout},
    )


def _tcp_store(env: SPMDEnv, hosts: bool, left: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    def connect(*, host: bool) -> Any:
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.world_size,
            host,
            timeout=timedelta(seconds=max(1.0, left)),
            wait_for_workers=False,
            # `init_process_group` hosts a store as well: the two share the port.
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    if not hosts:
        return connect(host=False)
    try:
        store = connect(host=True)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        return connect(host=False)  # the user's own TCPStore, or another launcher's
    with _lock:
        _hosted.setdefault((os.getpid(), env.master_port), store)
    return store
