"""Stores a queue in a PostgreSQL database, for hosts that share nothing else.

Optuna's tables hold the attempts. Mutual exclusion is an advisory lock of the database session; the server frees it
when the connection dies. Two more tables are `cohort_studies`, with the document of each study, and `cohort_leases`,
with the worker of each running trial, the time of its last heartbeat and its progress. All times are the database's:
the hosts' clocks do not matter.

A lease ends when its worker's process is gone (seen from the same machine) or its last heartbeat is older than
GRACE_SECONDS; a restart of the server gives every lease a new grace period, because nobody could renew it. A worker
that cannot reach the database continues, and ends at once when it finds another's token in its lease. Taking a lease is
a compare-and-swap, so even two holders of the lock (one cut off, one new) cannot run one trial.
"""

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ...base.addresses import shown, without_secrets
from ...record.run import read_progress
from ...settings.errors import SpecError
from ...study.storage.base import Lease, Storage, StorageUnavailable, is_alive, this_process

FORM = "postgresql://USER:PASSWORD@HOST:5432/DATABASE"
BEAT_SECONDS = 5.0
GRACE_SECONDS = 60.0  # how old the last heartbeat of a worker on another machine may be
CONNECT_SECONDS = 10
LOCK_SECONDS = 60  # how long to wait for the study's lock before the storage counts as unreachable
TABLES = (
    "CREATE TABLE IF NOT EXISTS cohort_studies (study text PRIMARY KEY, document text NOT NULL)",
    """CREATE TABLE IF NOT EXISTS cohort_leases (
        study text NOT NULL, trial text NOT NULL, token text NOT NULL, host text NOT NULL, pid bigint NOT NULL,
        started double precision NOT NULL, beat timestamptz NOT NULL, progress text NOT NULL DEFAULT '{}',
        PRIMARY KEY (study, trial))""",
)
# A dead host's session, and with it its lock, is noticed after 10 + 3 x 5 s, not after the system's two hours.
SESSION = f"""SET lock_timeout = '{LOCK_SECONDS}s'; SET tcp_keepalives_idle = 10;
    SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"""


def open_storage(study: str, url: str) -> "PostgresStorage | None":
    """The queue of a study in the database; None for a URL that is not PostgreSQL's. SpecError without psycopg."""
    if (full := _with_driver(url)) is None:
        return None
    if find_spec("psycopg") is None:
        raise SpecError("a storage in PostgreSQL needs psycopg 3; pip install 'cohort-rl[postgres]'")
    return PostgresStorage(study, full, shown(url))


