"""Which file has which tensor, in the form that model libraries look for beside safetensors files.

With it, ``from_pretrained`` of transformers accepts the folder of a snapshot in which a model was
taken as ``"model"`` (and which has a ``config.json``), whatever the names of the data files are.
"""

from __future__ import annotations

import msgspec
import xxhash

from torchstore_snapshot.format.manifest import Manifest, TensorEntry
from torchstore_snapshot.format.paths import plain_name, take_of
from torchstore_snapshot.format.safetensors_files import RESERVED
from torchstore_snapshot.garbage import no_collections

__all__ = ["MAP", "map_name", "weight_maps"]
__all__ += ["is_damaged", "written_by_a_take"]


class _Map(msgspec.Struct):
    weight_map: dict[str, str]


_maps = msgspec.json.Decoder(_Map)


#: What the names of all maps end with.
MAP = ".safetensors.index.json"


def map_name(key: str) -> str:
    """Return the name of the map of a state dict. It shows the key; that of a key which no name of
    a file can show has a hash of it, so that each key has a name of its own.

    >>> map_name("model"), map_name("a/b")
    ('model.safetensors.index.json', 'a_b-48f71e9475860604.safetensors.index.json')
    """
    shown = plain_name(key)
    if shown != key:
        shown += f"-{xxhash.xxh3_64_hexdigest(key.encode())}"
    return shown + MAP


def written_by_a_take(data: bytes) -> bool:
    """Whether a file is the map of a snapshot, of whichever: only takes name files like this.

    >>> written_by_a_take(b'{"weight_map": {"w": "model-00001-of-00002.safetensors"}}')
    False
    """
    try:
        names = _maps.decode(data).weight_map.values()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return bool(names) and all(take_of(name) for name in names)


def is_damaged(data: bytes) -> bool:
    """Whether a map is no document at all any more, as one that was truncated.

    >>> is_damaged(b'{"weight_map": {'), is_damaged(b"{}")
    (True, False)
    """
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False


@no_collections()
def weight_maps(manifest: Manifest) -> dict[str, bytes]:
    """Return the contents of the map of each state dict whose tensors are all whole, in files of
    the snapshot's own take that no other key shares; by the name of the map's file. Nothing in a
    snapshot refers to these files.

    Libraries load everything from each file that a map names. Files of earlier takes have earlier
    values of the same names, so a map that named one could make a wrong model without a word.
    """
    found: dict[str, bytes] = {}
    own = [not file.snapshot and take_of(file.name) == manifest.take for file in manifest.files]
    for key, named in manifest.shared.items():
        known = manifest.store.get(key)
        if known is not None and known.shared:
            continue
        weights: dict[str, str] = {}
        seen: set[tuple[int, int]] = set()
        total = 0
        for name, entry in named.items():
            if not isinstance(entry, TensorEntry):
                continue
            if len(entry.pieces) != 1 or entry.pieces[0].slice is not None:
                break
            piece = entry.pieces[0]
            if not own[piece.file]:
                break
            if name == RESERVED:  # it has another name in its file
                break
            if piece.nbytes and (piece.file, piece.start) in seen:
                continue  # tied to an earlier one, whose name is the one in the file
            seen.add((piece.file, piece.start))
            weights[name] = manifest.files[piece.file].name
            total += piece.nbytes
        else:
            if weights:
                data = {"metadata": {"total_size": total}, "weight_map": weights}
                encoded = msgspec.json.format(msgspec.json.encode(data))
                found.setdefault(map_name(key), encoded)
    return found
