-- A role belongs to the whole server, so another database may have made it already. Where the owner may not create
-- roles (some hosted servers), the tables work all the same and an administrator grants reading.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'blend_read_only') THEN
        BEGIN
            CREATE ROLE blend_read_only NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN RETURN;
        END;
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO blend_read_only', current_schema());
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO blend_read_only', current_schema());
    EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA %I GRANT SELECT ON TABLES TO blend_read_only', current_schema());
END $$;