class PostgresStorage(Storage):
    """The queue of one study in a database; starting the study creates the tables."""

    def __init__(self, study: str, url: str, place: str) -> None:
        self._study, self._url, self.place = study, url, place
        self.document_place = f"the table cohort_studies of {self.place}"

    def check(self) -> None:
        with self.errors(), self._engine.connect():
            pass

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, StorageInternalError, PoolTimeoutError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            lost = isinstance(cause, DBAPIError) and cause.connection_invalidated
            if not lost and not isinstance(cause, OperationalError | InterfaceError | PoolTimeoutError):
                raise
            words = str(getattr(cause, "orig", cause)).strip().splitlines() or [type(cause).__name__]
            raise StorageUnavailable(
                f"the storage {self.place} cannot be used now: {without_secrets(words[0], self._url)}; "
                "check `storage` (or COHORT_STORAGE) and that the server runs and lets this host in"
            ) from None

    def exists(self) -> bool:
        return self.read_document() is not None

    @cached_property
    def optuna(self) -> BaseStorage:
        with self._locked("tables"):  # two hosts may start at once
            return RDBStorage(self._url, engine_kwargs={"pool": self._engine.pool})

    def lock(self) -> AbstractContextManager[None]:
        return self._locked(f"study/{self._study}")

    def take_lease(self, directory: Path) -> Lease | None:
        trial, token = directory.name, uuid.uuid4().hex
        before = self._leases([trial]).get(trial)
        if before is not None and self._is_held(before):
            return None
        statement = """INSERT INTO cohort_leases (study, trial, token, host, pid, started, beat)
               VALUES (:study, :trial, :token, :host, :pid, :started, clock_timestamp())
               ON CONFLICT (study, trial) DO UPDATE SET token = excluded.token, host = excluded.host,
                   pid = excluded.pid, started = excluded.started, beat = excluded.beat
               WHERE cohort_leases.token = :before RETURNING trial"""
        if not self._rows(statement, trial=trial, token=token, before=before and before["token"], **this_process()):
            return None
        renew, give_up = partial(self._renew, directory, token), partial(self._give_up, directory, token)
        return Lease(f"the lease of {trial}", BEAT_SECONDS, renew, give_up)

    def held(self, directories: Collection[Path]) -> set[Path]:
        leases = self._leases([directory.name for directory in directories])
        return {d for d in directories if d.name in leases and self._is_held(leases[d.name])}

    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        leases = self._leases([directory.name for directory in directories])
        found = {d: json.loads(leases[d.name]["progress"]) for d in directories if d.name in leases}
        here = {d: read_progress(d) for d in directories}  # newer than the last heartbeat, if it is here
        return {d: max(found.get(d, {}), here[d], key=lambda p: (p.get("step", -1), p.get("done", 0))) for d in here}

    def read_document(self) -> dict[str, Any] | None:
        if not self._rows("SELECT 1 WHERE to_regclass('cohort_studies') IS NOT NULL"):
            return None
        rows = self._rows("SELECT document FROM cohort_studies WHERE study = :study")
        return json.loads(rows[0]["document"]) if rows else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        with self._locked("tables"):
            for statement in TABLES:
                self._rows(statement)
        statement = """INSERT INTO cohort_studies VALUES (:study, :document)
               ON CONFLICT (study) DO UPDATE SET document = excluded.document"""
        self._rows(statement, document=json.dumps(document))

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            with suppress(KeyError):  # a command was killed here
                optuna.delete_study(study_name=name, storage=self.optuna)
        self._rows("DELETE FROM cohort_leases WHERE study = :study")
        self._rows("DELETE FROM cohort_studies WHERE study = :study")

    def _renew(self, directory: Path, token: str) -> bool:
        """Write a heartbeat and the trial's progress, which every heartbeat carries."""
        statement = """UPDATE cohort_leases SET beat = clock_timestamp(), progress = :progress
               WHERE study = :study AND trial = :trial AND token = :token RETURNING trial"""
        progress = json.dumps(read_progress(directory))
        return bool(self._rows(statement, trial=directory.name, token=token, progress=progress))

    def _give_up(self, directory: Path, token: str) -> None:
        """Let others take the lease; the trial's progress stays."""
        self._renew(directory, token)
        statement = "UPDATE cohort_leases SET token = '' WHERE study = :study AND trial = :trial AND token = :token"
        self._rows(statement, trial=directory.name, token=token)

    @cached_property
    def _engine(self) -> sqlalchemy.Engine:
        """An engine with two idle connections per process: one for the lock, one for the operations under it.

        No connection is tested before its use, because that would be a round trip for every operation, and every
        operation can be repeated.
        """
        engine = sqlalchemy.create_engine(
            self._url, pool_size=2, max_overflow=3,
            connect_args={"connect_timeout": CONNECT_SECONDS, "application_name": f"cohort {self._study}"[:63],
                          "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3},
        )  # fmt: skip

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _: object) -> None:
            connection.autocommit = True
            connection.execute(SESSION)
            connection.autocommit = False

        return engine.execution_options(isolation_level="AUTOCOMMIT")  # of ours; Optuna has its transactions

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold an advisory lock of this database, on a separate connection."""
        name = {"key": f"cohort/{key}"}
        with self.errors(), self._engine.connect() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(hashtextextended(:key, 0))"), name)
            try:
                yield
            finally:
                try:
                    connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))"), name)
                except DBAPIError:
                    connection.invalidate()  # the server frees the lock with the session

    def _leases(self, trials: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """The leases of the trials that ever had one; `fresh` if the last heartbeat is recent enough."""
        if not trials:
            return {}
        statement = """SELECT trial, token, host, pid, started, progress, clock_timestamp()
                 - greatest(beat, pg_postmaster_start_time()) < make_interval(secs => :grace) AS fresh
               FROM cohort_leases WHERE study = :study AND trial = ANY(:trials)"""
        return {row["trial"]: row for row in self._rows(statement, trials=list(trials), grace=GRACE_SECONDS)}

    def _is_held(self, lease: Mapping[str, Any]) -> bool:
        if not lease["token"]:
            return False
        alive = is_alive(lease["host"], lease["pid"], lease["started"])
        return lease["fresh"] if alive is None else alive

    def _rows(self, statement: str, **values: Any) -> list[Mapping[str, Any]]:
        """Run a statement; the rows that it returns, if it is one that does."""
        with self.errors(), self._engine.connect() as connection:
            result = connection.execute(sqlalchemy.text(statement), {"study": self._study, **values})
            return [dict(row) for row in result.mappings()] if result.returns_rows else []


def _with_driver(url: str) -> str | None:
    """The URL in SQLAlchemy's form; None for a URL that cannot be parsed or is another database's."""
    try:
        parsed = sqlalchemy.make_url(re.sub(r"^postgres(ql)?(\+psycopg)?://", "postgresql+psycopg://", url))
    except (ArgumentError, ValueError):
        return None
    if parsed.drivername != "postgresql+psycopg" or not parsed.database or url.count("@") > 1:
        return None
    return parsed.render_as_string(hide_password=False)
