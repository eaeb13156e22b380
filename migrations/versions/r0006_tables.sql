-- Nothing has written this table so far.
DROP TABLE shard;
CREATE TABLE shard (
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    run_id text NOT NULL,
    revision integer NOT NULL,
    shard_index integer NOT NULL,
    status text NOT NULL CHECK (status IN ('waiting', 'leased', 'done')),
    rank integer NOT NULL,
    fencing_number bigint NOT NULL DEFAULT 1,
    num_requests bigint NOT NULL CHECK (num_requests > 0),
    num_ended bigint NOT NULL DEFAULT 0 CHECK (num_ended BETWEEN 0 AND num_requests),
    estimated_work_s double precision,
    leased_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_expires_at timestamptz,
    done_at timestamptz,
    PRIMARY KEY (job_id, run_id, revision, shard_index),
    CHECK ((status = 'done') = (done_at IS NOT NULL)),
    CHECK (status <> 'done' OR num_ended = num_requests)
) WITH (fillfactor = 50);
COMMENT ON TABLE shard IS
    'Pieces of a plan that ranks of a run hold: those of the run that executes the job, and what earlier runs got done.';
COMMENT ON COLUMN shard.job_id IS 'The job.';
COMMENT ON COLUMN shard.run_id IS 'The run.';
COMMENT ON COLUMN shard.revision IS 'The plan''s revision that it was cut from.';
COMMENT ON COLUMN shard.shard_index IS 'Its number among the shards of run and revision, from 0.';
COMMENT ON COLUMN shard.status IS 'waiting (no rank holds it), leased or done.';
COMMENT ON COLUMN shard.rank IS 'The model replica that holds it or got it done; while it waits, the one that had it.';
COMMENT ON COLUMN shard.fencing_number IS
    'Rises when the lease is taken from a rank: results that name an earlier number are refused.';
COMMENT ON COLUMN shard.num_requests IS
    'Requests in it; fewer where another rank took those that had not started, as a shard of its own.';
COMMENT ON COLUMN shard.num_ended IS 'Those of them that have a result.';
COMMENT ON COLUMN shard.estimated_work_s IS 'compute_s + memory_s of its requests by the plan, when it was cut; NULL in a run of one rank.';
COMMENT ON COLUMN shard.leased_at IS 'When its rank got it.';
COMMENT ON COLUMN shard.heartbeat_at IS 'Last sign of life for its rank.';
COMMENT ON COLUMN shard.lease_expires_at IS 'From then on another rank may take it.';
COMMENT ON COLUMN shard.done_at IS 'When its last request ended.';
