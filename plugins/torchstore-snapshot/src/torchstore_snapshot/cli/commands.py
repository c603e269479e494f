"""The commands of ``torchstore snapshot``: their options, and how they end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    from torchstore_snapshot.converting import Kind

__all__ = ["snapshot"]

F = TypeVar("F", bound=Callable[..., Any])


def _json(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(command)


def _options(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    """Each ``KEY=VALUE`` as a name, and what JSON it is, or text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE", ctx, param)
        try:
            found[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[key] = value
    return found


def _stored(*paths: str) -> Callable[[F], F]:
    """Give a command ``--storage-option``: its URLs are opened with what is given.

    Args:
        paths: the names of the arguments that may be URLs.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(*args: Any, storage_options: dict[str, Any], **kwargs: Any) -> Any:
            from torchstore_snapshot.storage.opening import is_remote
            from torchstore_snapshot.storage.settings import using

            several = len(paths) > 1 and any(is_remote(kwargs[path]) for path in paths)
            with using(storage_options, with_folders=several):
                return command(*args, **kwargs)

        return click.option(
            "--storage-option",
            "storage_options",
            metavar="KEY=VALUE",
            callback=_options,
            multiple=True,
            help="An argument of the file system of a URL, such as endpoint_url; may be repeated. "
            "VALUE is JSON if it can be read as such (key='\"1\"' is text), else text.",
        )(run)  # type: ignore[return-value]

    return decorate


@click.group(invoke_without_command=True)
@click.pass_context
def snapshot(ctx: click.Context) -> None:
    """Look into snapshots, check, compare, convert and clean them up.

    A snapshot's PATH is its folder, or its URL.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(2)


@snapshot.command()
@click.argument("path")
@click.argument("prefix", default="")
@_stored("path")
@_json
@click.pass_context
def ls(ctx: click.Context, path: str, prefix: str, as_json: bool) -> None:
    """List the objects of a snapshot (whose names start with PREFIX), or the snapshots in a folder.

    Reads nothing but manifests.
    """
    from torchstore_snapshot.cli.looking import list_path

    _answer(ctx, list_path(path, prefix), as_json)


@snapshot.command()
@click.argument("path")
@click.argument("name", metavar="[OBJECT]", default="")
@_stored("path")
@_json
@click.pass_context
def show(ctx: click.Context, path: str, name: str, as_json: bool) -> None:
    """A page about a snapshot; or one of its objects, with its pieces and their files."""
    from torchstore_snapshot.cli.looking import show_object, show_snapshot

    _answer(ctx, show_object(path, name) if name else show_snapshot(path), as_json)


@snapshot.command()
@click.argument("path")
@_stored("path")
@_json
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> int:
    """Read every byte of a snapshot and compare all hashes. Ends with 1 if it is damaged."""
    from torchstore_snapshot.cli.comparing import verify as check

    report = check(path, progress=True)
    _answer(ctx, report, as_json)
    return 0 if report.ok else 1


@snapshot.command()
@click.argument("before")
@click.argument("after")
@_stored("before", "after")
@_json
@click.pass_context
def diff(ctx: click.Context, before: str, after: str, as_json: bool) -> int:
    """What differs between two snapshots. Ends with 1 if anything does.

    Tensors are compared by their hashes, and read only if they are cut differently.
    """
    from torchstore_snapshot.cli.comparing import compare

    report = compare(before, after)
    _answer(ctx, report, as_json)
    return 1 if report.differences else 0


@snapshot.command()
@click.argument("path")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a folder of snapshots, also remove all but the last N, and what they alone need.",
)
@click.option("--dry-run", "-n", is_flag=True, help="Only say what would be removed.")
@_stored("path")
@_json
@click.pass_context
def gc(ctx: click.Context, path: str, keep_last: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove what takes left behind that did not finish.

    What a snapshot contains or refers to stays, and so does what a running take has written.
    """
    from torchstore_snapshot.cli.changing import collect

    _answer(ctx, collect(path, keep_last, dry_run=dry_run), as_json)


@snapshot.command()
@click.argument("source")
@click.argument("destination")
@click.option(
    "--to",
    "into",
    type=click.Choice(["snapshot", "dcp", "torchsnapshot", "safetensors"]),
    default="snapshot",
    show_default=True,
    help="What to make.",
)
@click.option(
    "--key",
    help="Of a snapshot, the only key to convert; of a checkpoint of torch.distributed.checkpoint "
    "or of safetensors, the key that everything gets.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Whose own values to convert, if ranks have some.",
)
@click.option("--overwrite", is_flag=True, help="Replace a snapshot that is already there.")
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Also convert what is pickled. Unpickling runs code from SOURCE.",
)
@_stored("source", "destination")
@_json
@click.pass_context
def convert(
    ctx: click.Context,
    source: str,
    destination: str,
    into: Kind,
    key: str | None,
    rank: int | None,
    overwrite: bool,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Convert between snapshots and other formats.

    SOURCE may be a snapshot, a checkpoint of torch.distributed.checkpoint or of torchsnapshot, or a
    folder of safetensors files; which of them is found out.
    """
    from torchstore_snapshot.cli.changing import converted

    report = converted(
        source,
        destination,
        into=into,
        key=key,
        rank=rank,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    _answer(ctx, report, as_json)


def _answer(ctx: click.Context, report: msgspec.Struct, as_json: bool) -> None:
    if as_json or getattr(ctx.obj, "json", False):  # also `torchstore --json snapshot ...`
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        click.echo(text.decode())
        return
    from torchstore_snapshot.cli.views import show as view

    view(report)
    sys.stdout.flush()
