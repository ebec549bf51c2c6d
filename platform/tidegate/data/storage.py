"""A folder on this machine or in an object store, by one layer: pyarrow's filesystems.

`s3://bucket/path` takes region, credentials and endpoint from AWS's usual places (`AWS_ENDPOINT_URL` for a store that
is not Amazon's); anything else without a scheme is a local path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from tidegate.checkpoint.files import write_synced
from tidegate.errors import DataError


@dataclass(frozen=True, slots=True)
class Folder:
    """Where it is, and how it is reached. Travels to other processes."""

    filesystem: Any
    path: str

    @classmethod
    def at(cls, place: str | Path) -> Folder:
        """
        Raises:
            DataError: nothing known can read such an address.
        """
        text = str(place)
        try:
            if "://" not in text:
                return cls(fs.LocalFileSystem(), str(Path(text).absolute()))
            return cls(*fs.FileSystem.from_uri(text))
        except (ValueError, OSError) as error:
            raise DataError(f"{text}: {error}\nhint: a local path, s3://bucket/path or gs://bucket/path") from None

    def __str__(self) -> str:
        return self.path if self.is_local else f"{self.filesystem.type_name}://{self.path}"

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def __truediv__(self, name: str) -> Folder:
        return Folder(self.filesystem, f"{self.path}/{name}")

    def open(self, name: str) -> Any:
        """For reading at any place; OSError where it can't be had."""
        return self.filesystem.open_input_file(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        """The whole file; OSError where it can't be had."""
        with self.open(name) as file:
            data: bytes = file.read()
        return data

    def write(self, name: str, data: bytes | memoryview | pa.Buffer) -> None:
        """Write a file that appears whole or not at all."""
        whole = memoryview(data)
        if self.is_local:
            path = Path(self.path, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_synced(path, whole)
            return
        # An object appears when its upload is complete.
        with self.filesystem.open_output_stream(f"{self.path}/{name}") as file:
            file.write(whole)

    def files(self) -> dict[str, int]:
        """Sizes in bytes by path inside the folder, sorted; hidden ones left out. Empty where there is no folder."""
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        inside = {
            info.path[len(self.path.rstrip("/")) + 1 :]: info.size
            for info in self.filesystem.get_file_info(selector)
            if info.type == fs.FileType.File
        }
        return {name: inside[name] for name in sorted(inside) if not any(part[0] == "." for part in name.split("/"))}

    def size(self, name: str) -> int | None:
        """In bytes; None where there is no such file."""
        [info] = self.filesystem.get_file_info([f"{self.path}/{name}"])
        return info.size if info.type == fs.FileType.File else None

    def remove(self) -> None:
        """The folder and all in it; nothing where there is none."""
        [info] = self.filesystem.get_file_info([self.path])
        if info.type == fs.FileType.Directory:
            self.filesystem.delete_dir(self.path)
