COMMENT ON COLUMN batch_job.write_back IS 'What came of writing results into the user''s table: num_written, num_refused, num_dropped, num_without_key, error.';
