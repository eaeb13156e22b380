-- What no writer can get past: an end state stays, and a job ends only when each of its requests has an end.
CREATE FUNCTION batch_job_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    end_states CONSTANT text[] := ARRAY['completed', 'failed', 'expired', 'cancelled'];
BEGIN
    IF OLD.status = ANY (end_states) THEN
        IF NEW.status IS DISTINCT FROM OLD.status
            OR (NEW.num_total, NEW.num_succeeded, NEW.num_errored, NEW.num_expired, NEW.num_cancelled)
               IS DISTINCT FROM
               (OLD.num_total, OLD.num_succeeded, OLD.num_errored, OLD.num_expired, OLD.num_cancelled) THEN
            RAISE EXCEPTION 'job % has ended as % and stays so', OLD.job_id, OLD.status USING ERRCODE = 'BL001';
        END IF;
    ELSIF NEW.status = ANY (end_states) THEN
        -- Counted, not believed: the counters come from the tables at the moment the job ends.
        SELECT count(*),
               count(*) FILTER (WHERE r.status = 'succeeded'), count(*) FILTER (WHERE r.status = 'errored'),
               count(*) FILTER (WHERE r.status = 'expired'), count(*) FILTER (WHERE r.status = 'cancelled')
          INTO NEW.num_total, NEW.num_succeeded, NEW.num_errored, NEW.num_expired, NEW.num_cancelled
          FROM request q LEFT JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq
         WHERE q.job_id = NEW.job_id;
        IF NEW.num_succeeded + NEW.num_errored + NEW.num_expired + NEW.num_cancelled <> NEW.num_total THEN
            RAISE EXCEPTION 'job % has % requests without a result and cannot end as %', NEW.job_id,
                NEW.num_total - NEW.num_succeeded - NEW.num_errored - NEW.num_expired - NEW.num_cancelled, NEW.status
                USING ERRCODE = 'BL002';
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER batch_job_guard BEFORE UPDATE ON batch_job FOR EACH ROW EXECUTE FUNCTION batch_job_guard();

CREATE FUNCTION run_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status <> 'running' AND NEW.status IS DISTINCT FROM OLD.status THEN
        RAISE EXCEPTION 'run % has ended as % and stays so', OLD.run_id, OLD.status USING ERRCODE = 'BL001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER run_guard BEFORE UPDATE ON run FOR EACH ROW EXECUTE FUNCTION run_guard();

-- The first answer wins and stays.
CREATE FUNCTION result_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a result is never changed (job %, seq %)', OLD.job_id, OLD.seq USING ERRCODE = 'BL001';
END $$;
CREATE TRIGGER result_guard BEFORE UPDATE ON result FOR EACH ROW EXECUTE FUNCTION result_guard();
