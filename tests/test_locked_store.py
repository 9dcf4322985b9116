"""A start names an MLflow store that another process has locked or that is damaged, and leaves it alone."""

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import fake_trials
import pytest
from cohort.harness.mirror import store as mlflow_store
from cohort.harness.mirror.follow import catch_up
from cohort.harness.mirror.store import check_runs_folder

HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1])
held.execute("BEGIN " + sys.argv[2])
print(flush=True)
sys.stdin.readline()
"""


@contextmanager
def held(store: Path, lock: str) -> Iterator[None]:
    """Meanwhile another process has locked the store."""
    command = [sys.executable, "-c", HOLD, str(store), lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield
        process.kill()


@pytest.fixture
def store(tmp_path, tmp_path_factory) -> Path:
    return Path(shutil.copy(fake_trials.empty_store(tmp_path_factory), tmp_path / "mlflow.db"))


@pytest.mark.slow
@pytest.mark.attack("Locked MLflow store at the start")
@pytest.mark.parametrize("lock", ["EXCLUSIVE", "IMMEDIATE"])
def test_a_store_that_stays_locked_ends_the_start_in_one_sentence_unless_it_can_be_read(store, lock, monkeypatch):
    monkeypatch.setattr(mlflow_store, "LOCK_SECONDS", 0.0)
    before = store.read_bytes()
    refused = pytest.raises(ValueError, match=r"was locked for 0 s by another process, .*; end that and start again")
    with held(store, lock), refused if lock == "EXCLUSIVE" else nullcontext():
        check_runs_folder(store.parent)
    assert store.read_bytes() == before


@pytest.mark.attack("Damaged MLflow store")
@pytest.mark.parametrize("damage", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_store_is_said_to_be_and_left_alone_and_so_are_the_records_beside_it(store, damage, caplog):
    store.write_bytes(damage)
    with pytest.raises(ValueError, match=r"is not an MLflow store, or it is damaged .*; nothing was changed") as error:
        check_runs_folder(store.parent)
    assert "move" not in str(error.value)
    catch_up(store.parent)
    (said,) = [record.message for record in caplog.records]
    assert re.match(rf"the MLflow store in '{store.parent}' cannot be read \(.*\); the records are whole", said)
    assert store.read_bytes() == damage


def test_the_schema_of_the_installed_mlflow_is_the_one_that_it_gives_a_new_store(store):
    with closing(sqlite3.connect(store)) as database:
        (found,) = database.execute("SELECT version_num FROM alembic_version").fetchall()
    assert found == (mlflow_store._schema_version(),)


@pytest.mark.attack("Writer of the MLflow store killed in a transaction")
def test_a_transaction_that_a_kill_left_half_done_is_rolled_back(store, tmp_path):
    with closing(sqlite3.connect(store, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")  # so that changed pages reach the file before the end
        database.execute("BEGIN")
        database.execute("CREATE TABLE junk AS SELECT zeroblob(100000)")
        torn = tmp_path / "torn"
        torn.mkdir()
        for name in ("mlflow.db", "mlflow.db-journal"):
            shutil.copy(tmp_path / name, torn / name)
    assert (torn / "mlflow.db-journal").stat().st_size
    check_runs_folder(torn)
    with closing(sqlite3.connect(torn / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'junk'").fetchone() == (0,)
