"""Measure what the extras of this package download and take on disk.

    python tools/installation_sizes.py cuda12 cuda12-light

It makes an environment for each extra in a temporary folder, and removes it; an empty name is the package without an extra.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def size(folder: Path) -> int:
    """Return the bytes of all files of a folder; a file with several names counts once."""
    files = {(found.st_dev, found.st_ino): found.st_size for found in (p.lstat() for p in folder.rglob("*") if p.is_file())}
    return sum(files.values())


def main() -> None:
    """Print a line for each extra."""
    for extra in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
            empty, python = size(folder / "venv"), folder / "venv" / "bin" / "python"
            wanted, pip = f"{ROOT}[{extra}]" if extra else str(ROOT), [python, "-m", "pip", "-q", "--disable-pip-version-check"]
            started = time.monotonic()
            subprocess.run([*pip, "download", "-d", folder / "wheels", wanted], check=True)
            downloaded = time.monotonic()
            subprocess.run([*pip, "install", "--find-links", folder / "wheels", wanted], check=True)
            installed = time.monotonic() - downloaded
            wheels, disk = size(folder / "wheels") / 1e6, (size(folder / "venv") - empty) / 1e6
            seconds = f"{downloaded - started:.0f} s to download, {installed:.0f} s to install"
            print(f"[{extra}]: {wheels:.0f} MB of download, {disk:.0f} MB on disk; {seconds}", flush=True)


if __name__ == "__main__":
    main()
