"""Packs and unpacks capsules: a zip file with all that verifies a study, and `manifest.json` with each file's SHA-256.

A capsule may come from anybody, so its names, sizes and file types are checked before it is unpacked into a temporary
folder, which is deleted afterwards. Nothing in it is run.
"""

import json
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base.files import FORMAT, MANIFEST, sha256
from ..record.events import EVENTS, read_history
from ..record.evidence import EVIDENCE, is_inside, read_evidence
from ..record.study import STUDY, StudyRecord
from .settings import runs_folder
from .verification import Findings, Place, verify_study

MOST_FILES = 500_000
MOST_INFLATION = 200  # bytes in all for each of the zip file, beyond ALLOWANCE; text of runs takes 5 to 40
ALLOWANCE = 2**22
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal studies give equal capsules


def verify(study: str | Path, *, runs: str | Path | None = None) -> tuple[StudyRecord, Findings]:
    """Recompute every number of the report of a study (of the runs folder, a folder or a capsule); changes nothing."""
    own = runs_folder(runs) / "studies" / study
    place = own if own.is_dir() else Path(study)
    if place.is_dir():
        return verify_study(place)
    if not place.is_file():
        raise ValueError(f"'{study}' is not a study in '{runs_folder(runs)}', a study's folder or a capsule")
    with unpacked(place) as folder:
        record, findings = verify_study(folder)
        for name, stated in _manifest(place, folder).items():
            if (found := sha256(folder / name)) != stated:
                Place(findings).differs(name, "SHA-256", stated[:16], found[:16])
        return record, findings


def export_capsule(folder: Path, target: Path) -> int:
    """Write the capsule of the study in a folder; returns the number of its files. ValueError if files are missing."""
    if not (folder / STUDY).is_file():
        raise ValueError(f"'{folder}' is not the folder of a study: it has no {STUDY}")
    if target.suffix != ".zip" or target.exists() or not target.parent.is_dir():
        raise ValueError(f"a capsule must be a new .zip file in a folder that exists, got '{target}'; name another")
    found = {EVIDENCE, *read_evidence(folder).files}
    for events in [name for name in found if name.endswith(f"/{EVENTS}")]:
        found |= {events.removesuffix(EVENTS) + file for file in read_history(folder / events).kept}
    names = sorted(found)
    if bad := [name for name in names if not is_inside(name)]:
        raise ValueError(f"the files of a study must be in its folder, got {bad[0]!r:.80}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        lacks = f"lacks {len(missing)} of its files, '{missing[0]}' among them"
        raise ValueError(f"study '{folder.name}' {lacks}; see: cohort verify {folder.name}")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as capsule:
            hashes = {name: sha256(folder / name) for name in names}
            manifest = {"format": FORMAT, "study": folder.name, "files": hashes}
            capsule.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), json.dumps(manifest, indent=1))
            for name in names:
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, (folder / name).stat().st_size
                with (folder / name).open("rb") as source, capsule.open(info, "w") as copy:
                    shutil.copyfileobj(source, copy, 2**20)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return len(names)


@contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """The study's folder of a capsule, for as long as the context lasts. `verify` checks the content of its files.

    ValueError for a file that is not a capsule, or does not have exactly the files of its manifest.
    """
    try:
        with zipfile.ZipFile(file) as capsule, tempfile.TemporaryDirectory(prefix="cohort-capsule-") as scratch:
            members = _checked(file, capsule.infolist())
            folder = Path(scratch) / "study"
            capsule.extractall(folder, members)
            listed, found = {*_manifest(file, folder)}, {member.filename for member in members} - {MANIFEST}
            for names, words in ((listed - found, "lacks"), (found - listed, "has, beyond its manifest,")):
                if names:
                    raise ValueError(f"capsule '{file}' {words} {len(names)} files, '{min(names)}' among them")
            yield folder
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"'{file}' is not a capsule, or it is damaged ({error}); get another copy") from None


def _checked(file: Path, members: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """The members of a zip file that may be unpacked: all of them. ValueError otherwise."""
    size, most = sum(member.file_size for member in members), MOST_INFLATION * file.stat().st_size + ALLOWANCE
    if len(members) > MOST_FILES or size > most:
        got, allowed = f"{len(members)} files of {size / 1e6:,.0f} MB", f"{MOST_FILES} files, {most / 1e6:,.0f} MB"
        rule = f"more than a study takes ({allowed} for its size)"
        raise ValueError(f"capsule '{file}' would unpack to {got}, {rule}; nothing was unpacked")
    seen: set[str] = set()
    for member in members:
        kind = stat.S_IFMT(member.external_attr >> 16)
        is_plain = kind in (0, stat.S_IFREG) and member.orig_filename == member.filename
        if not is_plain or not is_inside(member.filename):
            rule = "must hold plain files with names in its own folder"
            raise ValueError(f"capsule '{file}' {rule}, got {member.orig_filename!r:.80}; nothing was unpacked")
        if member.filename.casefold() in seen:
            raise ValueError(f"capsule '{file}' has '{member.filename}' twice; nothing was unpacked")
        seen.add(member.filename.casefold())
    manifest = next((member for member in members if member.filename == MANIFEST), None)
    if manifest is None:
        raise ValueError(f"'{file}' is not a capsule: it has no {MANIFEST}")
    # for each file a line with its name, whose characters take at most 6 bytes each in JSON, and a hash of 64 digits
    if manifest.file_size > (most := 1000 + sum(6 * len(member.filename) + 100 for member in members)):
        rule = f"more than its {len(members)} files need ({most:,})"
        raise ValueError(
            f"capsule '{file}' has a {MANIFEST} of {manifest.file_size:,} bytes, {rule}; nothing was unpacked"
        )
    return members


def _manifest(file: Path, folder: Path) -> dict[str, str]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        hashes = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"capsule '{file}' has no readable {MANIFEST} ({error!r:.100}); get another copy") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"capsule '{file}' must have format {FORMAT}, got {manifest.get('format')!r:.20}")
    return hashes
