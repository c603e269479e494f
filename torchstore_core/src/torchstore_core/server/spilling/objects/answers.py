"""How object stores say what was wrong, as fsspec's file systems pass it on."""

from __future__ import annotations

__all__ = ["NO_BUCKET", "REFUSED", "error_code"]

# What is asked for does not exist as a whole: S3's and Google's code, and Azure's.
NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
# Whoever asks may not, or the storage does not know them. HTTP's numbers are those of Google's.
REFUSED = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "401",
    "403",
}


def error_code(error: BaseException) -> str:
    """Return the code that an object store gave for an error; empty if it gave none.

    >>> error_code(FileNotFoundError("no such object"))
    ''
    """
    for which in (error, error.__cause__):
        response = getattr(which, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "code", "") or "")
