"""The commands of ``torchstore``: their options, their answers, and their errors."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from torchstore_cli.reports import Failed, Report, Serving
from torchstore_core import __version__
from torchstore_core.contracts.when_full import SPILL_URL, WHEN_FULL, check_spill
from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_core.reports.units import parse_bytes

__all__ = ["run"]

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

F = TypeVar("F", bound=Callable[..., Any])

_COMMANDS = "torchstore.commands"
_TIMEOUT_S = 10.0
_LARGEST_BENCH = 4 << 30
_INTERRUPTED = 130
#: What a shell says of a command that SIGPIPE has ended: `set -o pipefail` scripts know it.
_UNREAD = 128 + signal.SIGPIPE


class _Settings:
    """The options that every command takes, before or after its name."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.json = False
        self.timeout = _TIMEOUT_S


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Convert a size such as ``4096``, ``512MB`` or ``8GiB``."""
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _strategy(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, bytes]:
    """Return the name of a strategy, and its fields as JSON."""
    if not value.lstrip().startswith("{"):
        return value, b"{}"
    try:
        fields = msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}", ctx, param) from error
    name = fields.pop("type", None)
    if not isinstance(name, str):
        raise click.BadParameter('it needs the name of a strategy as "type"', ctx, param)
    return name, msgspec.json.encode(fields)


class _Seconds(click.FloatRange):
    """A number of seconds, which NaN is not: it is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return found


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None and value is not False:
        setattr(ctx.ensure_object(_Settings), str(param.name), value)


def _json(command: F) -> F:
    return click.option(
        "--json", is_flag=True, expose_value=False, callback=_keep, help="Answer in JSON."
    )(command)


def _common(command: F) -> F:
    for option in (
        click.option(
            "--timeout",
            type=_Seconds(min=0, min_open=True),
            metavar="SECONDS",
            expose_value=False,
            callback=_keep,
            help=f"Longest wait for an answer (default {_TIMEOUT_S:g}).",
        ),
        click.option(
            "--address",
            metavar="ADDRESS",
            expose_value=False,
            callback=_keep,
            help="Which store: unix:/path. Default: TORCHSTORE_ADDRESS, else the one running.",
        ),
    ):
        command = option(command)
    return _json(command)


class _Commands(click.Group):
    """The commands of this package, and those of other packages: click commands that are entry
    points in the group ``torchstore.commands``, by their names. They receive these settings as the
    context's object, return an exit status or nothing, and may raise the errors that :func:`run`
    prints. They are imported when they are used, or listed by ``--help``.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {point.name for point in _entry_points()}
        return [*super().list_commands(ctx), *sorted(names - self.commands.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        mine = super().get_command(ctx, cmd_name)
        points = () if mine else tuple(point for point in _entry_points() if point.name == cmd_name)
        if not points:
            return mine
        found, *others = points
        if others:
            who = " and ".join(sorted(str(point.dist and point.dist.name) for point in points))
            return _broken(cmd_name, f"{who} each have one of that name; uninstall one of them")
        try:
            command = found.load()
        except Exception as error:  # noqa: BLE001 - a broken package breaks its command only
            return _broken(cmd_name, f"{type(error).__name__}: {error}")
        if not isinstance(command, click.Command):
            return _broken(cmd_name, f"{found.value} is no command of click")
        return command


def _entry_points() -> Iterable[EntryPoint]:
    """The commands of other packages. What looks for them is imported for those alone: it would be
    a tenth of what a command takes that needs none.
    """
    from importlib.metadata import entry_points

    return entry_points(group=_COMMANDS)


def _broken(name: str, why: str) -> click.Command:
    def fail() -> None:
        raise ConfigurationError(f"the command {name!r} of another package does not load: {why}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, callback=fail, help="Does not load.", context_settings=settings)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="torchstore", message="%(prog)s %(version)s")
@_common
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look into a tensor store, serve one, and find out what this host can do for it."""
    ctx.ensure_object(_Settings)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(2)


