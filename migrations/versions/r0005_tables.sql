ALTER TABLE request ADD COLUMN prompt_template text;
COMMENT ON COLUMN request.prompt_template IS
    'Hash of what requests of one kind have in common: the key of output_length_stat. NULL where the length of the '
    'answer is preset, and for a bad line.';

ALTER TABLE batch_job ADD COLUMN lengths_counted_at timestamptz;
COMMENT ON COLUMN batch_job.lengths_counted_at IS
    'When its answers were counted into output_length_stat; NULL for a job that did not complete.';

-- Nothing has written this table so far; what somebody put there by hand has no histogram.
DELETE FROM output_length_stat;
ALTER TABLE output_length_stat
    ALTER COLUMN num_samples TYPE double precision,
    ADD COLUMN max_tokens bigint NOT NULL,
    ADD COLUMN bin_tokens bigint[] NOT NULL,
    ADD COLUMN bin_samples double precision[] NOT NULL,
    ADD COLUMN job_id text NOT NULL,
    ADD CHECK (num_samples > 0),
    ADD CHECK (cardinality(bin_tokens) = cardinality(bin_samples));
COMMENT ON TABLE output_length_stat IS
    'Lengths of earlier answers by model and prompt template: what the next night is planned with.';
COMMENT ON COLUMN output_length_stat.prompt_template IS
    'request.prompt_template: hash of system message or row template, endpoint, max_tokens and what else shapes the length.';
COMMENT ON COLUMN output_length_stat.num_samples IS 'Answers counted; a fraction where older nights have faded.';
COMMENT ON COLUMN output_length_stat.sum_output_tokens IS
    'Sum of their output tokens; an answer that max_tokens cut counts with max_tokens.';
COMMENT ON COLUMN output_length_stat.max_tokens IS 'Longest answer that the requests of the last job allowed.';
COMMENT ON COLUMN output_length_stat.bin_tokens IS
    'Histogram: the shortest answer of each bin that has any, rising.';
COMMENT ON COLUMN output_length_stat.bin_samples IS 'Histogram: the answers in each of these bins.';
COMMENT ON COLUMN output_length_stat.job_id IS 'The last job that was counted.';
