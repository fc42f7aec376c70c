"""Reading a checkpoint's files without running what is in them.

``torch.distributed.checkpoint`` keeps its table of contents, and all that is no tensor, as pickles,
and unpickling runs whatever a file names. Here the table may name nothing but what torch writes
into it, and values are read with ``weights_only=True``: tensors, numbers, strings and collections
of these. So a folder from anywhere can be refused, but cannot do anything.
"""

import io
import pickle
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["PlainPlanner", "PlainReader", "read_table"]

_TABLE = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)
_NAMES: dict[tuple[str, str], Any] = {(one.__module__, one.__qualname__): one for one in _TABLE}
_NAMES["torch", "Size"] = torch.Size
_NAMES["torch.serialization", "_get_layout"] = torch.serialization._get_layout
_NAMES |= {("pathlib", name): PurePath for name in ("PosixPath", "PurePosixPath", "WindowsPath")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_table(data: bytes) -> metadata.Metadata:
    """The table of contents in a ``.metadata`` file.

    Arguments:
        data: all that is in the file.
    """
    table = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(table, metadata.Metadata):
        raise pickle.UnpicklingError("its table of contents is none")
    for info in (table.storage_data or {}).values():
        path = getattr(info, "relative_path", None)
        if not isinstance(path, str) or PurePath(path).name != path:
            raise pickle.UnpicklingError(f"it names a file that is not in its folder ({path!r})")
    return table


class PlainReader(filesystem.FileSystemReader):
    """Of torch's files in one folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            table = read_table(file.read())
        table.storage_meta = getattr(table, "storage_meta", None) or metadata.StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class PlainPlanner(DefaultLoadPlanner):
    """Where what is read goes, as torch has it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # which runs nothing, and raises for other objects
        value.seek(0)
        super().load_bytes(read_item, value)
