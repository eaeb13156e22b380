-- Shards are written by the run that owns the job, and one that is done stays so.
CREATE FUNCTION shard_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.status = 'done' THEN
        RAISE EXCEPTION 'shard % of run % is done and stays so', OLD.shard_index, OLD.run_id
            USING ERRCODE = 'BL001';
    END IF;
    IF NOT EXISTS (
        SELECT FROM batch_job j JOIN run r ON r.run_id = j.current_run_id
         WHERE j.job_id = NEW.job_id AND j.current_run_id = NEW.run_id AND r.status = 'running') THEN
        RAISE EXCEPTION 'run % does not own job % and cannot lease its shards', NEW.run_id, NEW.job_id
            USING ERRCODE = 'BL001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER shard_guard BEFORE INSERT OR UPDATE ON shard FOR EACH ROW EXECUTE FUNCTION shard_guard();
