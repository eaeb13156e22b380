CREATE OR REPLACE VIEW job_progress AS
SELECT job_id, name, model, status,
       num_total AS total, num_succeeded AS succeeded, num_errored AS errored, num_expired AS expired,
       num_cancelled AS cancelled,
       num_total - num_succeeded - num_errored - num_expired - num_cancelled AS pending,
       round(100.0 * (num_succeeded + num_errored + num_expired + num_cancelled) / NULLIF(num_total, 0), 1)
           AS percent_done,
       created_at, in_progress_at, finished_at,
       round(extract(epoch FROM COALESCE(finished_at, clock_timestamp()) - created_at)::numeric, 1) AS age_s,
       error_message, output_uri, error_uri, logical_date, nightly
  FROM batch_job;
