ALTER TABLE engine_suspect ADD COLUMN others_answered boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN engine_suspect.num_deaths_alone IS
    'Those of them in which nothing else was in flight; at 2 it is set aside with an error row, at 4 where no other '
    'request was answered between them.';
COMMENT ON COLUMN engine_suspect.others_answered IS
    'Whether another request was answered between two deaths alone: so engines live without this one.';
