"""A table of the user's that takes results: what it must have, and the statement that upserts into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from blend_core.errors import ConfigurationError

_TEXT, _ENUM, _TIME = "S", "E", "D"  # pg_type.typcategory


@dataclass(frozen=True, slots=True)
class WriteBackTarget:
    """A table of the user's and what its columns take.

    Attributes:
        url: Postgres URL.
        table: `table` or `schema.table`, exactly as it is named there.
        key_column: unique column that takes `custom_id`.
        columns: column by field of a result: text, status, error, model, job_id, finished_at.
    """

    url: str = field(repr=False)
    table: str
    key_column: str
    columns: Mapping[str, str]

    @property
    def takes_errors(self) -> bool:
        """Whether requests without an answer are written: only where a column tells them apart."""
        return "status" in self.columns or "error" in self.columns


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column's type.

    Attributes:
        type_name: as the server writes it, with its modifier (`character varying(5)`).
        category: `pg_type.typcategory`.
    """

    type_name: str
    category: str


def upsert_statement(target: WriteBackTarget, columns: Mapping[str, TargetColumn]) -> sql.Composed:
    """Updates what is there and inserts the rest. Its parameters are arrays of one length: ids, then one for
    each of the target's columns. Its one row says how many the table took; ids that are one key to the table
    are refused together.
    """
    # A plain upsert would ask a row that is there for every column that must not be NULL.
    names = [target.key_column, *target.columns.values()]
    given = [sql.SQL(f"given_{number}") for number in range(len(names))]
    types = ["text"] + ["timestamptz" if name == "finished_at" else "text" for name in target.columns]
    values = [_cast(column, columns[name]) for column, name in zip(given, names, strict=True)]
    identifiers = [_name(name) for name in names]
    return sql.SQL(
        "WITH given ({given}) AS (SELECT * FROM unnest({arrays})),"
        " updated AS (UPDATE {table} AS target SET {assignments} FROM given"
        " WHERE target.{key} = {key_value} RETURNING {id} AS id),"
        # The key of a row that is not there may be one that the table would make itself.
        " inserted AS (INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {values} FROM given"
        " WHERE NOT EXISTS (SELECT FROM updated WHERE updated.id = {id})"
        " ON CONFLICT ({key}) DO UPDATE SET {excluded} RETURNING 1)"
        " SELECT (SELECT count(*) FROM updated) + (SELECT count(*) FROM inserted)"
    ).format(
        given=sql.SQL(", ").join(given),
        arrays=sql.SQL(", ".join(f"%s::{kind}[]" for kind in types)),
        table=_name(*_parts(target.table)),
        assignments=sql.SQL(", ").join(
            sql.SQL("{} = {}").format(name, value)
            for name, value in zip(identifiers[1:], values[1:], strict=True)
        ),
        key=identifiers[0],
        key_value=values[0],
        id=given[0],
        names=sql.SQL(", ").join(identifiers),
        values=sql.SQL(", ").join(values),
        excluded=sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in identifiers[1:]),
    )


def _cast(value: sql.SQL, column: TargetColumn) -> sql.Composable:
    """A text goes into a text column as it is, so that one that is too long is refused and not cut."""
    if column.category == _TEXT:
        return value
    return sql.SQL("{}::{}").format(value, sql.SQL(column.type_name.replace("%", "%%")))


def _name(*parts: str) -> sql.SQL:
    """A quoted name for a statement that has parameters, where a `%` is one unless it is doubled."""
    return sql.SQL(sql.Identifier(*parts).as_string(None).replace("%", "%%"))


def _parts(table: str) -> list[str]:
    return table.split(".", 1)


def target_columns(connection: psycopg.Connection, target: WriteBackTarget) -> dict[str, TargetColumn]:
    """The columns that take something, by name.

    Raises:
        ConfigurationError: the table or one of them is not there, or cannot take what it is to take.
    """
    name = sql.Identifier(*_parts(target.table)).as_string(connection)
    relation = connection.execute(
        "SELECT oid, relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass(%s)", (name,)
    ).fetchone()
    if relation is None:
        raise ConfigurationError(
            f"write_back: there is no table {target.table} (names are taken as written, capitals included); "
            "create it, or correct `table`."
        )
    oid, is_table = relation
    if not is_table:
        raise ConfigurationError(
            f"write_back: {target.table} is a view or the like, where no key is unique; name the table "
            "behind it as `table`."
        )
    found = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), t.typcategory, a.attgenerated <> '',"
            " a.attidentity = 'a',"
            # The upsert reads the key to find rows and each other column by way of EXCLUDED.
            " has_column_privilege(a.attrelid, a.attnum, 'SELECT')"
            " AND has_column_privilege(a.attrelid, a.attnum, 'INSERT')"
            " AND has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),"
            " EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid"
            " AND i.indimmediate AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum AND i.indpred IS NULL)"
            " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
            " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped",
            (oid,),
        )
    }
    fields = {target.key_column: "custom_id"} | {column: name for name, column in target.columns.items()}
    missing = [column for column in fields if column not in found]
    if missing:
        raise ConfigurationError(
            f"write_back: {target.table} has no column {', '.join(missing)}; add it, or correct `columns`."
        )
    for column, what in fields.items():
        type_name, category, is_generated, is_own_identity, is_allowed, is_unique = found[column]
        if is_generated or (is_own_identity and column != target.key_column):
            raise ConfigurationError(f"write_back: {target.table}.{column} is generated and takes no value.")
        if not is_allowed:
            raise ConfigurationError(
                f"write_back: the login may not write {target.table}.{column}; grant it SELECT, INSERT and "
                "UPDATE."
            )
        if column == target.key_column:
            if not is_unique:
                raise ConfigurationError(
                    f"write_back: {target.table}.{column} is not unique, and rows are found by it; make it "
                    "the primary key or give it a unique index."
                )
        elif category not in {"status": (_TEXT, _ENUM), "finished_at": (_TEXT, _TIME)}.get(what, (_TEXT,)):
            raise ConfigurationError(
                f"write_back: {target.table}.{column} is of type {type_name} and cannot take `{what}`."
            )
    return {column: TargetColumn(found[column][0], found[column][1]) for column in fields}
