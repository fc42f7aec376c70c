"""Text files, plain or compressed by gzip, in UTF-8."""

import gzip
import zlib
from pathlib import Path

from natgrad.data.places import find, spoilt
from natgrad.data.rows import Split
from natgrad.data.sources import TINYSHAKESPEARE, WIKITEXT2, Source
from natgrad.errors import DataError


def read(path: Path | str, source: Source | None = None) -> str:
    """All of it, with its line ends as they are."""
    path = Path(path).expanduser()
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no text {path}: name a file that is there.") from error
    except EOFError as error:
        raise spoilt(path, "is truncated: the compressed data end too early", source) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise spoilt(path, f"is no gzip file or is corrupt ({error})", source) from error
    except UnicodeDecodeError as error:
        raise spoilt(path, f"is no text in UTF-8 (byte {error.start:,})", source) from error
    except OSError as error:
        raise spoilt(path, f"cannot be read ({error.strerror})", source) from error


def tinyshakespeare(folder: Path | str | None = None) -> str:
    """1,115,394 characters."""
    return read(find(TINYSHAKESPEARE, folder)["tinyshakespeare.txt"], TINYSHAKESPEARE)


def wikitext2(folder: Path | str | None = None) -> Split[str]:
    """WikiText-2: what to learn from, and what is meant for validation."""
    files = find(WIKITEXT2, folder)
    return Split(*(read(files[name], WIKITEXT2) for name in ("train.txt", "valid.txt")))
