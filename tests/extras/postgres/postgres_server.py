"""A PostgreSQL server of the tests' own: a new cluster in a temporary folder, on a free port of 127.0.0.1."""

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_trials import free_port

BINARIES = Path("/usr/lib/postgresql")


def missing() -> str | None:
    """Why no server can be started here; None where one can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "needs psycopg (pip install 'cohort-rl[postgres]')"
    if folder() is None:
        return f"needs a PostgreSQL server's binaries in {BINARIES}/*/bin or on the path (apt-get install postgresql)"
    return None


def folder() -> Path | None:
    """Where initdb and postgres are; the newest version."""
    found = sorted(BINARIES.glob("*/bin/postgres"), key=lambda f: [int(n) for n in re.findall(r"\d+", str(f))])
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


needed = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Server:
    """A running server; `stop` and `start` are what the machine it runs on may do at any time."""

    def __init__(self, home: Path, port: int, password: str, user: str | None) -> None:
        self.home, self.port, self.password, self._user = home, port, password, user

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://cohort:{self.password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        import psycopg

        name = f"db_{secrets.token_hex(6)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # pyright: ignore
        return self.url(name)

    def start(self) -> None:
        self._control("start")

    def crash(self) -> None:
        """Die as in a power cut; the next start recovers from its log."""
        self._control("stop", "--mode=immediate")

    def stop(self) -> None:
        """Cut all connections and end."""
        if (self.home / "data/postmaster.pid").exists():
            self._control("stop", "--mode=fast")

    def _control(self, *words: str) -> None:
        binaries, options = folder(), f"-p {self.port} -h 127.0.0.1 -k {self.home} -c fsync=off"
        assert binaries is not None
        command = [binaries / "pg_ctl", *words, "-D", self.home / "data", "-l", self.home / "log", "-o", options]
        subprocess.run([*command, "--wait"], check=True, capture_output=True, cwd="/", user=self._user)


@contextmanager
def server() -> Iterator[Server]:
    """A server that ends, and whose folder goes, with the `with` block. It never runs as root, which it refuses."""
    binaries, user = folder(), "nobody" if os.geteuid() == 0 else None
    assert binaries is not None
    home = Path(tempfile.mkdtemp(prefix="cohort-postgres-"))
    password = secrets.token_hex(12)
    try:
        (home / "password").write_text(password)
        if user is not None:
            for path in (home, home / "password"):
                shutil.chown(path, user)
        initdb = [binaries / "initdb", "-D", home / "data", "-U", "cohort", "-A", "scram-sha-256", "--no-sync"]
        subprocess.run(
            [*initdb, f"--pwfile={home / 'password'}", "-E", "UTF8", "--locale=C"],
            check=True, capture_output=True, cwd="/", user=user,
        )  # fmt: skip
        one = Server(home, free_port(), password, user)
        one.start()
        try:
            yield one
        finally:
            one.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
