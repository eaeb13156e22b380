COMMENT ON COLUMN batch_job.logical_date IS 'The day that the job is about: {logical_date} of its sources.';
COMMENT ON COLUMN batch_job.nightly IS 'The nightly job of which this is one night; NULL for any other job.';
COMMENT ON COLUMN batch_job.write_back IS 'What came of writing results into the user''s table: num_written, num_refused, num_without_key, error.';
COMMENT ON COLUMN job_progress.logical_date IS 'The day that the job is about.';
COMMENT ON COLUMN job_progress.nightly IS 'The nightly job of which this is one night; NULL for any other job.';

COMMENT ON TABLE nightly IS 'Jobs on a schedule, as the process that serves them said last.';
COMMENT ON COLUMN nightly.name IS 'The name in the job file.';
COMMENT ON COLUMN nightly.cron IS 'When it runs, on the clocks of its time zone.';
COMMENT ON COLUMN nightly.timezone IS 'Time zone of the schedule and of its logical dates.';
COMMENT ON COLUMN nightly.catch_up IS 'Which missed nights the next one runs first: all, latest or none.';
COMMENT ON COLUMN nightly.spec IS 'The job, with {logical_date} still in it.';
COMMENT ON COLUMN nightly.home IS 'Who serves it: machine and state folder.';
COMMENT ON COLUMN nightly.since IS 'When it was first served on this schedule; earlier nights are not missed.';
COMMENT ON COLUMN nightly.served_at IS 'When a process last began to serve it.';

COMMENT ON TABLE source_reading IS 'How far jobs of a name have read a query that has a watermark: one row for each job.';
COMMENT ON COLUMN source_reading.number IS 'Grows from reading to reading; the newest one of a source is in force.';
COMMENT ON COLUMN source_reading.job_name IS 'The name in the job file.';
COMMENT ON COLUMN source_reading.source IS 'Connection and watermark column.';
COMMENT ON COLUMN source_reading.source_uri IS 'What the requests of the job name as their source.';
COMMENT ON COLUMN source_reading.job_id IS 'The job that read; or reset, where a person set the watermark.';
COMMENT ON COLUMN source_reading.watermark IS 'The greatest value that was read; NULL while there was none.';
COMMENT ON COLUMN source_reading.edge_ids IS 'Ids of the rows at the watermark that were read: later rows of the same value are new.';
COMMENT ON COLUMN source_reading.num_rows IS 'Rows that the job read.';
COMMENT ON COLUMN source_reading.read_at IS 'When the reading was complete.';
COMMENT ON COLUMN source_reading.taken_over_by IS 'The later job that read again what this one left without a result.';

COMMENT ON TABLE source_object IS 'Objects that jobs of a name have read, for jobs that read only new ones.';
COMMENT ON COLUMN source_object.job_name IS 'The name in the job file.';
COMMENT ON COLUMN source_object.uri IS 'The object.';
COMMENT ON COLUMN source_object.etag IS 'Its version.';
COMMENT ON COLUMN source_object.job_id IS 'The job that read it.';
COMMENT ON COLUMN source_object.read_at IS 'When the reading was complete.';
COMMENT ON COLUMN source_object.taken_over_by IS 'The later job that read again what this one left without a result.';

-- A view that is replaced keeps its rights; the new tables are granted where the reading role exists.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'blend_read_only') THEN
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO blend_read_only', current_schema());
    END IF;
END $$;
