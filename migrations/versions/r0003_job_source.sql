-- A row for each object: a job may name tens of thousands, and whoever reads the job need not read them all.
CREATE TABLE job_source (
    job_id text NOT NULL REFERENCES batch_job ON DELETE CASCADE,
    source_index bigint NOT NULL,
    part text NOT NULL,
    uri text NOT NULL,
    size_bytes bigint,
    etag text,
    num_items bigint,
    PRIMARY KEY (job_id, source_index)
);
COMMENT ON TABLE job_source IS 'The objects and queries that a job reads, in their order.';
COMMENT ON COLUMN job_source.job_id IS 'The job.';
COMMENT ON COLUMN job_source.source_index IS 'Place in the order, from 0.';
COMMENT ON COLUMN job_source.part IS 'Field of the job that names it: s3, parquet:1, sql:1.';
COMMENT ON COLUMN job_source.uri IS 'Address of the object, or number of the query; request.source_uri says the same.';
COMMENT ON COLUMN job_source.size_bytes IS 'Size of the object when it was listed.';
COMMENT ON COLUMN job_source.etag IS 'Version of the object when it was listed; another version is not read.';
COMMENT ON COLUMN job_source.num_items IS 'Its lines or rows, bad ones included; NULL until they are all stored.';

INSERT INTO job_source (job_id, source_index, part, uri, size_bytes, etag, num_items)
SELECT j.job_id, m.place - 1, CASE WHEN m.entry ->> 'uri' LIKE 'sql:%' THEN m.entry ->> 'uri' ELSE 's3' END,
       m.entry ->> 'uri', (m.entry ->> 'size_bytes')::bigint, m.entry ->> 'etag', (m.entry ->> 'num_items')::bigint
FROM batch_job j CROSS JOIN LATERAL jsonb_array_elements(j.manifest) WITH ORDINALITY AS m (entry, place);

ALTER TABLE batch_job DROP COLUMN manifest;
