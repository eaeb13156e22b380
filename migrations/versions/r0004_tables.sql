ALTER TABLE batch_job
    ADD COLUMN logical_date date,
    ADD COLUMN nightly text,
    ADD COLUMN write_back jsonb;
UPDATE batch_job SET logical_date = (created_at AT TIME ZONE 'UTC')::date;
ALTER TABLE batch_job
    ALTER COLUMN logical_date SET DEFAULT (clock_timestamp() AT TIME ZONE 'UTC')::date,
    ALTER COLUMN logical_date SET NOT NULL;
CREATE INDEX batch_job_by_night ON batch_job (nightly, logical_date) WHERE nightly IS NOT NULL;

CREATE TABLE nightly (
    name text PRIMARY KEY,
    cron text NOT NULL,
    timezone text NOT NULL,
    catch_up text NOT NULL CHECK (catch_up IN ('all', 'latest', 'none')),
    spec jsonb NOT NULL,
    home text NOT NULL,
    since timestamptz NOT NULL,
    served_at timestamptz NOT NULL
);

-- No reference to batch_job: what was read stays read when an old job is deleted.
CREATE TABLE source_reading (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    job_name text NOT NULL,
    source text NOT NULL,
    source_uri text NOT NULL,
    job_id text NOT NULL,
    watermark text,
    edge_ids text[] NOT NULL DEFAULT '{}',
    num_rows bigint NOT NULL,
    read_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_over_by text,
    UNIQUE (job_name, source, job_id)
);

CREATE TABLE source_object (
    job_name text NOT NULL,
    uri text NOT NULL,
    etag text NOT NULL,
    job_id text NOT NULL,
    read_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_over_by text,
    PRIMARY KEY (job_name, uri, etag, job_id)
);
