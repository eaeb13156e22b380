CREATE VIEW job_progress AS
SELECT job_id, name, model, status,
       num_total AS total, num_succeeded AS succeeded, num_errored AS errored, num_expired AS expired,
       num_cancelled AS cancelled,
       num_total - num_succeeded - num_errored - num_expired - num_cancelled AS pending,
       round(100.0 * (num_succeeded + num_errored + num_expired + num_cancelled) / NULLIF(num_total, 0), 1)
           AS percent_done,
       created_at, in_progress_at, finished_at,
       round(extract(epoch FROM COALESCE(finished_at, clock_timestamp()) - created_at)::numeric, 1) AS age_s,
       error_message, output_uri, error_uri
  FROM batch_job;

CREATE VIEW run_summary AS
SELECT r.run_id, r.job_id, j.name AS job_name, r.engine, r.policy, r.status, r.started_at, r.finished_at,
       r.heartbeat_at, r.error_message,
       m.num_batches, m.num_steps, m.busy_s, m.num_prefill_tokens, m.num_decode_tokens, m.num_cached_tokens,
       (m.num_prefill_tokens + m.num_cached_tokens + m.num_decode_tokens) / NULLIF(m.busy_s, 0) AS tokens_per_s,
       m.num_cached_tokens::double precision / NULLIF(m.num_cached_tokens + m.num_prefill_tokens, 0)
           AS cached_share_of_prompt_tokens,
       m.compute_s, m.memory_s, m.compute_s / NULLIF(m.memory_s, 0) AS measured_density,
       m.predicted_s, m.num_preempted, r.details
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

CREATE VIEW batch_density AS
SELECT job_id, run_id, rank, batch_index, revision, started_at, duration_s, predicted_s, num_steps,
       compute_s, memory_s, planned_density, measured_density,
       num_prefill_tokens, num_decode_tokens, num_cached_tokens,
       (num_prefill_tokens + num_cached_tokens + num_decode_tokens) / NULLIF(duration_s, 0) AS tokens_per_s,
       kv_usage, num_running_left, num_running_right, num_preempted, num_finished
  FROM batch_metric;

CREATE VIEW request_result AS
SELECT q.job_id, q.seq, q.custom_id, COALESCE(r.status, 'pending') AS status,
       r.output_text AS text, r.error_code, r.error_message AS error, r.finish_reason,
       q.prompt_excerpt, COALESCE(r.num_prompt_tokens, q.num_prompt_tokens) AS num_prompt_tokens,
       r.num_cached_tokens, r.num_output_tokens, q.max_tokens, q.endpoint, q.model AS requested_model,
       q.source_uri, q.source_line, r.started_at, r.finished_at,
       q.text_cleaned OR COALESCE(r.text_cleaned, false) AS text_cleaned, r.raw_ref, r.run_id, r.revision
  FROM request q LEFT JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq;
