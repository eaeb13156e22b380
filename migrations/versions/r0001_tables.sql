CREATE TABLE batch_job (
    job_id text PRIMARY KEY,
    name text NOT NULL,
    status text NOT NULL DEFAULT 'validating' CHECK (status IN (
        'validating', 'in_progress', 'finalizing', 'completed', 'failed', 'expired', 'cancelling', 'cancelled')),
    model text NOT NULL,
    spec jsonb NOT NULL,
    idempotency_key text UNIQUE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    in_progress_at timestamptz,
    finalizing_at timestamptz,
    cancelling_at timestamptz,
    finished_at timestamptz,
    expires_at timestamptz,
    ingested_at timestamptz,
    num_total bigint NOT NULL DEFAULT 0 CHECK (num_total >= 0),
    num_succeeded bigint NOT NULL DEFAULT 0 CHECK (num_succeeded >= 0),
    num_errored bigint NOT NULL DEFAULT 0 CHECK (num_errored >= 0),
    num_expired bigint NOT NULL DEFAULT 0 CHECK (num_expired >= 0),
    num_cancelled bigint NOT NULL DEFAULT 0 CHECK (num_cancelled >= 0),
    error_message text,
    output_uri text,
    error_uri text,
    current_run_id text,
    fencing_number bigint NOT NULL DEFAULT 0,
    manifest jsonb NOT NULL DEFAULT '[]',
    CONSTRAINT every_request_has_an_end CHECK (
        status NOT IN ('completed', 'failed', 'expired', 'cancelled')
        OR num_succeeded + num_errored + num_expired + num_cancelled = num_total),
    CONSTRAINT end_states_have_a_time CHECK (
        (status IN ('completed', 'failed', 'expired', 'cancelled')) = (finished_at IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX batch_job_by_time ON batch_job (created_at DESC, job_id DESC);

CREATE TABLE run (
    run_id text PRIMARY KEY,
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    fencing_number bigint NOT NULL,
    status text NOT NULL DEFAULT 'running'
        CHECK (status IN ('running', 'succeeded', 'failed', 'cancelled', 'lost')),
    engine text NOT NULL,
    policy text NOT NULL,
    details jsonb NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_expires_at timestamptz NOT NULL,
    finished_at timestamptz,
    error_message text,
    UNIQUE (job_id, fencing_number),
    CHECK ((status = 'running') = (finished_at IS NULL))
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX one_live_run_per_job ON run (job_id) WHERE status = 'running';

CREATE TABLE plan (
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    revision integer NOT NULL CHECK (revision >= 0),
    run_id text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    policy text NOT NULL,
    model text NOT NULL,
    device text NOT NULL,
    block_size integer NOT NULL,
    num_requests bigint NOT NULL,
    num_prompt_tokens bigint NOT NULL,
    estimated_output_tokens double precision NOT NULL,
    compute_s double precision NOT NULL,
    memory_s double precision NOT NULL,
    density double precision NOT NULL,
    prefix_sharing_best double precision NOT NULL,
    prefix_sharing_planned double precision NOT NULL,
    optimum_s double precision NOT NULL,
    estimated_duration_s double precision,
    plan_uri text NOT NULL,
    PRIMARY KEY (job_id, revision)
);

CREATE TABLE shard (
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    revision integer NOT NULL,
    shard_index integer NOT NULL,
    status text NOT NULL DEFAULT 'waiting' CHECK (status IN ('waiting', 'leased', 'done')),
    rank integer,
    run_id text,
    num_requests bigint NOT NULL,
    estimated_duration_s double precision,
    leased_at timestamptz,
    heartbeat_at timestamptz,
    lease_expires_at timestamptz,
    done_at timestamptz,
    PRIMARY KEY (job_id, revision, shard_index)
);

CREATE TABLE output_length_stat (
    model text NOT NULL,
    prompt_template text NOT NULL,
    num_samples bigint NOT NULL,
    sum_output_tokens double precision NOT NULL,
    sum_output_tokens_sq double precision NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model, prompt_template)
);

-- The three tables that grow by rows per request or per second are split by a hash of the job: a query that names its
-- job touches one partition, indexes and vacuum stay small, and no night has to create a partition before it can write.
-- Every number is a bigint: binary COPY cuts a number that is too large for an integer without a word.
-- They carry no foreign keys: a key check per row costs a third of the COPY, and the end-state guard counts both sides.
CREATE TABLE request (
    job_id text NOT NULL,
    seq bigint NOT NULL CHECK (seq >= 0),
    is_valid boolean NOT NULL,
    custom_id text,
    source_uri text NOT NULL,
    source_line bigint NOT NULL,
    endpoint text,
    model text,
    num_prompt_tokens bigint,
    max_tokens bigint,
    prompt_excerpt text,
    shard_index bigint,
    text_cleaned boolean NOT NULL DEFAULT false,
    PRIMARY KEY (job_id, seq)
) PARTITION BY HASH (job_id);
-- A cleaned id may collide with another that only looks the same: ingest compares ids before they are cleaned.
CREATE UNIQUE INDEX request_custom_id ON request (job_id, custom_id) WHERE is_valid AND NOT text_cleaned;

CREATE TABLE result (
    job_id text NOT NULL,
    seq bigint NOT NULL,
    run_id text,
    revision bigint,
    status text NOT NULL CHECK (status IN ('succeeded', 'errored', 'expired', 'cancelled')),
    output_text text,
    finish_reason text CHECK (finish_reason IN ('stop', 'length')),
    num_prompt_tokens bigint,
    num_cached_tokens bigint,
    num_output_tokens bigint,
    error_code text,
    error_message text,
    started_at timestamptz,
    finished_at timestamptz NOT NULL,
    raw_ref text,
    text_cleaned boolean NOT NULL DEFAULT false,
    PRIMARY KEY (job_id, seq),
    CONSTRAINT answer_or_reason CHECK (CASE status
        WHEN 'succeeded' THEN output_text IS NOT NULL AND finish_reason IS NOT NULL AND error_code IS NULL
        ELSE output_text IS NULL AND error_code IS NOT NULL END)
) PARTITION BY HASH (job_id);

CREATE TABLE batch_metric (
    job_id text NOT NULL,
    run_id text NOT NULL,
    rank bigint NOT NULL,
    batch_index bigint NOT NULL,
    revision bigint NOT NULL,
    started_at timestamptz NOT NULL,
    duration_s double precision NOT NULL,
    predicted_s double precision NOT NULL,
    num_steps bigint NOT NULL,
    num_prefill_tokens bigint NOT NULL,
    num_decode_tokens bigint NOT NULL,
    num_cached_tokens bigint NOT NULL,
    num_recomputed_tokens bigint NOT NULL,
    prefill_tokens_sq bigint NOT NULL,
    decode_kv_tokens bigint NOT NULL,
    compute_s double precision NOT NULL,
    memory_s double precision NOT NULL,
    planned_density double precision,
    measured_density double precision GENERATED ALWAYS AS (compute_s / NULLIF(memory_s, 0)) STORED,
    kv_usage double precision NOT NULL,
    num_running_left double precision NOT NULL,
    num_running_right double precision NOT NULL,
    num_preempted bigint NOT NULL,
    num_finished bigint NOT NULL,
    PRIMARY KEY (job_id, run_id, rank, batch_index)
) PARTITION BY HASH (job_id);
CREATE INDEX batch_metric_run ON batch_metric (run_id);

DO $$
BEGIN
    FOR part IN 0..15 LOOP
        EXECUTE format('CREATE TABLE request_%s PARTITION OF request FOR VALUES WITH (MODULUS 16, REMAINDER %s)', part, part);
        EXECUTE format('CREATE TABLE result_%s PARTITION OF result FOR VALUES WITH (MODULUS 16, REMAINDER %s)', part, part);
        EXECUTE format('CREATE TABLE batch_metric_%s PARTITION OF batch_metric FOR VALUES WITH (MODULUS 16, REMAINDER %s)', part, part);
    END LOOP;
END $$;