@cli.command()
@click.option(
    "--peer",
    metavar="HOST",
    help="Only both sides of the links to the store's volumes there: a host's name, or a volume.",
)
@_common
@click.pass_obj
def doctor(settings: _Settings, peer: str | None) -> int:
    """Examine this host: transports, plug-ins, limits, running stores.

    Shows what every transport bids for a volume on this host and for the volumes of running
    stores, or why it refuses. Ends with 1 if something stops a store from working.
    """
    if peer is not None:
        from torchstore_cli.doctor.links import examine_peer

        _answer(settings, asyncio.run(examine_peer(settings.address, settings.timeout, peer)))
        return 0
    from torchstore_cli.doctor.examination import examine

    report = asyncio.run(examine(settings.address, settings.timeout))
    _answer(settings, report)
    return 0 if report.ok else 1


@cli.command()
@click.option("--refs", is_flag=True, help="Instead: which versions references hold, and who.")
@_common
@click.pass_obj
def status(settings: _Settings, refs: bool) -> None:
    """Memory, sessions and operations of a store."""
    from torchstore_cli.queries import ask_refs, ask_status

    if refs:
        _answer(settings, asyncio.run(ask_refs(settings.address, settings.timeout)))
        return
    report = asyncio.run(ask_status(settings.address, settings.timeout))
    _answer(settings, report)


@cli.command()
@click.argument("prefix", default="")
@click.option("--long", "-l", is_flag=True, help="Also age, leases, creator and volume.")
@_common
@click.pass_obj
def ls(settings: _Settings, prefix: str, long: bool) -> None:
    """List keys (that start with PREFIX)."""
    from torchstore_cli.queries import ask_keys

    report = asyncio.run(ask_keys(settings.address, settings.timeout, prefix))
    _answer(settings, report, long=long)


@cli.command()
@click.argument("key")
@_common
@click.pass_obj
def stat(settings: _Settings, key: str) -> None:
    """All that is known of one key."""
    from torchstore_cli.queries import ask_key

    report = asyncio.run(ask_key(settings.address, settings.timeout, key))
    _answer(settings, report)


@cli.command()
@click.argument("keys", metavar="KEY...", nargs=-1)
@click.option("--prefix", is_flag=True, help="Delete every key that starts with a KEY.")
@click.option("--all", "every", is_flag=True, help="Delete every key of the store.")
@_common
@click.pass_obj
def rm(settings: _Settings, keys: tuple[str, ...], prefix: bool, every: bool) -> None:
    """Delete keys: all of them, or none if one does not exist.

    Readers keep the tensors they hold.
    """
    from torchstore_cli.queries import remove

    if every:
        if any(keys):
            raise click.UsageError("--all deletes every key; leave out KEY, or --all")
        keys, prefix = ("",), True
    elif not keys:
        raise click.UsageError("missing argument 'KEY...'")
    elif prefix and "" in keys:
        raise click.UsageError("every key starts with an empty KEY; if that is meant, say --all")
    report = asyncio.run(remove(settings.address, settings.timeout, keys, prefix=prefix))
    _answer(settings, report)


@cli.command()
@click.option(
    "--size",
    metavar="SIZE",
    callback=_bytes,
    default="256MiB",
    show_default=True,
    help="Of the large value.",
)
@click.option("--transports", is_flag=True, help="Every transport to the store's volumes instead.")
@click.option("--save", is_flag=True, help="Correct later bids by it (with --transports).")
@_common
@click.pass_obj
def bench(settings: _Settings, size: int, transports: bool, save: bool) -> None:
    """A short measurement beside the floors of this machine.

    Small values here, a large one across two processes, verified; in a store of its own, or in
    the one that --address names.
    """
    if save and not transports:
        raise click.UsageError("--save needs --transports")
    if not 0 < size <= _LARGEST_BENCH:
        raise click.BadParameter("from 1 byte to 4 GiB", param_hint="--size")
    from torchstore_cli.bench.measurement import measure
    from torchstore_cli.screen import Screen

    report: Report
    with Screen(stderr=True).progress("measuring") as progress:
        if transports:
            from torchstore_cli.bench.transports import measure_transports

            report = measure_transports(
                settings.address, settings.timeout, size, progress, save=save
            )
        else:
            report = measure(settings.address, settings.timeout, size, progress)
    _answer(settings, report)


