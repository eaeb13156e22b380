ALTER TABLE batch_job ADD COLUMN request_index text;
COMMENT ON COLUMN batch_job.request_index IS
    'Key of the object that lists the request shards which count: those of the latest checkpoint, or of the whole job.';

UPDATE batch_job SET request_index = 'jobs/' || job_id || '/requests/index.arrow' WHERE ingested_at IS NOT NULL;
-- An ingest that has not ended begins anew: its checkpoint named no keys.
UPDATE job_source s SET num_items = NULL FROM batch_job j WHERE j.job_id = s.job_id AND j.ingested_at IS NULL;
