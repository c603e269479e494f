"""Messages in words for people."""

from __future__ import annotations

from torchstore_core.wire import messages as m

__all__ = ["brief"]


def brief(message: m.Message) -> str:
    """A message, without what is as usual."""
    fields: list[str] = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(message, m.Failure) and name not in ("id", "code"):
            continue
        if value not in (0, None, False, b"", []):
            fields.append(f"{name}={_plain(value)}")
    return f"{type(message).__name__}({', '.join(fields)})"


def _plain(value: object) -> str:
    match value:
        case m.PutItem():
            return f"{value.key}[{value.nbytes}{'' if value.data is None else ' inline'}]"
        case m.Want():
            return f"{value.key}" + (f"@{value.version}" if value.version else "")
        case m.Grant():
            return f"{value.volume}:{value.offset}"
        case m.Entry():
            where = "inline" if value.grant is None else _plain(value.grant)
            parts = "" if value.parts is None else f" {len(value.parts)} parts"
            return f"version {value.version} {where}{parts}"
        case m.Publication():
            partial = " partial" if value.partial else ""
            keep = f" keep={value.keep}" if value.keep else ""
            return f"{value.key} by {value.participant} of {value.participants}{partial}{keep}"
        case list() | tuple():
            return f"[{' '.join(map(_plain, value))}]"
    return str(value)
