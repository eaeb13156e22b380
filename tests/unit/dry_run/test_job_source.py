"""What a dry run of a job file asks the database."""

from flows.dry_run.job_source import priors_of_templates
from storage.database import Database


def test_a_database_that_does_not_answer_tells_nothing_and_that_is_said() -> None:
    told: list[str] = []
    # Nothing listens there.
    database = Database("postgresql://blend@127.0.0.1:9/blend")
    priors = priors_of_templates(database, "tiny", ["a", "b"], told.append)
    assert priors.telling().tolist() == [-1, -1]
    (line,) = told
    assert line.startswith("earlier nights are not known: ")
    assert "127.0.0.1:9" in line
