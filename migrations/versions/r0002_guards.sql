-- A run that has ended says nothing more, not even in its details.
CREATE OR REPLACE FUNCTION run_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status <> 'running' AND NEW IS DISTINCT FROM OLD THEN
        RAISE EXCEPTION 'run % has ended as % and stays so', OLD.run_id, OLD.status USING ERRCODE = 'BL001';
    END IF;
    RETURN NEW;
END $$;

-- Revisions are made by the run that owns the job, or by nobody's run before there is one.
CREATE FUNCTION plan_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.run_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM batch_job j JOIN run r ON r.run_id = j.current_run_id
         WHERE j.job_id = NEW.job_id AND j.current_run_id = NEW.run_id AND r.status = 'running') THEN
        RAISE EXCEPTION 'run % does not own job % and cannot plan it', NEW.run_id, NEW.job_id
            USING ERRCODE = 'BL001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER plan_guard BEFORE INSERT OR UPDATE ON plan FOR EACH ROW EXECUTE FUNCTION plan_guard();
