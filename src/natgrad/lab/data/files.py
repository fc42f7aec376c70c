"""Files as a whole, plain or compressed by gzip, and what is said about those that are spoilt."""

import gzip
import zlib
from pathlib import Path

from natgrad.lab.data.locations import spoilt
from natgrad.lab.data.sources import Source
from natgrad.tables import bytes_text

# Text and pictures become a tenth at most; a file that was made to fill the memory, a thousandth.
_RATIO = 100
_UNASKED = 1 << 28


def read(path: Path, source: Source | None = None) -> bytearray:
    """What is in it, decompressed if its name ends in ``.gz``."""
    try:
        if path.suffix != ".gz":
            return bytearray(path.read_bytes())
        most = max(_UNASKED, _RATIO * path.stat().st_size)
        with gzip.open(path) as file:
            data = bytearray(file.read(most + 1))
        if len(data) > most:
            raise spoilt(
                path,
                f"would be more than {bytes_text(most)} when decompressed, {_RATIO} times its size",
                source,
            )
        return data
    except EOFError as error:
        raise spoilt(path, "is truncated: the compressed data end too early", source) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise spoilt(path, f"is no gzip file or is corrupt ({error})", source) from error
    except OSError as error:
        raise spoilt(path, f"cannot be read ({error.strerror})", source) from error
