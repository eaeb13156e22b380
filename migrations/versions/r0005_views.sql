CREATE VIEW output_length AS
SELECT model, prompt_template, max_tokens, num_samples,
       sum_output_tokens / num_samples AS mean_output_tokens,
       sqrt(greatest(sum_output_tokens_sq / num_samples - (sum_output_tokens / num_samples) ^ 2, 0))
           AS stddev_output_tokens,
       job_id, updated_at
  FROM output_length_stat;
COMMENT ON VIEW output_length IS 'How long answers are, one row for each model and prompt template.';
COMMENT ON COLUMN output_length.model IS 'The model that answered.';
COMMENT ON COLUMN output_length.prompt_template IS 'request.prompt_template.';
COMMENT ON COLUMN output_length.max_tokens IS 'Longest answer that the requests of the last job allowed.';
COMMENT ON COLUMN output_length.num_samples IS 'Answers that count; a fraction where older nights have faded.';
COMMENT ON COLUMN output_length.mean_output_tokens IS 'Mean of their output tokens.';
COMMENT ON COLUMN output_length.stddev_output_tokens IS 'Standard deviation of their output tokens.';
COMMENT ON COLUMN output_length.job_id IS 'The last job that was counted.';
COMMENT ON COLUMN output_length.updated_at IS 'When it was counted.';

CREATE OR REPLACE VIEW request_result AS
SELECT q.job_id, q.seq, q.custom_id, COALESCE(r.status, 'pending') AS status,
       r.output_text AS text, r.error_code, r.error_message AS error, r.finish_reason,
       q.prompt_excerpt, COALESCE(r.num_prompt_tokens, q.num_prompt_tokens) AS num_prompt_tokens,
       r.num_cached_tokens, r.num_output_tokens, q.max_tokens, q.endpoint, q.model AS requested_model,
       q.source_uri, q.source_line, r.started_at, r.finished_at,
       q.text_cleaned OR COALESCE(r.text_cleaned, false) AS text_cleaned, r.raw_ref, r.run_id, r.revision,
       q.prompt_template
  FROM request q LEFT JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq;
COMMENT ON COLUMN request_result.prompt_template IS
    'Hash of what requests of one kind have in common: the key of output_length.';
