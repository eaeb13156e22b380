ALTER TABLE run ADD COLUMN engine_deaths jsonb NOT NULL DEFAULT '[]';
COMMENT ON COLUMN run.engine_deaths IS
    'Each time its engine died: [{"died_at", "reason", "num_in_flight"}], in order of time.';

CREATE TABLE engine_suspect (
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    seq bigint NOT NULL CHECK (seq >= 0),
    group_number bigint NOT NULL,
    num_deaths bigint NOT NULL CHECK (num_deaths >= 1),
    num_deaths_alone bigint NOT NULL CHECK (num_deaths_alone BETWEEN 0 AND num_deaths),
    last_death_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (job_id, seq)
);
COMMENT ON TABLE engine_suspect IS
    'Requests that were in flight when an engine died. They run again in groups that are halved at every death.';
COMMENT ON COLUMN engine_suspect.job_id IS 'The job.';
COMMENT ON COLUMN engine_suspect.seq IS 'Number of the request in its job.';
COMMENT ON COLUMN engine_suspect.group_number IS 'Requests of one number run together, lower numbers first.';
COMMENT ON COLUMN engine_suspect.num_deaths IS 'Engines that died while it was in flight.';
COMMENT ON COLUMN engine_suspect.num_deaths_alone IS
    'Those of them in which nothing else was in flight; at 2 it is set aside with an error row.';
COMMENT ON COLUMN engine_suspect.last_death_at IS 'When the latest of them died.';

CREATE OR REPLACE VIEW run_summary AS
SELECT r.run_id, r.job_id, j.name AS job_name, r.engine, r.policy, r.status, r.started_at, r.finished_at,
       r.heartbeat_at, r.error_message,
       m.num_batches, m.num_steps, m.busy_s, m.num_prefill_tokens, m.num_decode_tokens, m.num_cached_tokens,
       (m.num_prefill_tokens + m.num_cached_tokens + m.num_decode_tokens) / NULLIF(m.busy_s, 0) AS tokens_per_s,
       m.num_cached_tokens::double precision / NULLIF(m.num_cached_tokens + m.num_prefill_tokens, 0)
           AS cached_share_of_prompt_tokens,
       m.compute_s, m.memory_s, m.compute_s / NULLIF(m.memory_s, 0) AS measured_density,
       m.predicted_s, m.num_preempted, r.details, jsonb_array_length(r.engine_deaths) AS num_engine_deaths
  FROM run r
  JOIN batch_job j USING (job_id)
  LEFT JOIN LATERAL (
        SELECT count(*) AS num_batches, sum(b.num_steps) AS num_steps,
               extract(epoch FROM max(b.started_at + make_interval(secs => b.duration_s)) - min(b.started_at))
                   ::double precision AS busy_s,
               sum(b.num_prefill_tokens) AS num_prefill_tokens, sum(b.num_decode_tokens) AS num_decode_tokens,
               sum(b.num_cached_tokens) AS num_cached_tokens, sum(b.compute_s) AS compute_s,
               sum(b.memory_s) AS memory_s, sum(b.predicted_s) AS predicted_s, sum(b.num_preempted) AS num_preempted
          FROM batch_metric b WHERE b.job_id = r.job_id AND b.run_id = r.run_id) m ON true;
COMMENT ON COLUMN run_summary.num_engine_deaths IS 'How often its engine died and was started again.';