@cli.command()
@click.option("--name", default="torchstore", show_default=True, help="Name of the store.")
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=_bytes,
    help="Memory over all volumes, like 512MB or 8GiB. "
    "Default: half of what there is; it is taken as it is used.",
)
@click.option("--volumes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--strategy",
    default="singleton",
    show_default=True,
    callback=_strategy,
    help="Where puts go: the name of a strategy, or its name and fields as JSON, like "
    """'{"type": "replicated", "copies": 3}'.""",
)
@click.option(
    "--prefault",
    metavar="SIZE",
    callback=_bytes,
    help="Memory to warm up at the start; 0: none, ever. Default: up to 1 GiB.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, resolve_path=True),
    help="Where to put the sockets. Default: a new one that other commands find.",
)
@click.option(
    "--spill",
    metavar="PLACE",
    envvar=SPILL_URL,
    help="Directory on a disk, or URL such as s3://bucket/prefix, for values that leave memory "
    f"when it is full (also {SPILL_URL}).",
)
@click.option(
    "--spill-capacity",
    metavar="SIZE",
    callback=_bytes,
    help="Most bytes to spill. Default: as many as are free, or 1 TiB at a URL.",
)
@click.option(
    "--when-full",
    type=click.Choice(list(WHEN_FULL)),
    help="What is done when memory is full with values whose put does not say it. "
    "Default: they stay; but older versions that are kept are spilled.",
)
@click.option(
    "--repair-bandwidth",
    metavar="SIZE",
    callback=_bytes,
    help="Most bytes per second to copy when copies are lost or a volume is drained; 0: no limit. "
    "Default: TORCHSTORE_REPAIR_BANDWIDTH, else 256MiB.",
)
@click.option(
    "--keeper/--no-keeper",
    default=True,
    help="If the server dies, start it again with all that it had; clients go on. The default.",
)
@_json
@click.pass_obj
def serve(
    settings: _Settings,
    name: str,
    capacity: int | None,
    volumes: int,
    strategy: tuple[str, bytes],
    prefault: int | None,
    directory: str | None,
    spill: str | None,
    spill_capacity: int | None,
    when_full: str | None,
    repair_bandwidth: int | None,
    keeper: bool,
) -> None:
    """Run a store in the foreground, until Ctrl-C or SIGTERM.

    Prints its address and how to use it.
    """
    from torchstore_cli.serving import serve as run_server
    from torchstore_core.plugins.ranking import Policy
    from torchstore_core.server.server import ServerOptions
    from torchstore_core.server.serving.journal import log_to_stderr

    if not name:
        raise click.BadParameter("a store needs a name", param_hint="--name")
    if capacity is not None and capacity < 4096 * volumes:
        raise click.BadParameter("at least 4096 bytes a volume", param_hint="--capacity")
    spill = check_spill(spill, spill_capacity)
    log_to_stderr("INFO", "torchstore")

    def ready(report: Serving) -> None:
        try:
            _answer(settings, report)
        except BrokenPipeError:  # the store is up all the same
            _discard_output()

    options = ServerOptions(
        store_name=name,
        num_storage_volumes=volumes,
        capacity=capacity,
        prefault=prefault,
        strategy=strategy[0],
        strategy_fields=strategy[1],
        block=Policy.make().block,
        directory=directory,
        spill=spill,
        spill_capacity=spill_capacity,
        when_full=when_full,
        repair_bandwidth=repair_bandwidth,
    )
    run_server(options, ready, keeper=keeper)


