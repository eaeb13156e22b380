ALTER TABLE batch_job ADD COLUMN table_uri text;
COMMENT ON COLUMN batch_job.table_uri IS 'The exported table of all requests, Parquet; NULL where the job did not ask for one.';