@cli.command()
@click.argument("volume")
@click.option("--undo", is_flag=True, help="Put the volume back in service.")
@click.option(
    "--wait",
    type=_Seconds(min=0),
    metavar="SECONDS",
    help="How long to wait until it is empty. Default: for ever.",
)
@_common
@click.pass_obj
def drain(settings: _Settings, volume: str, undo: bool, wait: float | None) -> None:
    """Empty VOLUME (its id or index), so that it can be taken away.

    New values avoid it, what only it has is copied elsewhere. Draining goes on without this
    command, which only waits.
    """
    from torchstore_cli.queries import drain as drain_volume

    _answer(
        settings,
        asyncio.run(drain_volume(settings.address, settings.timeout, volume, undo=undo, wait=wait)),
    )


# ---- answers and errors -------------------------------------------------------------------


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Have streams that take any text, also where Python has None: they were closed (`>&-`)."""
    with ExitStack() as instead:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                nowhere = instead.enter_context(open(os.devnull, "w"))
                instead.enter_context(redirect(nowhere))
            else:
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        yield


@_standard_streams()
def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit status. Prints an error as a line on stderr, and with
    ``--json`` also as JSON on stdout.
    """
    as_json = "--json" in arguments
    try:
        result = cli.main(list(arguments), prog_name="torchstore", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "torchstore"
        what = error.format_message().rstrip(".")
        message = f"{what}; see `{where} --help`"
        return _fail(Failed("usage", message), as_json, status=2)
    except click.ClickException as error:
        return _fail(Failed("error", error.format_message()), as_json)
    except click.Abort:
        return _fail(Failed("aborted", "interrupted"), as_json, status=_INTERRUPTED)
    except TorchStoreError as error:
        return _fail(Failed(error.code, error.message, error.key, error.details), as_json)
    except (BrokenPipeError, SystemExit) as error:  # click makes the one of the other
        if not _nobody_reads():
            if isinstance(error, SystemExit):
                raise
            return _fail(Failed("error", str(error)), as_json)
        _discard_output()
        return _UNREAD
    except OSError as error:
        return _fail(Failed("error", str(error)), as_json)
    return result if isinstance(result, int) else 0


def _nobody_reads() -> bool:
    """Whether standard output is a pipe, or a socket, whose other end is closed: `... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # which is told in any case
    return bool(poll.poll(0))


def _fail(failed: Failed, as_json: bool, status: int = 1) -> int:
    if as_json:
        try:
            _print_json(failed)
        except OSError:  # nobody reads it, or the disk is full: the line on stderr is left
            _discard_output()
    from torchstore_cli.screen import printable

    message = printable(" ".join(failed.message.split()))
    click.echo(f"torchstore: {failed.error}: {message}", err=True)
    stores = failed.details.get("stores")
    if isinstance(stores, list):
        for store in stores:
            description = store["error"] or f"{store['store_name']} (pid {store['pid']})"
            click.echo(f"  {store['address']}  {printable(description)}", err=True)
    return status


def _answer(settings: _Settings, report: Report, *, long: bool = False) -> None:
    if settings.json:
        _print_json(report)
        return
    from torchstore_cli.screen import Screen
    from torchstore_cli.views import show

    show(Screen(), report, long=long)
    sys.stdout.flush()


def _discard_output() -> None:
    """Have what is still buffered go nowhere when the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(report: msgspec.Struct) -> None:
    text = msgspec.json.encode(report)
    if not isinstance(report, Serving):  # which is a single line, for programs that wait for it
        text = msgspec.json.format(text, indent=2)
    rest = memoryview(text + b"\n")
    while rest:  # an unbuffered stream (PYTHONUNBUFFERED) may write only a part
        rest = rest[sys.stdout.buffer.write(rest) :]
    sys.stdout.buffer.flush()
